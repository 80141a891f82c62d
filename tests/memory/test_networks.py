"""Closed-form inner gradients and curvature bounds against autograd, a token at a time."""

import pytest
import torch
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
    Params,
    Polynomial,
    RobustL2,
    Rule,
)

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
BIASES = [L2(), L2(0.5), DotProduct(), Lp(1.0), Lp(3.0), RobustL2(), *map(Huber, ("coordinates", "norm", "mixture"))]
FEATURES = [Identity(), Polynomial(2)]


def instance(network, features, dim=3, time=4):
    rule = Rule(features=features, network=network)
    weights = tuple(torch.randn(*shape, dtype=torch.float64) * 0.7 for shape in rule.shapes(dim))
    x, v = (torch.randn(time, dim, dtype=torch.float64) for _ in range(2))

    norm = (1 + 0.3 * torch.randn(dim), 0.3 * torch.randn(dim))
    norm = tuple(n.double() for n in norm) if network.norm else None

    def apply_with(weights):
        return lambda i, u: (features.expand(u) if network.lifted[i] else u) @ weights[i].mT

    def predict(weights, x):
        return network.forward(apply_with(weights), x, norm)

    return rule, weights, x, v, predict, network.trace(apply_with(weights), x, norm), norm


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_deltas_are_the_gradient(network, features, bias):
    _rule, weights, x, v, predict, trace, norm = instance(network, features)
    if bias.has_delta:  # thresholds below and above the errors
        v = torch.cat([v, torch.tensor([0.1, 1.0, 3.0, 50.0]).double()[:, None]], -1)
    assert error(trace.prediction, predict(weights, x)) < 1e-12
    leaves = tuple(w.clone().requires_grad_() for w in weights)
    autograd = torch.autograd.grad(
        bias.value(predict(leaves, x), v).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    deltas = network.deltas(weights, trace, bias.derivative(trace.prediction, v), norm)
    for delta, u, lifted, grad in zip(deltas, trace.inputs, network.lifted, autograd, strict=True):
        assert error(delta.mT @ (features.expand(u) if lifted else u), grad) < 1e-10


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_curvature_bounds_the_gauss_newton_hessian(network, features):
    """The largest eigenvalue of 2 J J^T, J the Jacobian of the prediction with respect to all weights."""
    rule, weights, x, v, predict, trace, norm = instance(network, features)
    bound, _ = rule.stiffness(weights, trace, v, Params(weights, None, norm))
    for t in range(len(x)):
        jacobians = jacrev(predict)(weights, x[t : t + 1])
        jacobian = torch.cat([j[0].flatten(1) for j in jacobians], 1)
        largest = 2 * torch.linalg.matrix_norm(jacobian, 2) ** 2
        assert largest <= bound[t] * (1 + 1e-9)


@pytest.mark.parametrize("bias", BIASES, ids=str)
def test_curvature_bounds_the_bias(bias):
    """Its Hessian, or where errors are large |derivative| / |error|, in every direction."""
    torch.manual_seed(0)
    for size in (1e-4, 0.3, 1.0, 10.0):
        e, delta = size * torch.randn(3, dtype=torch.float64), torch.rand(1, dtype=torch.float64)
        v = torch.cat([torch.zeros(3).double(), delta]) if bias.has_delta else torch.zeros(3).double()
        if isinstance(bias, DotProduct):
            continue
        bound = bias.curvature(e, v)
        assert bias.derivative(e, v).norm() <= bound * e.norm() * (1 + 1e-9) or isinstance(bias, Huber)
        if not isinstance(bias, Huber):  # whose mixture jumps
            hessian = torch.autograd.functional.hessian(lambda p, v=v: bias.value(p, v), e)
            assert torch.linalg.matrix_norm(hessian, 2) <= bound * (1 + 1e-9)


def test_bad_arguments():
    with pytest.raises(ValueError, match="MLP depth must be an integer >= 1, got 0"):
        MLP(depth=0)
    with pytest.raises(ValueError, match=r"GatedMLP expansion must be an integer >= 1, got 1\.5"):
        GatedMLP(expansion=1.5)
    with pytest.raises(ValueError, match="L2 scale must be > 0"):
        L2(0.0)
