"""The exponential kernel: the limit of the polynomial ones, softmax attention, the delta rule in its feature space."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

from atlas_memory.memory import (
    RULES,
    DotProduct,
    Exponential,
    Gates,
    GradientDescent,
    Keep,
    Linear,
    Params,
    Polynomial,
    Rule,
    Window,
    chunkwise,
    fused_recurrent,
    l2_normalise,
    recurrent,
)

from .problems import error, random_problem

FORMS = {"recurrent": recurrent, "chunkwise": chunkwise, "incremental": fused_recurrent}
DEGREE = 16  # 1/17! = 3e-15
NAMED = [name for name, rule in RULES.items() if isinstance(rule.features, Exponential)]
LINEAR = Rule(Exponential(), Linear(), DotProduct(), Keep(), GradientDescent(normalised=False), Window(1, 4))


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(form, problem, initial):
    y, _ = form(*problem.arguments())
    gate = problem.gates
    leaves = [problem.q, problem.k, problem.v, gate.eta, gate.alpha, gate.theta, gate.gamma, *initial]
    loss = (y * randn(3, *y.shape)).sum() + 0.0 * sum(x.sum() for x in leaves)
    return [y, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMED)
def test_it_is_the_limit_of_the_polynomial_kernels(name, form):
    """The same rule with all monomials up to degree 16, a_j = 1/j!, and a lifted M_0 that is zero but in degree 1."""
    size = 1 if RULES[name].window.size == 1 else 3
    rule = RULES[name].vary(window={"size": size, "chunk": 4}, features={"kind": "Exponential", "horizon": None})
    problem = random_problem(rule, 0, batch=1, time=11, dim=2)
    feature_mapped = Polynomial(DEGREE)
    finite = replace(rule, features=feature_mapped)
    shapes = finite.shapes(2)
    initial = tuple(
        F.pad(m, (1, shape[1] - 1 - m.shape[-1])) if up else m
        for m, shape, up in zip(problem.params.initial, shapes, rule.network.feature_mapped, strict=True)
    )
    other = replace(problem, rule=finite, params=Params(initial, feature_mapped.initial_sqrt_a()))
    ours, theirs = (outputs_and_gradients(FORMS[form], p, problem.params.initial) for p in (problem, other))
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_deep_transformer_with_a_matrix_is_softmax_attention_without_its_denominator(chunk, form):
    """ATLAS Eqs. 25-26; what is missing is the same memory's answer for values of 1."""
    q, k, v = randn(0, 2, 3, 11, 4), randn(1, 2, 3, 11, 4), randn(2, 2, 3, 11, 4)
    rule, gates = LINEAR.vary(window={"chunk": chunk}), Gates(torch.ones(2, 3, 11).double())
    params = Params(tuple(torch.zeros(3, *shape).double() for shape in rule.shapes(4)))
    y, _ = FORMS[form](rule, params, q, k, v, gates)
    for t in range(11):
        weights = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1).exp()
        assert error(y[:, :, t], (weights[..., None] * v[:, :, : t + 1]).sum(-2)) < 1e-12
    denominator, _ = FORMS[form](rule, params, q, k, torch.ones_like(v), gates)
    attention = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    assert error(y / denominator, attention) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_dot_with_a_matrix_is_the_delta_rule_in_its_feature_space(form):
    """ATLAS Eqs. 27-28, c = 1: a coefficient a token, u_t = 2 eta_t (v_t - sum_{i<t} A_{t-1,i} u_i exp(k_i.k_t)), A the
    products of alpha, and y_t = sum_{i<=t} A_{t,i} u_i exp(k_i.q_t)."""
    rule = replace(RULES["dot"], network=Linear(), optimiser=GradientDescent(normalised=False), window=Window(1, 1))
    problem = random_problem(rule, 0, batch=1, heads=1, time=12, dim=3)
    problem.params = Params((torch.zeros(1, 3, 3).double(),))
    q, k, v = (x[0, 0].detach() for x in (problem.q, problem.k, problem.v))
    problem.gates = replace(problem.gates, eta=0.3 * problem.gates.eta.detach())
    eta, alpha, gamma = (
        g[0, 0].detach() for g in (problem.gates.eta, problem.gates.alpha, problem.gates.gamma[..., 0])
    )
    y, state = FORMS[form](*problem.arguments())
    u = torch.zeros(0, 3).double()
    for t in range(12):
        held = u.mT @ (k[:t] @ k[t]).exp()
        u = torch.cat([alpha[t] * u, 2 * (eta[t] * gamma[t] * (v[t] - held))[None]])
        assert error(y[0, 0, t], u.mT @ (k[: t + 1] @ q[t]).exp()) < 1e-10
    assert error(state.weights[0][0, 0, :, 3:], u.mT) < 1e-10 and torch.equal(state.keys[0, 0], k)


