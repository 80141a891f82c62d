"""What the forms require of a retention."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..retention import AnyRetention, NewMatrix, OldMatrix
from .trying import (
    BATCH,
    COLUMNS,
    DIM,
    HEADS,
    MATRIX,
    ROWS,
    apart,
    call,
    check_apart,
    check_gradients,
    check_shape,
    last,
    numbers,
)

PLACES = ((False, True), (True, False), (False, False), (torch.tensor([True, False]), torch.tensor([False, True])))
"""Whether a token is the first and the last of its chunk: bools, or one for each sequence."""


@lru_cache(maxsize=256)
def try_retention(retention: Any) -> None:
    """Check the memory with which a retention begins, and what it keeps of one."""
    shape = (HEADS, ROWS, COLUMNS)
    with apart():
        initial = call(retention, "start", f"a matrix {list(shape)}", numbers(*shape))
        begun = call(retention, "begin", f"M_0 {list(shape)}", initial)
        decay_target = _home(retention, initial)
        weights, dual = torch.stack([begun[0], 1.1 * begun[0]]), None if begun[1] is None else 1.1 * begun[1]
        dual = None if dual is None else torch.stack([dual, 0.9 * dual])
        check_shape(retention, "mirror_map(a, frozen, initial)", weights, MATRIX, "shaped as a, [..., rows, columns]")
        old, step = OldMatrix(weights, weights, dual, initial, *decay_target), 0.1 * numbers(*MATRIX, frequency=0.7)
        w, w_home, a_home = last(weights), *(None if m is None else m[1:] for m in decay_target)
        one = OldMatrix(w, w, None if dual is None else last(dual), initial[1:], w_home, a_home)
        for gates in ([BATCH, HEADS], [BATCH, HEADS, DIM]):
            alpha = 0.5 + 0.4 * numbers(*gates)
            for first, final in PLACES:
                kept = _keep(retention, old, step, alpha, first, final)
                ends = (x if isinstance(x, bool) else x[1:] for x in (first, final))
                alone = retention.keep(one, last(step), last(alpha), *ends)
                for part, a, b in zip(kept._fields, alone, kept, strict=True):
                    if b is not None:
                        check_apart(retention, f"keep: {part}", a, last(b))
        _check_alpha(retention, old, step)
        _check_gradients(retention, old, step, 0.5 + 0.4 * numbers(BATCH, HEADS))
        if not retention.has_mirror_map:
            _check_directions(retention, old, step)
        if retention.fixed_row_sums:
            _check_sums(retention, begun[0], old, step)


def _home(retention: AnyRetention, initial: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What W and A decay to, checked."""
    decay_target = call(retention, "decay_target", f"M_0 {list(initial.shape)}", initial)
    if not isinstance(decay_target, tuple) or len(decay_target) != 2:
        raise ValueError(
            f"{type(retention).__name__}.decay_target must return a pair, what W and what A fade to, None for zero, such "  # noqa: E501
            f"as (initial, None) where there is no A; got a {type(decay_target).__name__}"
        )
    for found in (m for m in decay_target if m is not None):
        check_shape(
            retention,
            "decay_target",
            found,
            initial.shape,
            "a pair, what W and what A fade to, each None or shaped as M_0",
        )
    return decay_target


def _keep(
    retention: AnyRetention, old: OldMatrix, step: Tensor, alpha: Tensor, first: Tensor | bool, final: Tensor | bool
) -> NewMatrix:
    name = type(retention).__name__
    by_row = "" if isinstance(first, bool) else ", one for each sequence (pick of gates.py takes both)"
    given = (
        f"matrices {list(MATRIX)}, alpha {list(alpha.shape)} (rows(alpha, matrix) multiplies them), "
        f"first={first!r} and last={final!r}{by_row}"
    )
    kept = call(retention, "keep", given, old, step, alpha, first, final)
    if not isinstance(kept, NewMatrix):
        raise ValueError(f"{name}.keep must return NewMatrix(weights, mirrored, dual), got a {type(kept).__name__}")
    if (kept.dual is None) == retention.has_mirror_map:
        raise ValueError(
            f"{name}.keep must return NewMatrix(weights, mirrored, dual) with its accumulator as dual, since has_mirror_map = True"  # noqa: E501
            if retention.has_mirror_map
            else f"{name}.keep returns an accumulator, NewMatrix(weights, mirrored, dual), and has_mirror_map is False: set has_mirror_map "  # noqa: E501
            "= True and let begin return W and A before the first token, or return None for dual"
        )
    for part, found in zip(kept._fields, kept, strict=True):
        if part != "dual" or found is not None:
            check_shape(retention, f"keep: {part}", found, MATRIX, "shaped as W, [..., rows, columns]")
    return kept


