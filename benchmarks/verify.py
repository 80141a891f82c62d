"""No candidate of ours is timed that was not found equal to the definition in the same run.

The definition is ``memory.recurrent`` in float64: token by token, autograd of the printed objective. A candidate is
held against it in float32, as it is timed, at a shorter length (``Candidate.reduce``): outputs and every gradient of a
random functional, |a - b| / |b| tensor by tensor. A Triton kernel has no float64 in which to be exact, and a tolerance
of its own. Code of others is checked for what can be checked without its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.registry import Candidate, Function, Operation, Shape

Oracle = Callable[[Shape, torch.dtype], Operation]

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-8}
MARGIN = 3.0
"""Where float32 leaves the definition itself further than 1e-5 from float64 (a layer norm of small numbers, a gate near
1, Newton-Schulz), a candidate may be at most so many times as far; it must then equal the definition in float64."""

KERNEL = (1e-4, 4.0)
"""A kernel may be so far from the definition in float64, tensor by tensor, or so many times as far as the definition in
float32."""


class Unverified(RuntimeError):
    """A candidate of ours that was not found equal to the definition."""


@dataclass(frozen=True)
class Verdict:
    """What was found: whether the candidate may be timed, and the words that the table prints."""

    passed: bool
    text: str


def verify(candidate: Candidate, shape: Shape) -> Verdict:
    """Hold a candidate against the definition, or check what can be checked, at the reduced shape.

    Raises:
        Missing: it cannot be built here.
    """
    small = candidate.reduce(shape)
    if candidate.oracle is None:
        return Verdict(True, _checks(candidate.operation(small), small))
    truth = by_oracle(candidate.oracle, small, torch.float64, candidate.backward)
    if candidate.kernel:
        own = by_oracle(candidate.oracle, small, torch.float32, candidate.backward)
        return of_kernel(results(candidate.operation(small), candidate.backward), own, truth)
    gap, where = worst(results(candidate.operation(small), candidate.backward), truth)
    allowed = TOLERANCE[torch.float32]
    if gap <= allowed:
        return Verdict(True, f"off by {gap:.0e}")
    itself = worst(by_oracle(candidate.oracle, small, torch.float32, candidate.backward), truth)[0]
    if itself <= allowed or not gap <= MARGIN * itself:
        near = f"allowed {allowed:.0e}" if itself <= allowed else f"the definition in float32 only {itself:.1e}"
        return Verdict(False, f"refused: {where} is {gap:.1e} from the definition, {near}")
    double = candidate.operation(small, torch.float64)
    exact, where = worst(results(double, candidate.backward), truth)
    if not exact <= TOLERANCE[torch.float64]:
        return Verdict(False, f"refused: {where} is {exact:.1e} from the definition in float64")
    return Verdict(True, f"off by {gap:.0e}, the definition itself by {itself:.0e}; in float64 by {exact:.0e}")


@lru_cache(maxsize=4)
def by_oracle(oracle: Oracle, shape: Shape, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    """``results`` of the definition, which takes longer than what is held against it: computed once for candidates that
    come one after the other and have the same."""
    return results(oracle(shape, dtype), backward)


def of_kernel(found: dict[str, Tensor], own: dict[str, Tensor], truth: dict[str, Tensor]) -> Verdict:
    """The results of a kernel and of the definition in float32, both against float64."""
    least, margin = KERNEL
    if found.keys() != truth.keys():
        return Verdict(False, "refused: the list of gradients is not the definition's")
    for name, exact in truth.items():
        gap, itself = _distance(found[name], exact), _distance(own[name], exact)
        if not gap <= max(least, margin * itself):
            near = f"the definition in float32 {itself:.1e}"
            return Verdict(False, f"refused: {name} is {gap:.1e} from the definition, {near}")
    off, itself = worst(found, truth)[0], worst(own, truth)[0]
    allowed = f"allowed a kernel: {least:.0e} or {margin:.0f} times that"
    return Verdict(True, f"off by {off:.0e}, the definition in float32 by {itself:.0e}; {allowed}")


def demand(candidate: Candidate, verdict: Verdict | None) -> None:
    """What stands before every timing.

    Raises:
        Unverified: the candidate is ours and nothing, or nothing good, was found in this run.
    """
    if candidate.oracle is not None and (verdict is None or not verdict.passed):
        raise Unverified("refused: not verified in this run" if verdict is None else verdict.text)


def results(operation: Operation, backward: bool) -> dict[str, Tensor]:
    """Outputs, what else the call leaves, and the gradients of one random functional of all this, by name."""
    with torch.set_grad_enabled(backward):
        left = (operation.function(operation.x),) if operation.whole is None else operation.whole(operation.x)
    named = {f"result {i} {list(x.shape)}" if i else "y": x.detach() for i, x in enumerate(left)}
    if not backward:
        return named
    draw, leaves = torch.Generator().manual_seed(7), operation.leaves
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in left]
    grads = torch.autograd.grad(left, leaves, weights, allow_unused=True, materialize_grads=True)
    pairs = enumerate(zip(leaves, grads, strict=True))
    return named | {f"gradient {i} {list(leaf.shape)}": gradient for i, (leaf, gradient) in pairs}


def worst(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative distance and its name; infinite where something is not finite or of another shape."""
    if found.keys() != truth.keys():
        return float("inf"), "the list of gradients"
    return max((_distance(found[name], truth[name]), name) for name in truth)


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    distance, size = (a.double() - b.double()).norm(), b.double().norm()
    return float(distance / size if size > 1e-12 else distance)


def _checks(operation: Operation, shape: Shape) -> str:
    """Shape, finiteness and causality of somebody else's function, in words."""
    y = _forward(operation.function, operation.x)
    if list(y.shape) != list(operation.x.shape):
        return f"outputs {list(y.shape)} for inputs {list(operation.x.shape)}"
    if not bool(y.isfinite().all()):
        return "outputs that are not finite"
    time = y.shape[1]
    for at in {time - 1, time // 2 + 1, 3 * time // 4}:
        changed = operation.x.detach().clone()
        changed[:, at] += 1
        gap = (_forward(operation.function, changed)[:, :at] - y[:, :at]).abs().max()
        if gap > 1e-6 * y.abs().max():
            return f"not causal: token {at} changes earlier outputs by {float(gap):.1e}"
    return "causal, finite"


def _forward(function: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)
