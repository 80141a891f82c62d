"""``recurrent`` against the equations written once more, by hand, one sequence and head, without the library's parts.

What the library adds to the papers, the bounded step, is written out here too.
"""

import math

import pytest
import torch

from atlas_memory.memory import RULES, recurrent

from .problems import error, random_problem

B, H, T, D, C, CHUNK = 2, 2, 11, 3, 3, 4


def phi(x, a):
    """Degree-2 features as the full tensor square: another basis, the same kernel."""
    return torch.cat([a[0] * torch.ones(1).double(), a[1] * x, a[2] * torch.outer(x, x).flatten()])


def to_square_basis(matrix, d):
    """A matrix on distinct monomials as one on (1, x, x (x) x)."""
    out = [matrix[:, 0:1], matrix[:, 1 : 1 + d]]
    square = torch.zeros(matrix.shape[0], d, d, dtype=matrix.dtype)
    column = 1 + d
    for i in range(d):
        for j in range(i, d):
            value = matrix[:, column] / (1 if i == j else math.sqrt(2))
            square[:, i, j] = value
            square[:, j, i] = value
            column += 1
    return torch.cat([*out, square.flatten(1)], 1)


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def orthogonalise(s):
    x = s / s.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.mT @ x + 2.0315 * x @ x.mT @ x @ x.mT @ x
    return x


def run(problem, b, h, objective, memory, weights, update):
    """The loop of the papers: gradient at the chunk's first memory, update, read."""
    q, k, v = (x[b, h].detach() for x in (problem.q, problem.k, problem.v))
    gates = {n: getattr(problem.gates, n)[b, h].detach() for n in ("alpha", "eta", "theta", "gamma")}
    size, chunk = problem.rule.window.size, problem.rule.window.chunk
    now, momentum, out = [w.clone() for w in weights], [torch.zeros_like(w) for w in weights], []
    for t in range(q.shape[0]):
        if t % chunk == 0:
            frozen = [w.clone().requires_grad_() for w in now]
        window = [(gates["gamma"][t, t - i], k[i], v[i]) for i in range(max(0, t - size + 1), t + 1)]
        loss = sum(g * objective(memory(frozen, k_i), v_i) for g, k_i, v_i in window)
        grads = torch.autograd.grad(loss, frozen)
        at = {n: gates[n][t] for n in ("alpha", "eta", "theta")}
        now, momentum = update(now, momentum, grads, at, frozen, window, chunk)
        out.append(memory(now, q[t]))
    return torch.stack(out).detach(), [w.detach() for w in now]


def compare(problem, make):
    y, state = recurrent(*problem.arguments())
    for b in range(B):
        for h in range(H):
            expected, weights = make(problem, b, h)
            assert error(y[b, h], expected) < 1e-10
            assert error(state.weights[-1][b, h], weights[-1]) < 1e-10


def deep(rule_name):
    """(objective, memory, weights) of the degree-2, two-layer memory of atlas and omeganet."""

    def parts(problem, h):
        a = problem.params.sqrt_a.detach()
        first, second = (w[h].detach() for w in problem.params.initial)
        return (
            lambda prediction, v: ((prediction - v) ** 2).sum(),
            lambda w, x: x + w[1] @ gelu(w[0] @ phi(x, a)),
            [to_square_basis(first, D), second],
        )

    rule = RULES[rule_name].vary(window={"size": C, "chunk": CHUNK})
    return parts, random_problem(rule, 0, B, H, T, D)


@pytest.mark.parametrize("to_start", [False, True])
def test_atlas_is_equations_32_and_33(to_start):
    """In the square basis a Newton-Schulz step is the same matrix, since the change of basis is an isometry."""
    parts, problem = deep("atlas")
    problem.rule = problem.rule.vary(retention={"to_start": to_start})

    def make(p, b, h):
        objective, memory, first = parts(p, h)

        def update(now, momentum, grads, at, *_):
            momentum = [at["theta"] * s + g for s, g in zip(momentum, grads, strict=True)]
            new = [at["alpha"] * w - at["eta"] * orthogonalise(s) for w, s in zip(now, momentum, strict=True)]
            if to_start:
                new = [w + (1 - at["alpha"]) * m for w, m in zip(new, first, strict=True)]
            return new, momentum

        return run(p, b, h, objective, memory, first, update)

    compare(problem, make)


@pytest.mark.parametrize("bounded", [True, False])
def test_omeganet_is_equation_10(bounded):
    parts, problem = deep("omeganet")
    problem.rule = problem.rule.vary(optimiser={"bounded": bounded})
    if not bounded:  # the bare equation explodes at these step sizes
        problem.gates = problem.gates.__class__(
            **{**problem.gates.__dict__, "eta": (0.01 * problem.gates.eta).detach().requires_grad_()}
        )
    a = problem.params.sqrt_a.detach()

    def slope(x):
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def update(now, momentum, grads, at, frozen, window, chunk):
        eta = at["eta"]
        if bounded:
            curvature = 0.0
            for g, k, _ in window:
                hidden = frozen[0] @ phi(k, a)
                outer = (frozen[1] * slope(hidden)).norm() ** 2 * phi(k, a).norm() ** 2
                curvature = curvature + g * 2 * (outer + gelu(hidden).norm() ** 2)
            eta = eta / (1 + eta * chunk * curvature)
        return [at["alpha"] * w - eta * g for w, g in zip(now, grads, strict=True)], momentum

    compare(problem, lambda p, b, h: run(p, b, h, *parts(p, h), update))


def test_titans_is_equations_13_and_14():
    """alpha = 1 - Titans' alpha, theta = Titans' eta, eta = Titans' theta, which multiplies the gradient inside S."""
    rule = RULES["titans"].vary(window={"chunk": CHUNK}, optimiser={"bounded": False})
    problem = random_problem(rule, 1, B, H, T, D)
    problem.gates = problem.gates.__class__(
        **{**problem.gates.__dict__, "eta": (0.01 * problem.gates.eta).detach().requires_grad_()}
    )

    def update(now, momentum, grads, at, *_):
        momentum = [at["theta"] * s - at["eta"] * g for s, g in zip(momentum, grads, strict=True)]
        return [at["alpha"] * w + s for w, s in zip(now, momentum, strict=True)], momentum

    def make(p, b, h):
        weights = [w[h].detach() for w in p.params.initial]
        return run(
            p,
            b,
            h,
            lambda m, v: ((m - v) ** 2).sum(),
            lambda w, x: x + w[1] @ gelu(w[0] @ x),
            weights,
            update,
        )

    compare(problem, make)


def test_deltanet_with_chunk_one_is_the_delta_rule():
    rule = RULES["deltanet"].vary(window={"chunk": 1}, optimiser={"bounded": False})
    problem = random_problem(rule, 2, B, H, T, D)
    y, state = recurrent(*problem.arguments())
    for b in range(B):
        for h in range(H):
            w = problem.params.initial[0][h].detach().clone()
            for t in range(T):
                q, k, v = (x[b, h, t].detach() for x in (problem.q, problem.k, problem.v))
                beta = (problem.gates.eta[b, h, t] * problem.gates.gamma[b, h, t, 0]).detach()
                w = w @ (torch.eye(D).double() - beta * torch.outer(k, k)) + beta * torch.outer(v, k)
                assert error(y[b, h, t], w @ q) < 1e-10
            assert error(state.weights[0][b, h], w) < 1e-10
