"""The errors and updates of one matrix over a chunk, where they depend on what the chunk has written before: with live
errors (step.py), and with the delta step. Both solve a triangular system (triangular.py, which has the letters)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.networks import Trace
from ..rules.rule import Rule
from .chunk_context import Chunk, Part
from .decay_masks import by_channel
from .fast_weight import identity_steps, join_channels, scale_rows, split_channels
from .mirror_map import fading, jump
from .triangular import before_each_token, solve, solve_pairs, stood


def live_errors(part: Part, trace: Trace, error: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """The errors at the body, taken at what the last matrix answers just before each token, and that matrix's updates;
    both ``[..., b c, dim]``, for every pair (for every token where windows have only one). The two differ only where
    the step also erases.

    Args:
        part: the last matrix.
        trace: the pass of the window tokens through the frozen memory.
        error: the errors at the body that the frozen memory makes, ``[..., N, dim]``.
        response: r_t of step.py, ``[..., N]``.
    """
    setting, plan = part.setting, part.plan
    base, rate = error - response[..., None] * trace.body, response
    if setting.pairs is not None:
        pairs = setting.pairs
        base, rate = pairs.of(base), pairs.of(rate[..., None]).squeeze(-1)
    if setting.rule.optimiser.waits:
        errors = _solve(part, base, rate[..., None, :], _by_plain_steps(part, trace), _plain(part))
        return errors, errors
    s = part.held.sums[0] if part.held.sums else None
    before = stood(part.keys, part.held.weights, s, part.home, plan, setting.pairs)
    if setting.rule.retention.lag:
        before = before + _after_lag_token(part, base + rate[..., None] * before)
    both = rate[..., None, :]
    if setting.rule.optimiser.erases:
        both = both + kept(setting.rule, setting.chunk)
    updates = _solve(part, base, both, before, plan.mixing())
    if not setting.rule.optimiser.erases:
        return updates, updates
    channels = both.shape[-2]
    answers = (split_channels(updates, channels) - split_channels(base, channels)) / both[..., None]
    return base + rate[..., None] * join_channels(answers), updates


def erasing(part: Part, deltas: Tensor) -> Tensor:
    """The updates of a delta step, ``[..., b, rows]``: ``deltas``, the errors at what the matrix puts out, and what
    W_{t-1} answers to each key, which is taken out."""
    before = stood(part.keys, part.held.weights, None, part.home, part.plan, None)
    return _solve(part, deltas, kept(part.setting.rule, part.setting.chunk), before, part.plan.mixing())


def _solve(part: Part, base: Tensor, rate: Tensor, before: Tensor, mixing: Tensor) -> Tensor:
    """The updates that solve the triangular system; arguments as for ``solve``, but R (``mixing``) not a row late."""
    pairs, kernel = part.setting.pairs, part.keys.kernel()
    if pairs is not None:
        return solve_pairs(base, rate, before, kernel, mixing, part.plan.onward, pairs)
    return solve(base, rate, before, kernel, before_each_token(mixing, 0.0, None))


def _plain(part: Part) -> Tensor:
    mixing = part.plan.moving.plain
    assert mixing is not None
    return mixing


def _by_plain_steps(part: Part, trace: Trace) -> Tensor:
    """``stood`` of triangular.py under Muon, whose errors see plain steps: what the last matrix of the frozen memory
    answers to each token, less what plain steps of this chunk changed in earlier calls (D, ``sums[1]``)."""
    setting = part.setting
    held, changed = trace.body, part.keys.apply(part.held.sums[1])
    if setting.pairs is not None:
        held, changed = setting.pairs.of(held), setting.pairs.of(changed)
    left = before_each_token(part.plan.retained[..., None], 1.0, setting.pairs).squeeze(-1)
    return held - scale_rows(left, changed)


def _after_lag_token(part: Part, provisional: Tensor) -> Tensor:
    """For a retention with a lag token: by how much the answers to all later tokens differ since the chunk's first
    token has the exact W and not the linear one. That W needs the first token's own updates only, which ``provisional``
    has right: they depend on no other update."""
    pairs = part.setting.pairs
    s = part.held.sums[0] if part.held.sums else None
    steps = identity_steps(part.held.weights, s, part.tokens(provisional), part.plan)
    moved = part.keys.apply(jump(part, steps))
    fade = before_each_token(fading(part)[..., None], 0.0, pairs).squeeze(-1)
    return scale_rows(fade, moved if pairs is None else pairs.of(moved))


def kept(rule: Rule, chunk: Chunk) -> Tensor:
    """By what W_{t-1} has been multiplied when a delta step takes its part out of it: alpha or 1, ``[..., C, b]``."""
    alpha = by_channel(chunk.alpha)
    return alpha if rule.optimiser.after_decay else torch.ones_like(alpha)
