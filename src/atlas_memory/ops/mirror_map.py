"""Retentions with a mirror map (``NonLinearRetention``), over a chunk. They are linear at all of its tokens but one, at
which W is made of the dual variable A (rules/retention.py): the chunk-boundary update, or the first token's
(``lag``)."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..rules.gates import pick
from ..rules.retention import NonLinearRetention
from .banded import decay_matrix
from .chunk_context import Inputs, MatrixContext
from .fast_weight import to_rows
from .plain_steps import PlainSteps


class BoundaryUpdate(NamedTuple):
    """What the matrix puts out for the queries, ``[n, b, m]``; and after the chunk W, the frozen W of the next chunk,
    and A."""

    out: Tensor
    weights: Tensor
    frozen: Tensor
    dual: Tensor


def jump(steps: PlainSteps) -> Tensor:
    """By how much the mirror map's W after a lag token, the chunk's first, differs from the linear one; zero for
    sequences that read this token in an earlier call."""
    part = steps.part
    assert part.state.dual is not None
    retention = cast(NonLinearRetention, part.context.rule.retention)
    linear = steps.matrix(0, part.state.weights, part.target)
    exact = retention.mirror_map(steps.matrix(0, part.state.dual, part.dual_target), part.state.start, part.initial)
    return torch.where(part.context.chunk.inside[:, 0, None, None], exact - linear, 0.0)


def left_of_jump(part: MatrixContext) -> Tensor:
    """How much of a lag token's jump is left after each token ``[n, b, C]``: it decays like all else."""
    alpha = part.context.chunk.alpha
    left = decay_matrix(alpha if alpha.dim() == 2 else alpha.mT)[..., 0]
    return left[..., None] if left.dim() == 2 else left.mT


def boundary_update(
    part: MatrixContext, queries: Inputs, out: Tensor, linear: Tensor, dual: Tensor, moved: Tensor | None
) -> BoundaryUpdate:
    """Put the answers ``out`` right that the mirror map changes (the last token's, or after a lag token, with its
    ``jump`` ``moved``, all), and map the matrix where the chunk ends; ``linear`` and ``dual`` are W and A after the
    last token."""
    retention, filled = cast(NonLinearRetention, part.context.rule.retention), part.context.filled
    frozen, reads_writes = part.state.start, part.context.rule.window.read != "frozen"
    if moved is not None:
        left = left_of_jump(part)
        if reads_writes:
            out = out + to_rows(left, out.shape[-1]) * queries.apply(moved)
        linear = linear + to_rows(left[:, -1:], moved.shape[-2]).mT * moved
    if filled is False:
        return BoundaryUpdate(out, linear, frozen, dual)
    mapped = retention.mirror_map(dual, frozen, part.initial)
    if moved is None:
        linear = pick(filled, mapped, linear)
        if reads_writes:
            last = pick(filled, queries.apply(mapped)[:, -1:], out[:, -1:])
            out = torch.cat([out[:, :-1], last], 1)
    return BoundaryUpdate(
        out, linear, pick(filled, mapped, frozen), pick(filled, retention.restart(dual, mapped), dual)
    )
