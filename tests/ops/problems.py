"""Random instances of the inner problem, and the error measure every comparison uses."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atlas_memory.memory import DeltaGradientDescent, Gates, MemoryState, Params, Rule, l2_normalise


@dataclass
class Problem:
    """One instance; ``leaves`` are all tensors with respect to which outer gradients are compared."""

    rule: Rule
    params: Params
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates

    @property
    def leaves(self) -> list[Tensor]:
        gate = self.gates
        gates = [g for g in (gate.eta, gate.alpha, gate.theta, gate.gamma, gate.delta) if g is not None]
        return [
            self.q,
            self.k,
            self.v,
            *gates,
            *self.params.initial,
            *([] if self.params.sqrt_a is None else [self.params.sqrt_a]),
            *(self.params.norm or ()),
        ]

    def between(self, start: int, stop: int) -> "Problem":
        """The same problem restricted to some of its tokens."""
        cut = [x[:, :, start:stop] for x in (self.q, self.k, self.v)]
        return Problem(self.rule, self.params, *cut, self.gates.map(lambda g: g[:, :, start:stop]))

    def arguments(self):
        return self.rule, self.params, self.q, self.k, self.v, self.gates


def resized(rule: Rule, size: int, chunk: int) -> Rule:
    """``rule`` with window c and chunk b; c stays 1 where it must, and a horizon is one that short texts go beyond."""
    single = isinstance(rule.optimiser, DeltaGradientDescent)
    if rule.features.horizon is not None:
        rule = rule.vary(features={"horizon": 5})
    return rule.vary(window={"size": 1 if single else size, "chunk": chunk})


def random_problem(
    rule: Rule, seed: int, batch=2, heads=2, time=20, dim=4, dtype=torch.float64, channels=False
) -> Problem:
    """``channels``: eta and alpha a channel."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    size = rule.window.size
    q, k = (l2_normalise(randn(batch, heads, time, dim)) for _ in range(2))
    v = randn(batch, heads, time, dim)
    per = (batch, heads, time, dim) if channels else (batch, heads, time)
    eta, alpha, theta = randn(*per).sigmoid(), (2 + randn(*per)).sigmoid(), randn(batch, heads, time).sigmoid()
    delta = 0.5 + randn(batch, heads, time).square()
    gamma = randn(batch, heads, time, size).sigmoid()
    initial = tuple(randn(heads, *shape) * max(shape[1], 1) ** -0.5 for shape in rule.shapes(dim))
    sqrt_a = rule.features.initial_sqrt_a()
    if sqrt_a is not None:
        sqrt_a = sqrt_a.double() * (1 + 0.3 * randn(*sqrt_a.shape))

    def leaf(x):
        return x.to(dtype).requires_grad_()

    norm = (leaf(1 + 0.3 * randn(heads, dim)), leaf(0.3 * randn(heads, dim))) if rule.network.norm else None
    return Problem(
        rule,
        Params(tuple(map(leaf, initial)), None if sqrt_a is None else leaf(sqrt_a), norm),
        leaf(q),
        leaf(k),
        leaf(v),
        Gates(leaf(eta), leaf(alpha), leaf(theta), leaf(gamma), leaf(delta) if rule.bias.has_delta else None),
    )


def nudged(problem: Problem, seed: int) -> Problem:
    """The same problem with every entry of q, k and v moved by at most half a unit in its last place."""
    g = torch.Generator().manual_seed(seed)

    def nudge(x: Tensor) -> Tensor:
        moved = (torch.rand(x.shape, generator=g, dtype=x.dtype) - 0.5) * torch.finfo(x.dtype).eps
        return (x.detach() * (1.0 + moved)).requires_grad_()

    return replace(problem, q=nudge(problem.q), k=nudge(problem.k), v=nudge(problem.v))


def everything(form, problem: Problem, state: MemoryState | None = None) -> dict[str, Tensor]:
    """Outputs, final state and all outer gradients of one random functional of both."""
    y, end = form(*problem.arguments(), state)
    results = {"y": y.detach()}
    g = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    state_tensors = {f"state.{i}": t for i, t in enumerate(end.tensors())}
    for name, t in {"y": y, **state_tensors}.items():
        results[name] = t.detach()
        if t.is_floating_point():
            loss = loss + (t.double() * torch.randn(t.shape, generator=g, dtype=torch.float64)).sum()
    loss = loss + 0.0 * sum(x.double().sum() for x in problem.leaves)
    grads = torch.autograd.grad(loss, problem.leaves, allow_unused=True, materialize_grads=True)
    return results | {f"grad.{i}": t for i, t in enumerate(grads)}


def error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, or |a - b| where b is zero; infinite where that is no number, since ``max`` passes over NaN."""
    assert a.shape == b.shape
    distance, size = (a.double() - b.double()).norm(), b.double().norm()
    found = (distance / size if size > 1e-12 else distance).item()
    return found if math.isfinite(found) else math.inf


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys()
    return max((error(a[name], b[name]), name) for name in a)