def erase(problem, before):
    """The problem with other tokens before one."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (x.detach().clone() for x in (problem.q, problem.k, problem.v))
    k[:, :, :before] = l2_normalise(torch.randn(k[:, :, :before].shape, generator=g, dtype=k.dtype))
    v[:, :, :before] = torch.randn(v[:, :, :before].shape, generator=g, dtype=k.dtype)
    return replace(problem, q=q, k=k, v=v)


@pytest.mark.parametrize("form", FORMS)
def test_beyond_the_horizon_nothing_is_known(form):
    """A token written on what the memory predicts carries what it saw; one of Hebbian writes does not. So at a chunk's
    end tokens that are ``horizon`` old play no part at all, and the younger all do."""
    horizon, chunk, time = 5, 4, 16
    rule = replace(LINEAR, features=Exponential(horizon)).vary(window={"chunk": chunk})
    problem = random_problem(rule, 0, batch=1, heads=1, time=time + 1, dim=3)
    y, _ = FORMS[form](*problem.arguments())
    forgotten, _ = FORMS[form](*erase(problem, time - horizon).arguments())
    seen, _ = FORMS[form](*erase(problem, time - horizon + 1).arguments())
    assert torch.equal(y[:, :, time], forgotten[:, :, time])
    assert 1e-3 < error(seen[:, :, time], y[:, :, time]) < math.inf
    # Within a chunk nothing is forgotten: before its end the oldest token is horizon + chunk - 2 behind.
    late = time - 1
    first = time - chunk - horizon
    forgotten, _ = FORMS[form](*erase(problem, first).arguments())
    seen, _ = FORMS[form](*erase(problem, first + 1).arguments())
    assert torch.equal(y[:, :, late], forgotten[:, :, late])
    assert 1e-3 < error(seen[:, :, late], y[:, :, late]) < math.inf


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size,chunk", [(1, 4), (3, 4), (4, 3)])
def test_with_a_horizon_the_state_stays_as_it_is(size, chunk, form):
    rule = RULES["swdt"].vary(features={"horizon": 5}, window={"size": size, "chunk": chunk})
    problem = random_problem(rule, 0, batch=1, heads=1, time=24, dim=3)
    state, sizes = None, []
    for t in range(24):
        with torch.no_grad():
            _, state = FORMS[form](*problem.between(t, t + 1).arguments(), state)
        sizes.append(state.nbytes)
    assert len(set(sizes[5 + chunk + size :])) == 1 and max(sizes) == sizes[-1]
    unbounded = rule.vary(features={"horizon": None})
    with torch.no_grad():
        _, grown = FORMS[form](unbounded, *problem.arguments()[1:])
    assert grown.keys.shape[2] == 24 + size - 1 and grown.nbytes > state.nbytes


def test_kernel_and_norm():
    x, y = randn(0, 5, 3), randn(1, 4, 3)
    kernel = Exponential().kernel(x, y)
    assert kernel[2, 1].item() == pytest.approx(math.exp((x[2] @ y[1]).item()), rel=1e-12)
    assert torch.allclose(Exponential().squared_norm(x), Exponential().kernel(x, x).diagonal())


@pytest.mark.parametrize("bad", [0, -1, 1.5])
def test_bad_horizon(bad):
    with pytest.raises(ValueError, match="Exponential horizon, if not None, must be an integer >= 1"):
        Exponential(bad)
