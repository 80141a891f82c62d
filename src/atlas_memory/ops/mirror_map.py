"""Retentions with a mirror map (``NonLinearRetention``), over a chunk. They are linear at all of its tokens but one,
the boundary token, at which W is made of the accumulator A (rules/retention.py)."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..rules.gates import pick
from ..rules.retention import NonLinearRetention, padded_to
from .banded import decay_matrix
from .chunk_context import MatrixContext
from .decay_masks import by_channel
from .fast_weight import ChunkSteps, Inputs, scale, scale_rows


class BoundaryUpdate(NamedTuple):
    """What the matrix puts out for the queries, ``[..., b, m]``; and after the chunk W, the frozen W of the next chunk,
    and A."""

    out: Tensor
    weights: Tensor
    frozen: Tensor
    dual: Tensor


def linear(part: MatrixContext, steps: ChunkSteps, row: int) -> Tensor:
    """W after a token of the chunk (0: the first, -1: the last), if all of its tokens were linear."""
    w, decay_target = part.held.weights, part.decay_target
    return steps.weights(row, w, None if decay_target is None else padded_to(decay_target, w))


def accumulated(part: MatrixContext, steps: ChunkSteps, row: int) -> Tensor:
    """A after a token of the chunk (0: the first, -1: the last), which all of the chunk's steps have moved."""
    assert part.held.dual is not None
    return steps.weights(row, part.held.dual, part.dual_target)


def jump(part: MatrixContext, steps: ChunkSteps) -> Tensor:
    """By how much the exact W after a lag token, the chunk's first, differs from the linear one; zero for sequences
    that read this token in an earlier call."""
    retention = _retention(part)
    exact = retention.mirror_map(accumulated(part, steps, 0), part.held.start, part.initial)
    return torch.where(part.context.chunk.inside[..., 0, None, None], exact - linear(part, steps, 0), 0.0)


def gate_decay(part: MatrixContext) -> Tensor:
    """How much of a lag token's jump is left after each token ``[..., C, b]``: it decays like all else."""
    return decay_matrix(by_channel(part.context.chunk.alpha))[..., 0]


def boundary_update(part: MatrixContext, steps: ChunkSteps, queries: Inputs, out: Tensor) -> BoundaryUpdate:
    """Put the answers ``out`` right that the token of the chunk-boundary update changes (its own, and after a lag token
    all later ones), and settle the matrix where the chunk ends."""
    retention, filled, frozen = _retention(part), part.context.filled, part.held.start
    last, end = accumulated(part, steps, -1), linear(part, steps, -1)
    if retention.lag:
        moved, fade = jump(part, steps), gate_decay(part)
        out = out + scale_rows(fade, queries.apply(moved))
        end = end + scale(fade[..., -1], moved)
    if filled is False:
        return BoundaryUpdate(out, end, frozen, last)
    mirrored = retention.mirror_map(last, frozen, part.initial)
    if not retention.lag:
        end = pick(filled, mirrored, end)
        out = torch.cat([out[..., :-1, :], pick(filled, queries.apply(mirrored)[..., -1:, :], out[..., -1:, :])], -2)
    return BoundaryUpdate(
        out, end, pick(filled, mirrored, frozen), pick(filled, retention.restart(last, mirrored), last)
    )


def _retention(part: MatrixContext) -> NonLinearRetention:
    return cast(NonLinearRetention, part.context.rule.retention)
