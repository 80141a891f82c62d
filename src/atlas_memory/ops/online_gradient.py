"""The errors and updates of one matrix over a chunk, where they depend on what the chunk has written before: with
online errors (step.py), and with the delta step. Both solve a triangular system (triangular.py, which has the
letters)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.networks import ForwardCache
from .chunk_context import ChunkContext, MatrixContext
from .decay_masks import DecayMasks, GateDecay
from .fast_weight import join_channels, split_channels, to_rows
from .mirror_map import jump, left_of_jump
from .plain_steps import PlainSteps
from .triangular import late, solve, solve_blocks


def online_errors(
    part: MatrixContext, decay: GateDecay, masks: DecayMasks, cache: ForwardCache, error: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """The errors at the pre-norm output, taken at what the last matrix answers just before each token, and that
    matrix's updates; both ``[n, U, dim]``. The two differ only where the step also erases.

    Args:
        part: the last matrix.
        cache: the pass of the window tokens through the frozen memory.
        error: the errors at the pre-norm output that the frozen memory makes, ``[n, N, dim]``.
        rate: r_t of step.py, ``[n, N]``.
    """
    rule, pairs = part.context.rule, part.context.pairs
    base = torch.addcmul(error, rate[..., None], cache.pre_norm, value=-1)
    if pairs is not None:
        base, rate = pairs.of(base), pairs.of(rate[..., None]).squeeze(-1)
    if rule.optimiser.estimates_change:
        errors = _solve(part, masks, base, rate, _by_plain_steps(part, decay, cache))
        return errors, errors
    carried = carried_prediction(part, decay)
    if rule.retention.lag:
        carried = carried + _after_lag_token(part, decay, masks, base + rate[..., None] * carried)
    if not rule.optimiser.erases:
        updates = _solve(part, masks, base, rate, carried)
        return updates, updates
    erased = kept(part.context)
    both = rate + erased if erased.dim() == 2 else rate[:, None] + erased
    updates = _solve(part, masks, base, both, carried)
    if both.dim() == 2:
        return base + (rate / both)[..., None] * (updates - base), updates
    channels = both.shape[1]
    answers = (split_channels(updates, channels) - split_channels(base, channels)) / both[..., None]
    return base + rate[..., None] * join_channels(answers), updates


def erasing(part: MatrixContext, decay: GateDecay, masks: DecayMasks, deltas: Tensor) -> Tensor:
    """The updates of a delta step, ``[n, b, rows]``: ``deltas``, the errors at what the matrix puts out, and what
    W_{t-1} answers to each key, which is taken out."""
    return _solve(part, masks, deltas, kept(part.context), carried_prediction(part, decay))


def carried_prediction(part: MatrixContext, decay: GateDecay) -> Tensor:
    """What W_{t-1} would answer to every update's key without the chunk's writes, ``[n, U, m]``."""
    keys, state, pairs, before = part.keys, part.state, part.context.pairs, decay.retained_before
    assert before is not None
    known = keys.apply(state.weights) if keys.known is None else keys.known
    at_target = None
    if part.target is not None:
        at_target = keys.apply(part.target) if keys.at_target is None else keys.at_target
    if pairs is not None:
        known, at_target = pairs.of(known), None if at_target is None else pairs.of(at_target)
    before = to_rows(before, known.shape[-1])
    out = before * known if at_target is None else torch.lerp(at_target, known, before)
    if decay.started_before is not None:
        of_sums = keys.apply(state.sums[0])
        of_sums = of_sums if pairs is None else pairs.of(of_sums)
        out = torch.addcmul(out, to_rows(decay.started_before, out.shape[-1]), of_sums, value=-1)
    return out


def _solve(part: MatrixContext, masks: DecayMasks, base: Tensor, rate: Tensor, carried: Tensor) -> Tensor:
    kernel, mix, pairs = part.keys.kernel, masks.mix, part.context.pairs
    assert kernel is not None and mix is not None
    if pairs is not None:
        return solve_blocks(base, rate, carried, kernel, mix, masks.between, pairs)
    return solve(base, rate, carried, kernel, late(mix))


def _by_plain_steps(part: MatrixContext, decay: GateDecay, cache: ForwardCache) -> Tensor:
    """The carried prediction under Muon, whose errors see plain steps: what the last matrix of the frozen memory
    answers to each token, less what plain steps of this chunk changed in earlier calls (D, ``sums[1]``)."""
    pairs, held, changed = part.context.pairs, cache.pre_norm, part.keys.apply(part.state.sums[1])
    if pairs is not None:
        held, changed = pairs.of(held), pairs.of(changed)
    assert decay.retained_before is not None
    return torch.addcmul(held, decay.retained_before, changed, value=-1)


def _after_lag_token(part: MatrixContext, decay: GateDecay, masks: DecayMasks, provisional: Tensor) -> Tensor:
    """For a retention with a lag token: by how much the answers to all later tokens differ since the chunk's first
    token has the mirror map's W and not the linear one. That W needs the first token's own updates only, which
    ``provisional`` has right: they depend on no other update."""
    pairs = part.context.pairs
    moved = part.keys.apply(jump(PlainSteps(part, decay, masks, provisional)))
    left = late(left_of_jump(part))
    if pairs is not None:
        moved, left = pairs.of(moved), pairs.each(left, 1)
    return to_rows(left, moved.shape[-1]) * moved


def kept(context: ChunkContext) -> Tensor:
    """By what W_{t-1} has been multiplied when a delta step takes its part out of it: alpha or 1, ``[n, b]`` or
    ``[n, C, b]``."""
    alpha = context.chunk.alpha if context.chunk.alpha.dim() == 2 else context.chunk.alpha.mT
    return alpha if context.rule.optimiser.after_decay else torch.ones_like(alpha)
