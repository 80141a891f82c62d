"""Retentions that settle (``NonLinearRetention``), over a chunk. They are linear at all of its tokens but one, the
exact token, at which W is made of the accumulator A (rules/retention.py)."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..rules.gates import pick
from ..rules.retention import NonLinearRetention, widened
from .banded import decay_matrix
from .chunk_context import Part
from .decay_masks import by_channel
from .fast_weight import Seen, Steps, scale, scale_rows


class Settled(NamedTuple):
    """What the matrix puts out for the queries, ``[..., b, m]``; and after the chunk W, the frozen W of the next chunk,
    and A."""

    out: Tensor
    weights: Tensor
    frozen: Tensor
    dual: Tensor


def linear(part: Part, steps: Steps, row: int) -> Tensor:
    """W after a token of the chunk (0: the first, -1: the last), if all of its tokens were linear."""
    w, home = part.held.weights, part.home
    return steps.weights(row, w, None if home is None else widened(home, w))


def accumulated(part: Part, steps: Steps, row: int) -> Tensor:
    """A after a token of the chunk (0: the first, -1: the last), which all of the chunk's steps have moved."""
    assert part.held.dual is not None
    return steps.weights(row, part.held.dual, part.dual_home)


def jump(part: Part, steps: Steps) -> Tensor:
    """By how much the exact W after a lag token, the chunk's first, differs from the linear one; zero for sequences
    that read this token in an earlier call."""
    retention = _settling(part)
    exact = retention.settle(accumulated(part, steps, 0), part.held.start, part.initial)
    return torch.where(part.setting.chunk.inside[..., 0, None, None], exact - linear(part, steps, 0), 0.0)


def fading(part: Part) -> Tensor:
    """How much of a lag token's jump is left after each token ``[..., C, b]``: it fades like all else."""
    return decay_matrix(by_channel(part.setting.chunk.alpha))[..., 0]


def settle(part: Part, steps: Steps, queries: Seen, out: Tensor) -> Settled:
    """Put the answers ``out`` right that the exact token changes (its own, and after a lag token all later ones), and
    settle the matrix where the chunk ends."""
    retention, filled, frozen = _settling(part), part.setting.filled, part.held.start
    last, end = accumulated(part, steps, -1), linear(part, steps, -1)
    if retention.lag:
        moved, fade = jump(part, steps), fading(part)
        out = out + scale_rows(fade, queries.apply(moved))
        end = end + scale(fade[..., -1], moved)
    if filled is False:
        return Settled(out, end, frozen, last)
    settled = retention.settle(last, frozen, part.initial)
    if not retention.lag:
        end = pick(filled, settled, end)
        out = torch.cat([out[..., :-1, :], pick(filled, queries.apply(settled)[..., -1:, :], out[..., -1:, :])], -2)
    return Settled(out, end, pick(filled, settled, frozen), pick(filled, retention.restart(last, settled), last))


def _settling(part: Part) -> NonLinearRetention:
    return cast(NonLinearRetention, part.setting.rule.retention)
