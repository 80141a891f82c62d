"""Random instances of the inner problem, and the error measure every comparison uses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_memory.memory import Gates, MemoryState, Params, Rule, l2_normalise


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
        gates = [g for g in (self.gates.eta, self.gates.alpha, self.gates.theta, self.gates.gamma) if g is not None]
        return [
            self.q,
            self.k,
            self.v,
            *gates,
            *self.params.initial,
            *([] if self.params.sqrt_a is None else [self.params.sqrt_a]),
        ]

    def between(self, start: int, stop: int) -> "Problem":
        """The same problem restricted to some of its tokens."""
        cut = [x[:, :, start:stop] for x in (self.q, self.k, self.v)]
        return Problem(self.rule, self.params, *cut, self.gates.map(lambda g: g[:, :, start:stop]))

    def arguments(self):
        return self.rule, self.params, self.q, self.k, self.v, self.gates


def random_problem(rule: Rule, seed: int, batch=2, heads=2, time=20, dim=4, dtype=torch.float64) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    size = rule.window.size
    q, k = (l2_normalise(randn(batch, heads, time, dim)) for _ in range(2))
    v = randn(batch, heads, time, dim)
    eta, alpha, theta = (
        randn(batch, heads, time).sigmoid(),
        (2 + randn(batch, heads, time)).sigmoid(),
        randn(batch, heads, time).sigmoid(),
    )
    gamma = randn(batch, heads, time, size).sigmoid()
    initial = tuple(randn(heads, *shape) * shape[1] ** -0.5 for shape in rule.shapes(dim))
    sqrt_a = rule.features.initial_sqrt_a()
    if sqrt_a is not None:
        sqrt_a = sqrt_a.double() * (1 + 0.3 * randn(*sqrt_a.shape))

    def leaf(x):
        return x.to(dtype).requires_grad_()

    return Problem(
        rule,
        Params(tuple(map(leaf, initial)), None if sqrt_a is None else leaf(sqrt_a)),
        leaf(q),
        leaf(k),
        leaf(v),
        Gates(leaf(eta), leaf(alpha), leaf(theta), leaf(gamma)),
    )


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
    grads = torch.autograd.grad(loss, problem.leaves, allow_unused=True, materialize_grads=True)
    return results | {f"grad.{i}": t for i, t in enumerate(grads)}


def error(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, or |a - b| where b is zero."""
    assert a.shape == b.shape
    distance, size = (a.double() - b.double()).norm(), b.double().norm()
    return (distance / size if size > 1e-12 else distance).item()


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys()
    return max((error(a[name], b[name]), name) for name in a)
