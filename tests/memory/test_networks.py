"""Closed-form inner gradients and curvature bounds against autograd, a token at a time."""

import pytest
import torch
from torch.func import jacrev

from atlas_memory.memory import L2, MLP, DotProduct, GatedMLP, Identity, Linear, Polynomial, Rule

from .problems import error

NETWORKS = [
    Linear(),
    MLP(1),
    MLP(2, 3),
    MLP(3, 2),
    MLP(2, 4, residual=False),
    GatedMLP(2),
    GatedMLP(1, residual=False),
]
FEATURES = [Identity(), Polynomial(2)]


def instance(network, features, dim=3, time=4):
    rule = Rule(features=features, network=network)
    weights = tuple(torch.randn(*shape, dtype=torch.float64) * 0.7 for shape in rule.shapes(dim))
    x, v = (torch.randn(time, dim, dtype=torch.float64) for _ in range(2))

    def predict(weights, x):
        return network.forward(lambda i, u: (features.expand(u) if network.lifted[i] else u) @ weights[i].mT, x)

    trace = network.trace(lambda i, u: (features.expand(u) if network.lifted[i] else u) @ weights[i].mT, x)
    return rule, weights, x, v, predict, trace


@pytest.mark.parametrize("bias", [L2(), L2(0.5), DotProduct()])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_deltas_are_the_gradient(network, features, bias):
    _rule, weights, x, v, predict, trace = instance(network, features)
    assert error(trace.prediction, predict(weights, x)) < 1e-12
    leaves = tuple(w.clone().requires_grad_() for w in weights)
    autograd = torch.autograd.grad(
        bias.value(predict(leaves, x), v).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    deltas = network.deltas(weights, trace, bias.derivative(trace.prediction, v))
    for delta, u, lifted, grad in zip(deltas, trace.inputs, network.lifted, autograd, strict=True):
        assert error(delta.mT @ (features.expand(u) if lifted else u), grad) < 1e-10


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_curvature_bounds_the_gauss_newton_hessian(network, features):
    """The largest eigenvalue of 2 J J^T, J the Jacobian of the prediction with respect to all weights."""
    rule, weights, x, _v, predict, trace = instance(network, features)
    bound = rule.token_curvature(weights, trace, None)
    for t in range(len(x)):
        jacobians = jacrev(predict)(weights, x[t : t + 1])
        jacobian = torch.cat([j[0].flatten(1) for j in jacobians], 1)
        largest = 2 * torch.linalg.matrix_norm(jacobian, 2) ** 2
        assert largest <= bound[t] * (1 + 1e-9)


def test_bad_arguments():
    with pytest.raises(ValueError, match="MLP depth must be an integer >= 1, got 0"):
        MLP(depth=0)
    with pytest.raises(ValueError, match=r"GatedMLP expansion must be an integer >= 1, got 1\.5"):
        GatedMLP(expansion=1.5)
    with pytest.raises(ValueError, match="L2 scale must be > 0"):
        L2(0.0)
