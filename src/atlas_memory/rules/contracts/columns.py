"""Whether a part can be computed where the entries of a matrix are not known. With infinitely many features
(``Exponential``) a memory holds a column for every key, and not the entries of W."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from ..retention import AnyRetention, NewMatrix, OldMatrix
from ..step import InnerOptimiser
from .optimiser import make_at, make_sums
from .trying import BATCH, COLUMNS, HEADS, MATRIX, ROWS, apart, call, numbers


@lru_cache(maxsize=256)
def takes_any_columns(optimiser: InnerOptimiser) -> bool:
    """Whether the step of W A, for any matrix A, is the step of W times A. Then it is the same in whatever basis the
    columns are written down."""
    with apart():
        sums, weights, g = make_sums(optimiser), numbers(*MATRIX), numbers(*MATRIX, frequency=0.7)
        basis = numbers(COLUMNS, 6, frequency=0.9)
        f = basis[0]  # the first key's features: each row of ``basis`` is one key's. W = C basis is known by C

        def of_columns(w: Tensor) -> Tensor:
            return torch.nn.functional.pad((w @ (basis @ f))[..., None], (0, COLUMNS - 1))

        def of_entries(w: Tensor) -> Tensor:
            return (w @ f)[..., None] * f

        def step(by: Callable[[Tensor], Tensor], along_key: Callable[[Tensor], Tensor]) -> list[Tensor]:
            at = make_at(optimiser, False, along_key)
            after, made = optimiser.step(tuple(map(by, sums)), by(weights), by(g), at)
            return [*after, made]

        known = step(lambda w: w, of_columns)
        exact = step(lambda w: w @ basis, of_entries)
        return all(torch.allclose(a @ basis, b, rtol=1e-6, atol=1e-9) for a, b in zip(known, exact, strict=True))


@lru_cache(maxsize=256)
def keeps_any_columns(retention: AnyRetention) -> bool:
    """``takes_any_columns`` of a retention: whether what is kept of W A, for any matrix A, is what is kept of W times
    A. It is not where there is an accumulator, from which W is mapped entry by entry."""
    if retention.has_mirror_map:
        return False
    with apart():
        weights, step, basis = numbers(*MATRIX), numbers(*MATRIX, frequency=0.7), numbers(COLUMNS, 6, frequency=0.9)
        alpha, initial = 0.5 + 0.4 * numbers(BATCH, HEADS), numbers(HEADS, ROWS, COLUMNS, frequency=0.5)

        def kept(by: Callable[[Tensor], Tensor]) -> Tensor:
            first, decay_target = by(initial), retention.decay_target(by(initial))
            old = OldMatrix(by(weights), by(weights), None, first, *decay_target)
            return cast(NewMatrix, call(retention, "keep", "columns", old, by(step), alpha, False, True)).weights

        return torch.allclose(kept(lambda w: w) @ basis, kept(lambda w: w @ basis), rtol=1e-6, atol=1e-9)
