"""How a part of a rule is tried: on a few small numbers, alone and among others, twice.

The sizes of the tensors on which a part is tried are all different, so that a sum over the wrong dimension does not fit
by chance. All of it is computed in float64 on the CPU, whatever modes the caller is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, TIME, DIM = 2, 3, 5, 4
ROWS, COLUMNS = 2 * DIM, 7
MATRIX = (BATCH, HEADS, ROWS, COLUMNS)
OVER_MATRICES = "reduce over rows and columns alone, dim=(-2, -1)"
"""What to do where a matrix is changed by those of other sequences or heads."""


@contextmanager
def apart() -> Iterator[None]:
    """Leave all modes that the caller may be in: inference, autograd, default device, autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def numbers(*shape: int, frequency: float = 1.0) -> Tensor:
    """Numbers in (-1, 1) that look drawn; the random generator is left alone."""
    count = torch.arange(1.0, torch.Size(shape).numel() + 1.0, dtype=torch.float64)
    return (frequency * count).sin().reshape(shape)


def call(part: object, method: str, given: str, *arguments: Any) -> Any:
    """What the method of a part returns. Where it fails, changes what it is given, or returns other numbers when it is
    called again, a ValueError that names it and says what it was ``given``."""
    name = f"{type(part).__name__}.{method}"
    before = [t.detach().clone() for t in _tensors(arguments)]
    try:
        found = getattr(part, method)(*arguments)
        again = getattr(part, method)(*arguments)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else "no reason given"
        raise ValueError(f"{name} failed for {given} with {type(error).__name__}: {said}{_advice(error)}") from error
    if not _same(before, _tensors(arguments)):
        raise ValueError(
            f"{name} changes in place what it is given, which belongs to the caller's state: make new tensors, such as "
            "alpha * w in place of w.mul_(alpha)"
        )
    if not _same(_tensors(found), _tensors(again)):
        raise ValueError(
            f"{name} returns other numbers when it is called again with the same: a part draws nothing and keeps "
            "nothing in itself between calls"
            + (". What it keeps from token to token, its step returns in sums" if hasattr(part, "sums") else "")
        )
    return found


def _advice(error: Exception) -> str:
    if "in-place operation" in str(error):
        return "; make new tensors, such as alpha * w in place of w.mul_(alpha)"
    if "cannot assign to field" in str(error):
        return (
            "; a part keeps nothing in itself between calls. What an optimiser keeps from token to token, its step "
            "returns in sums (has_momentum = True)"
        )
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in tree for t in _tensors(part)] if isinstance(tree, tuple | list) else []


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=1e-12, atol=0.0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def check_shape(part: object, what: str, found: Any, shape: Sequence[int], words: str) -> None:
    """Raise ValueError unless ``found`` is a tensor of this shape, which ``words`` describe."""
    if not isinstance(found, Tensor) or list(found.shape) != list(shape):
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"{type(part).__name__}.{what} must be {words}, here {list(shape)}; got {got}")
    if found.dtype != torch.float64:  # as all that it was given
        raise ValueError(
            f"{type(part).__name__}.{what} must keep the dtype of what is given, float64; got {found.dtype}"
        )


def check_gradients(part: object, what: str, function: Callable[..., Tensor], given: dict[str, Tensor]) -> None:
    """Raise ValueError where a gradient of what a part computes, ``function(**given)``, is not finite, or where nothing
    of it reaches a tensor with which the result changes."""
    name = f"{type(part).__name__}.{what}"
    with torch.enable_grad():
        leaves = {key: x.detach().clone().requires_grad_() for key, x in given.items()}
        found = function(**leaves)
        weighed = (found * numbers(*found.shape, frequency=0.9)).sum()
        slopes: Sequence[Tensor | None] = [None] * len(leaves)
        if weighed.requires_grad:
            slopes = torch.autograd.grad(weighed, list(leaves.values()), allow_unused=True)
    if not found.isfinite().all():
        raise ValueError(f"{name} is not finite")
    for (key, x), slope in zip(given.items(), slopes, strict=True):
        if slope is not None and not slope.isfinite().all():
            raise ValueError(f"{name}: the gradient of {key} is not finite; add a small number under every root")
        if slope is None or not slope.any():
            moved = function(**(given | {key: x + 1e-6 * numbers(*x.shape, frequency=1.3)}))
            if not torch.allclose(moved, found.detach(), rtol=1e-11, atol=1e-11):
                raise ValueError(
                    f"{name} changes with {key}, and lets no gradient through to it: nothing of it may be detached, "
                    "since the outer model learns through it"
                )


def last(x: Tensor) -> Tensor:
    """The last sequence of a batch and all its heads but the first: what a part answers to them must not depend on what
    it answers to the others."""
    return x[1:, 1:]


def check_apart(part: object, what: str, alone: Tensor, among: Tensor, advice: str = OVER_MATRICES) -> None:
    """Raise ValueError unless what a part answers to a few is what it answers to them among others."""
    if alone.shape != among.shape or not torch.allclose(alone, among, rtol=1e-9, atol=1e-12, equal_nan=True):
        raise ValueError(
            f"{type(part).__name__}.{what} of one sequence changes with what other sequences, heads or tokens are "
            f"beside it: {advice}"
        )
