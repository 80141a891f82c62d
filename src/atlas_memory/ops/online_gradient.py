"""The errors and updates of one matrix over a chunk, where they depend on what the chunk has written before: with live
errors (step.py), and with the delta step. Both solve a triangular system (triangular.py, which has the letters)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.networks import ForwardCache
from ..rules.rule import Rule
from .chunk_context import Chunk, MatrixContext
from .decay_masks import by_channel
from .fast_weight import identity_steps, join_channels, scale_rows, split_channels
from .mirror_map import gate_decay, jump
from .triangular import before_each_token, carried_prediction, solve, solve_pairs


def online_errors(
    part: MatrixContext, cache: ForwardCache, error: Tensor, curvature_bound: Tensor
) -> tuple[Tensor, Tensor]:
    """The errors at the pre-norm output, taken at what the last matrix answers just before each token, and that
    matrix's updates; both ``[..., b c, dim]``, for every pair (for every token where windows have only one). The two
    differ only where the step also erases.

    Args:
        part: the last matrix.
        trace: the pass of the window tokens through the frozen memory.
        error: the errors at the pre-norm output that the frozen memory makes, ``[..., N, dim]``.
        response: r_t of step.py, ``[..., N]``.
    """
    context, masks = part.context, part.masks
    base, rate = error - curvature_bound[..., None] * cache.pre_norm, curvature_bound
    if context.pairs is not None:
        pairs = context.pairs
        base, rate = pairs.of(base), pairs.of(rate[..., None]).squeeze(-1)
    if context.rule.optimiser.estimates_change:
        errors = _solve(part, base, rate[..., None, :], _by_plain_steps(part, cache), _plain(part))
        return errors, errors
    s = part.held.sums[0] if part.held.sums else None
    before = carried_prediction(part.keys, part.held.weights, s, part.decay_target, masks, context.pairs)
    if context.rule.retention.lag:
        before = before + _after_lag_token(part, base + rate[..., None] * before)
    both = rate[..., None, :]
    if context.rule.optimiser.erases:
        both = both + kept(context.rule, context.chunk)
    updates = _solve(part, base, both, before, masks.mixing())
    if not context.rule.optimiser.erases:
        return updates, updates
    channels = both.shape[-2]
    answers = (split_channels(updates, channels) - split_channels(base, channels)) / both[..., None]
    return base + rate[..., None] * join_channels(answers), updates


def erasing(part: MatrixContext, deltas: Tensor) -> Tensor:
    """The updates of a delta step, ``[..., b, rows]``: ``deltas``, the errors at what the matrix puts out, and what
    W_{t-1} answers to each key, which is taken out."""
    before = carried_prediction(part.keys, part.held.weights, None, part.decay_target, part.masks, None)
    return _solve(part, deltas, kept(part.context.rule, part.context.chunk), before, part.masks.mixing())


def _solve(part: MatrixContext, base: Tensor, rate: Tensor, before: Tensor, mixing: Tensor) -> Tensor:
    """The updates that solve the triangular system; arguments as for ``solve``, but R (``mixing``) not a row late."""
    pairs, kernel = part.context.pairs, part.keys.kernel()
    if pairs is not None:
        return solve_pairs(base, rate, before, kernel, mixing, part.masks.inter_block, pairs)
    return solve(base, rate, before, kernel, before_each_token(mixing, 0.0, None))


def _plain(part: MatrixContext) -> Tensor:
    mixing = part.masks.moving.plain
    assert mixing is not None
    return mixing


def _by_plain_steps(part: MatrixContext, cache: ForwardCache) -> Tensor:
    """``carried_prediction`` of triangular.py under Muon, whose errors see plain steps: what the last matrix of the
    frozen memory answers to each token, less what plain steps of this chunk changed in earlier calls (D,
    ``sums[1]``)."""
    context = part.context
    held, changed = cache.pre_norm, part.keys.apply(part.held.sums[1])
    if context.pairs is not None:
        held, changed = context.pairs.of(held), context.pairs.of(changed)
    left = before_each_token(part.masks.retained[..., None], 1.0, context.pairs).squeeze(-1)
    return held - scale_rows(left, changed)


def _after_lag_token(part: MatrixContext, provisional: Tensor) -> Tensor:
    """For a retention with a lag token: by how much the answers to all later tokens differ since the chunk's first
    token has the exact W and not the linear one. That W needs the first token's own updates only, which ``provisional``
    has right: they depend on no other update."""
    pairs = part.context.pairs
    s = part.held.sums[0] if part.held.sums else None
    steps = identity_steps(part.held.weights, s, part.tokens(provisional), part.masks)
    moved = part.keys.apply(jump(part, steps))
    fade = before_each_token(gate_decay(part)[..., None], 0.0, pairs).squeeze(-1)
    return scale_rows(fade, moved if pairs is None else pairs.of(moved))


def kept(rule: Rule, chunk: Chunk) -> Tensor:
    """By what W_{t-1} has been multiplied when a delta step takes its part out of it: alpha or 1, ``[..., C, b]``."""
    alpha = by_channel(chunk.alpha)
    return alpha if rule.optimiser.after_decay else torch.ones_like(alpha)
