"""The errors and updates of one matrix over a chunk, where they depend on what the chunk has written before: errors
that are live (step.py) and the delta step. One triangular system each (live.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mathematics.networks import Trace
from .fast_weight import identity_steps, join_channels, scale_rows, split_channels
from .live import before_each_token, solve, stood
from .parts import Part, Setting
from .schedules import by_channel
from .settling import fading, jump


def live_errors(part: Part, trace: Trace, error: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """The errors at the body as the last matrix stands before each token, and that matrix's updates; of every pair
    where windows are longer than one token.

    Args:
        part: the last matrix.
        error, response: of the window tokens at the frozen memory, ``[..., N, dim]`` and ``[..., N]``.
    """
    setting, plan, kernel = part.setting, part.plan, part.keys.kernel()
    base, rate = error - response[..., None] * trace.body, response
    if setting.pairs is not None:
        pairs = setting.pairs
        base, kernel, rate = pairs.of(base), pairs.columns(pairs.of(kernel)), pairs.of(rate[..., None])[..., 0]
    if setting.rule.optimiser.waits:
        errors = solve(base, rate[..., None, :], _by_plain_steps(part, trace), kernel, _plain(part), setting.pairs)
        return errors, errors
    s = part.held.sums[0] if part.held.sums else None
    before = stood(part.keys, part.held.weights, s, part.home, plan, setting.pairs)
    if setting.rule.retention.lag:
        before = before + _after_lag_token(part, base + rate[..., None] * before)
    both = rate[..., None, :]
    if setting.rule.optimiser.erases:
        both = both + _kept(setting)
    updates = solve(base, both, before, kernel, plan.mixing(), setting.pairs)
    if not setting.rule.optimiser.erases:
        return updates, updates
    channels = both.shape[-2]
    answers = (split_channels(updates, channels) - split_channels(base, channels)) / both[..., None]
    return base + rate[..., None] * join_channels(answers), updates


def erasing(part: Part, deltas: Tensor) -> Tensor:
    """The updates of a delta step: what W_{t-1} holds under each key besides the deltas."""
    before = stood(part.keys, part.held.weights, None, part.home, part.plan, None)
    return solve(deltas, _kept(part.setting), before, part.keys.kernel(), part.plan.mixing(), None)


def _plain(part: Part) -> Tensor:
    mixing = part.plan.moving.plain
    assert mixing is not None
    return mixing


def _by_plain_steps(part: Part, trace: Trace) -> Tensor:
    """What the frozen memory would answer before each token had the chunk made plain steps before this call."""
    setting = part.setting
    held, changed = trace.body, part.keys.apply(part.held.sums[1])
    if setting.pairs is not None:
        held, changed = setting.pairs.of(held), setting.pairs.of(changed)
    kept = before_each_token(part.plan.retained[..., None], 1.0, setting.pairs)[..., 0]
    return held - scale_rows(kept, changed)


def _after_lag_token(part: Part, provisional: Tensor) -> Tensor:
    """What the exact W of the chunk's first token answers to those after it besides the linear one; of the token's own
    updates all is known."""
    pairs = part.setting.pairs
    s = part.held.sums[0] if part.held.sums else None
    steps = identity_steps(part.held.weights, s, part.tokens(provisional), part.plan)
    moved = part.keys.apply(jump(part, steps))
    fade = before_each_token(fading(part)[..., None], 0.0, pairs)[..., 0]
    return scale_rows(fade, moved if pairs is None else pairs.of(moved))


def _kept(setting: Setting) -> Tensor:
    """How much of W_{t-1} a delta step takes its part out of ``[..., C, b]``."""
    alpha = by_channel(setting.chunk.alpha)
    return alpha if setting.rule.optimiser.after_decay else torch.ones_like(alpha)
