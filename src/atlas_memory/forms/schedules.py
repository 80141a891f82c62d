"""All scalars of a chunk: how much of every token's update is in the memory, and in its momentum, after each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mathematics.networks import Trace
from ..mathematics.rules import Params, Rule
from .bands import EVERYTHING, decay_matrix
from .fast_weight import Inertia, Schedule
from .live import Pairs
from .parts import Chunk

Weights = tuple[Tensor, ...]


def schedules(
    rule: Rule,
    params: Params,
    frozen: Weights,
    trace: Trace,
    response: Tensor | None,
    chunk: Chunk,
    pairs: Pairs | None,
) -> list[Schedule]:
    """All scalars of a chunk, for every matrix; where steps are not bounded they are the same for all."""
    if not rule.optimiser.bounded:
        return [_schedule(rule, chunk, None, pairs)] * len(frozen)
    assert response is not None
    return [
        _schedule(rule, chunk, _over_window(chunk, size), pairs) for size in rule.sizes(frozen, trace, response, params)
    ]


def _over_window(chunk: Chunk, size: Tensor) -> Tensor:
    """Of a size of every window token ``[..., N]``, that of the token itself and, weighted by its gates, of the older
    tokens of its window ``[..., b]``."""
    if chunk.window.dim() == chunk.theta.dim():
        return size
    b, n = chunk.window.shape[-2:]
    own = chunk.window.diagonal(n - b, -2, -1)
    return (chunk.window @ size[..., None])[..., 0] + (1.0 - own) * size[..., n - b :]


def _schedule(rule: Rule, chunk: Chunk, size: Tensor | None, pairs: Pairs | None) -> Schedule:
    """Of one matrix."""
    single = chunk.window.dim() == chunk.theta.dim()
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
    theta = _from_step_to_step(rule, rates.theta)
    alpha, theta, apply, write = (by_channel(x) for x in (chunk.alpha, theta, rates.apply, rates.write))
    applied = torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, :]
    at = slice(rule.every - 1, None, rule.every)  # tokens after which a step is taken
    fading = decay_matrix(alpha, columns=at)
    decay = fading * applied[..., at]
    retained = _from_start(alpha, fading)
    live = rule.live
    if live and not rule.optimiser.waits:
        return _live_schedule(rule, chunk, pairs, retained, decay, theta, write)
    weights = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    inertia, plain, shown = None, None, None
    if rule.optimiser.has_momentum:
        shows = rule.optimiser.shows and rule.window.read != "frozen"
        fading = decay_matrix(theta, rows=EVERYTHING if shows else at)
        if live and rates.plain is not None:
            weights = _of_pairs(fading * write[..., None, :], chunk, pairs)
            plain = _of_pairs(decay_matrix(alpha) * by_channel(rates.plain)[..., None, :], chunk, pairs)
        else:
            weights = fading * weights[..., None, :] if single else fading @ weights
        carried, last = _from_start(theta, fading), weights[..., -1, :]  # weights are P now
        if shows:
            shown, weights = _shown(rule, carried, weights), weights[..., at, :]
        inertia = Inertia(carried, carried[..., at], last, plain, shown)
    return Schedule(retained, decay, weights, rule.every, rule.window.read == "before", inertia)


def _of_pairs(x: Tensor, chunk: Chunk, pairs: Pairs | None) -> Tensor:
    """Rows of numbers of every token ``[..., n, b]``, weighted by gamma: of every pair ``[..., n, P]``."""
    gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, None, :]
    return (x if pairs is None else pairs.each(x, -1)) * gamma


def _shown(rule: Rule, carried: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """How much of S_0 and of each update waits at each token, from cT and P: nothing where a step has been taken."""
    after = rule.window.read == "after"
    slot = torch.arange(int(after), carried.shape[-1] + after, device=carried.device)
    if not after:
        carried = F.pad(carried[..., :-1], (1, 0), value=1.0)
        weights = F.pad(weights[..., :-1, :], (0, 0, 1, 0))
    waits = (slot % rule.every != 0).to(carried)
    return waits * carried, waits[..., None] * weights


def _from_step_to_step(rule: Rule, theta: Tensor) -> Tensor:
    """theta ``[..., b]`` at the tokens that follow a step, 1 at the others."""
    if rule.every == 1 or not rule.optimiser.has_momentum:
        return theta
    slot = torch.arange(theta.shape[-1], device=theta.device)
    return torch.where(slot % rule.every == 0, theta, 1.0)


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