def _check_alpha(retention: Any, old: OldMatrix, step: Tensor) -> None:
    """Check that a retention that has a gate alpha changes with it, at some token of a chunk."""
    if not retention.gated:
        return
    more, less = (step.new_full((BATCH, HEADS), alpha) for alpha in (0.9, 0.1))
    for first, final in PLACES:
        pairs = zip(*(retention.keep(old, step, alpha, first, final) for alpha in (more, less)), strict=True)
        if any(a is not None and not torch.equal(a, b) for a, b in pairs):
            return
    raise ValueError(
        f"{type(retention).__name__}.keep reads nothing of the gate alpha: multiply what is kept by it, as in "
        "rows(alpha, old.weights), or set gated = False, so that layers have no such gate"
    )


def _check_gradients(retention: Any, old: OldMatrix, step: Tensor, alpha: Tensor) -> None:
    """Check every part of what is kept, and its gradients; of a memory that is all zero, too, without a step."""
    for size in (1.0, 0.0):
        given = {"the step": size * step, "alpha": alpha, "W": size * old.weights}
        if old.dual is not None:
            given["A"] = old.dual if retention.fixed_row_sums else size * old.dual  # rows of one sum are never all zero
        for n, part in enumerate(NewMatrix._fields):

            def kept(n: int = n, **changed: Tensor) -> Tensor:
                """One part of what is kept of a memory that is ``changed``."""
                of = old._replace(weights=changed["W"], dual=changed.get("A"))
                return retention.keep(of, changed["the step"], changed["alpha"], False, True)[n]

            if part != "dual" or retention.has_mirror_map:
                check_gradients(retention, f"keep: {part}", kept, given)


def _check_sums(retention: Any, begun: Tensor, old: OldMatrix, step: Tensor) -> None:
    """Check that all rows begin with one sum, and that none has another after a step, as ``fixed_row_sums`` says. Where
    W decays to zero, that is so after an boundary token only."""
    alpha = step.new_full((BATCH, HEADS), 0.5 if retention.gated else 1.0)
    step = step - step.mean(-1, keepdim=True)
    found = [begun, retention.keep(old, step, alpha, True, True).mirrored[0]]
    if retention.to_initial or not retention.gated:
        found.append(retention.keep(old, step, alpha, False, False).weights[0])
    sums = torch.stack([w.sum(-1) for w in found])
    if not torch.allclose(sums, sums.mean()):
        raise ValueError(
            f"{type(retention).__name__} says fixed_sums, by which writes leave out what all entries of a row have in "
            "common, but a step changes the sums of its rows, or they differ: drop it, or settle to rows of one sum"
        )


def _check_directions(retention: Any, old: OldMatrix, step: Tensor) -> None:
    """Check that what is kept goes down along the step, and is no less the memory before where alpha is larger."""
    name, nothing = type(retention).__name__, torch.zeros_like(step)
    more, less = (step.new_full((BATCH, HEADS), alpha) for alpha in (1.0, 0.1))
    all_kept, some_kept = (retention.keep(old, nothing, alpha, False, True).weights for alpha in (more, less))
    after = retention.keep(old, step, more, False, True).weights
    if (((after - all_kept) * step).sum((-2, -1)) >= 0.0).any():
        raise ValueError(f"{name}.keep does not go down along the step, which is to be subtracted: W - step")
    max_abs, near = ((w - old.weights).norm() for w in (some_kept, all_kept))
    if near > max_abs * (1.0 + 1e-9):
        raise ValueError(
            f"{name}.keep keeps less where alpha is larger: alpha is the share of the old memory that is kept, 1 all "
            "of it (Titans' letter is the share that is forgotten)"
        )
