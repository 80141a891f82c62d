"""All scalars of a chunk: how much of every token's update is in the memory, and in its momentum, after each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .fast_weight import Inertia, Schedule, rows_at, step_tokens
from .live import Pairs
from .networks import Trace
from .rules import Params, Rule
from .windows import EVERYTHING, decay_matrix

if TYPE_CHECKING:
    from .chunk import Chunk

Weights = tuple[Tensor, ...]


def schedules(
    rule: Rule,
    params: Params,
    frozen: Weights,
    trace: Trace,
    response: Tensor | None,
    chunk: Chunk,
    first: Tensor,
    pairs: Pairs | None,
) -> list[Schedule]:
    """All scalars of a chunk, for every matrix; where steps are not bounded they are the same for all."""
    if not rule.optimiser.bounded:
        return [_schedule(rule, chunk, first, None, pairs)] * len(frozen)
    assert response is not None
    return [
        _schedule(rule, chunk, first, _over_window(chunk, size), pairs)
        for size in rule.sizes(frozen, trace, response, params)
    ]


def _over_window(chunk: Chunk, size: Tensor) -> Tensor:
    """Of a size of every window token ``[..., N]``, that of the token itself and, weighted by its gates, of the older
    tokens of its window ``[..., b]``."""
    if chunk.window.dim() == chunk.theta.dim():
        return size
    b, n = chunk.window.shape[-2:]
    own = chunk.window.diagonal(n - b, -2, -1)
    return (chunk.window @ size[..., None])[..., 0] + (1.0 - own) * size[..., n - b :]


def _schedule(rule: Rule, chunk: Chunk, first: Tensor, size: Tensor | None, pairs: Pairs | None) -> Schedule:
    """Of one matrix."""
    single = chunk.window.dim() == chunk.theta.dim()
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
    alpha, theta, apply, write = (by_channel(x) for x in (chunk.alpha, rates.theta, rates.apply, rates.write))
    applied = torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, :]
    at, valid = step_tokens(first, rule.every, rule.window.chunk)
    alike = at if isinstance(at, slice) else EVERYTHING
    fading = decay_matrix(alpha, columns=alike)
    decay = fading * applied[..., alike]
    retained = _from_start(alpha, fading)
    live = rule.live
    if live and not rule.optimiser.waits:
        return _live_schedule(rule, chunk, pairs, retained, decay, theta, write)
    weights = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    inertia, plain = None, None
    if rule.optimiser.has_momentum:
        fading = decay_matrix(theta, rows=alike)
        if live and rates.plain is not None:  # of pairs
            gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, None, :]

            def of_pairs(x: Tensor) -> Tensor:
                return (x if pairs is None else pairs.each(x, -1)) * gamma

            weights = of_pairs(fading * write[..., None, :])
            plain = of_pairs(decay_matrix(alpha) * by_channel(rates.plain)[..., None, :])
        else:
            weights = fading * weights[..., None, :] if single else fading @ weights
        carried, last = _from_start(theta, fading), weights[..., -1, :]  # weights are P now
        at_steps = carried[..., alike]
        if not isinstance(at, slice):  # steps fall on other tokens in every chunk; only Muon has such
            steps = rows_at(decay.mT, at)
            decay = (steps if valid is None else steps * valid[:, None, None, :, None]).mT
            weights, at_steps = rows_at(weights, at), rows_at(carried[..., None], at)[..., 0]
        inertia = Inertia(carried, at_steps, last, plain)
    return Schedule(retained, decay, weights, rule.every, rule.window.read == "before", inertia)


def _live_schedule(
    rule: Rule, chunk: Chunk, pairs: Pairs | None, retained: Tensor, decay: Tensor, theta: Tensor, write: Tensor
) -> Schedule:
    """As ``_schedule``, for updates of pairs, and with R at hand: it is read twice."""
    gamma, inertia, mix = chunk.window if pairs is None else pairs.gates(chunk.window), None, decay
    gamma = gamma[..., None, :]
    if rule.optimiser.has_momentum:
        fading = decay_matrix(theta) * write[..., None, :]
        carried, last = theta.cumprod(-1), fading[..., -1, :]
        mix = decay @ fading
        inertia = Inertia(carried, carried, (last if pairs is None else pairs.each(last, -1)) * gamma)
    mix = (mix if pairs is None else pairs.each(mix, -1)) * gamma[..., None, :]
    return Schedule(retained, decay, gamma, rule.every, rule.window.read == "before", inertia, mix)


def _from_start(factor: Tensor, fading: Tensor) -> Tensor:
    """factor_1 * ... * factor_t ``[..., b]``, with the decay matrix at hand where it is whole."""
    whole = fading.shape[-2] == fading.shape[-1]
    return factor[..., :1] * fading[..., 0] if whole else factor.cumprod(-1)


def by_channel(gate: Tensor) -> Tensor:
    """``[..., b]`` or ``[..., b, dim]`` -> ``[..., C, b]``."""
    return gate.mT if gate.dim() == 4 else gate[..., None, :]
