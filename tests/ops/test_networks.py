"""Closed-form inner gradients and curvature bounds against autograd, a token at a time."""

import math

import pytest
import torch
from torch import nn
from torch.func import jacrev

from atlas_memory.memory import (
    L2,
    MLP,
    DotProduct,
    GatedMLP,
    Huber,
    Identity,
    Linear,
    Lp,
    Polynomial,
    RobustL2,
    Rule,
)
from atlas_memory.rules.networks import squared_spectral_norm

from .problems import error

NETWORKS = [
    Linear(),
    MLP(1),
    MLP(2, 3),
    MLP(3, 2),
    MLP(2, 4, residual=False),
    MLP(3, 2, bias=True, activation="silu", norm=True),
    GatedMLP(2),
    GatedMLP(1, residual=False, activation="silu"),
    GatedMLP(1, norm=True),
    Linear(residual=True, norm=True),
]
HUBERS = [*map(Huber, ("coordinates", "norm", "mixture")), Huber("mixture", corner=1.0)]
BIASES = [L2(), L2(0.5), DotProduct(), Lp(1.0), Lp(3.0), RobustL2(), *HUBERS]
FEATURES = [Identity(), Polynomial(2)]


def instance(network, features, dim=3, time=4):
    rule = Rule(features=features, network=network)
    weights = tuple(torch.randn(*shape, dtype=torch.float64) * 0.7 for shape in rule.shapes(dim))
    x, v = (torch.randn(time, dim, dtype=torch.float64) for _ in range(2))

    norm = (1 + 0.3 * torch.randn(dim), 0.3 * torch.randn(dim))
    norm = tuple(n.double() for n in norm) if network.norm else None

    def apply_with(weights):
        return lambda i, u: (features.expand(u) if network.feature_mapped[i] else u) @ weights[i].mT

    def predict(weights, x):
        return network.forward(apply_with(weights), x, norm)

    return rule, weights, x, v, predict, network.forward_cache(apply_with(weights), x, norm), norm


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_deltas_are_the_gradient(network, features, bias):
    _rule, weights, x, v, predict, cache, norm = instance(network, features)
    if bias.has_delta:  # thresholds below and above the errors
        v = torch.cat([v, torch.tensor([0.1, 1.0, 3.0, 50.0]).double()[:, None]], -1)
    assert error(cache.prediction, predict(weights, x)) < 1e-12
    leaves = tuple(w.clone().requires_grad_() for w in weights)
    autograd = torch.autograd.grad(
        bias.value(predict(leaves, x), v).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    deltas = network.back(weights, cache, network.pre_norm_error(cache, bias.derivative(cache.prediction, v), norm))
    for delta, u, feature_mapped, grad in zip(deltas, cache.inputs, network.feature_mapped, autograd, strict=True):
        assert error(delta.mT @ (features.expand(u) if feature_mapped else u), grad) < 1e-10


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_gains_bound_the_jacobians(network, features):
    """The largest singular values of d body / d (W_l f_l). What power iteration misses of the matrices between the two
    is given back: how much that may be is tested below."""
    _rule, weights, x, _v, _predict, cache, _norm = instance(network, features)
    jacobian_bounds = network.jacobian_bounds(weights, cache)

    def pre_norm(moved, t):
        def apply(i, u):
            return (features.expand(u) if network.feature_mapped[i] else u) @ weights[i].mT + moved[i]

        return network.pre_norm(apply, x[t : t + 1])[0]

    missed = [1.0] * len(weights)
    for i in (i for i, feature_mapped in enumerate(network.feature_mapped) if not feature_mapped):
        w = weights[i][:, : weights[i - 1].shape[0]]  # without the column of a bias
        missed[i] = torch.linalg.matrix_norm(w, 2) ** 2 / squared_spectral_norm(w)

    for t in range(len(x)):
        still = tuple(torch.zeros(len(w), dtype=w.dtype) for w in weights)
        for i, (gain, jacobian) in enumerate(zip(jacobian_bounds, jacrev(pre_norm)(still, t), strict=True)):
            bound = gain[t] * math.prod(missed[i + 1 :])
            assert torch.linalg.matrix_norm(jacobian, 2) ** 2 <= bound * (1 + 1e-9)


@pytest.mark.parametrize("length", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("bias", [L2(), L2(0.5)], ids=str)
def test_response_bounds_how_fast_the_error_at_a_layer_norm_grows(bias, length):
    """The second derivative of the loss along its own gradient, for values shorter and longer than a layer norm can
    answer, near them and far; it is exact for equal gains, where it is more than half of the first term. Then a step
    of 0.9 never turns the answer past the value."""
    network, exact = Linear(norm=True), 0
    for equal in (False, True):
        pre_norm = 0.5 * torch.randn(200, 6).double()
        gain = torch.full((6,), 1.3).double() if equal else 1 + 0.3 * torch.randn(6).double()
        norm, x = (gain, 0.3 * torch.randn(6).double()), torch.randn(200, 6).double()
        cache = network.make_cache(x, [(x, ())], pre_norm, norm)
        direction = torch.randn(200, 6).double()
        v = cache.prediction + torch.linspace(0.1, 3, 200).double()[:, None] * direction
        v = norm[1] + length * nn.functional.normalize(v - norm[1], dim=-1)
        slope = bias.derivative(cache.prediction, v)
        curvature = bias.curvature(cache.prediction, v)
        found = network.curvature_bound(cache, curvature, slope, norm)
        along = network.pre_norm_error(cache, slope, norm)

        def loss(moved, pre_norm=pre_norm, x=x, norm=norm, v=v):
            return bias.value(network.end(x, moved, norm), v).sum()

        second = (torch.func.jvp(torch.func.grad(loss), (pre_norm,), (along,))[1] * along).sum(-1) / along.square().sum(
            -1
        )
        assert (second <= found * (1 + 1e-3)).all()  # the layer norm's epsilon
        if equal:
            least = 0.5 * curvature * gain[0] ** 2 / pre_norm.var(-1, correction=0).clamp_max(1.0)
            tight = (found > least * (1 + 1e-3)) & (pre_norm.var(-1, correction=0) < 1)
            torch.testing.assert_close(found[tight], second[tight], rtol=1e-3, atol=1e-6)
            exact += int(tight.sum())
            short = pre_norm.std(-1, correction=0) < 1
            ways = (pre_norm, pre_norm - 0.9 * along / found[:, None], v - norm[1])
            before, after, goal = (nn.functional.normalize(way - way.mean(-1, keepdim=True), dim=-1) for way in ways)
            turned, due = ((before * other).sum(-1).clamp(-1, 1).acos() for other in (after, goal))
            assert (turned <= due + 1e-6)[short].all()
    assert exact or length < 1  # a value that is short leaves half of the first term


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 64), (64, 256), (128, 32)])
def test_spectral_norms(shape):
    """An estimate from below, by at most a third for random matrices, and far closer where one direction stands out;
    at any magnitude, with the gradient at the singular vectors."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(20, *shape, generator=g, dtype=torch.float64)
    exact = torch.linalg.matrix_norm(w, 2) ** 2
    ratio = squared_spectral_norm(w) / exact
    assert ratio.max() <= 1 + 1e-9 and ratio.min() >= 0.65
    spike = w + 6 * torch.einsum("ni,nj->nij", w[:, :, 0], w[:, 0, :])
    ratio = squared_spectral_norm(spike) / torch.linalg.matrix_norm(spike, 2) ** 2
    assert ratio.min() >= 0.999
    for size in (1e-100, 1e100):
        assert torch.allclose(squared_spectral_norm(w * size), squared_spectral_norm(w) * size**2)
    assert (squared_spectral_norm(torch.zeros(3, *shape)) == 0).all()


@pytest.mark.parametrize("bias", [bias for bias in BIASES if bias != DotProduct()], ids=str)
def test_curvature_bounds_the_bias(bias):
    """|derivative| / |error|, and the Hessian in every direction; of l_3, whose full step goes up to the value and not
    beyond (test_bias.py), half of it."""
    torch.manual_seed(0)
    for size in (1e-4, 0.3, 1.0, 10.0):
        e, delta = size * torch.randn(3, dtype=torch.float64), torch.rand(1, dtype=torch.float64)
        v = torch.cat([torch.zeros(3).double(), delta]) if bias.has_delta else torch.zeros(3).double()
        bound = bias.curvature(e, v)
        assert bias.derivative(e, v).norm() <= bound * e.norm() * (1 + 1e-9)
        if not isinstance(bias, Huber):  # whose mixture jumps
            hessian = torch.autograd.functional.hessian(lambda p, v=v: bias.value(p, v), e)
            share = 0.5 if bias == Lp(3.0) else 1.0
            assert share * torch.linalg.matrix_norm(hessian, 2) <= bound * (1 + 1e-9)


def test_bad_arguments():
    with pytest.raises(ValueError, match="MLP depth must be an integer >= 1, got 0"):
        MLP(depth=0)
    with pytest.raises(ValueError, match=r"GatedMLP expansion must be an integer >= 1, got 1\.5"):
        GatedMLP(expansion=1.5)
    with pytest.raises(ValueError, match="L2 scale must be a finite number above 0"):
        L2(0.0)
