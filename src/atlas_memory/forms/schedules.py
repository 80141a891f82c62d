"""All scalars of a chunk: how much of every token's update is in the memory, and in its momentum, after each token."""

from __future__ import annotations

from typing import NamedTuple

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


class Fading(NamedTuple):
    """What alpha and theta do over a chunk, the same for all matrices; leading dimensions as those of ``Schedule``.

    Attributes:
        retained: cA ``[..., b]``, after each token; to_steps: D_alpha at the J tokens after which a step is taken,
            ``[..., b, J]``.
        momentum: cT ``[..., b]`` and D_theta, under Muon only its rows at those tokens, unless what waits is shown;
            None without momentum.
        plain: D_alpha ``[..., b, b]``, where errors see what plain steps would have changed.
    """

    retained: Tensor
    to_steps: Tensor
    momentum: tuple[Tensor, Tensor] | None = None
    plain: Tensor | None = None

    @staticmethod
    def of(rule: Rule, chunk: Chunk) -> Fading:
        """Of a chunk."""
        alpha, at = by_channel(chunk.alpha), tokens_of_steps(rule)
        to_steps = decay_matrix(alpha, columns=at)
        retained = _from_start(alpha, to_steps)
        if not rule.optimiser.has_momentum:
            return Fading(retained, to_steps)
        theta, waits = by_channel(_from_step_to_step(rule, chunk.theta)), rule.optimiser.waits
        fading = decay_matrix(theta, rows=at if waits and not _shows(rule) else EVERYTHING)
        plain = None
        if waits and rule.live:
            plain = to_steps if rule.every == 1 else decay_matrix(alpha)
        return Fading(retained, to_steps, (_from_start(theta, fading), fading), plain)


def tokens_of_steps(rule: Rule) -> slice:
    """The tokens of a chunk after which a step is taken."""
    return slice(rule.every - 1, None, rule.every)


def _shows(rule: Rule) -> bool:
    return rule.optimiser.shows and rule.window.read != "frozen"


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
    fading = Fading.of(rule, chunk)
    if not rule.optimiser.bounded:
        return [_schedule(rule, chunk, fading, None, pairs)] * len(frozen)
    assert response is not None
    sizes = rule.sizes(frozen, trace, response, params)
    return [_schedule(rule, chunk, fading, _over_window(chunk, size), pairs) for size in sizes]


def _over_window(chunk: Chunk, size: Tensor) -> Tensor:
    """Of a size of every window token ``[..., N]``, that of the token itself and, weighted by its gates, of the older
    tokens of its window ``[..., b]``."""
    if chunk.window.dim() == chunk.theta.dim():
        return size
    b, n = chunk.window.shape[-2:]
    own = chunk.window.diagonal(n - b, -2, -1)
    return (chunk.window @ size[..., None])[..., 0] + (1.0 - own) * size[..., n - b :]


def _schedule(rule: Rule, chunk: Chunk, fading: Fading, size: Tensor | None, pairs: Pairs | None) -> Schedule:
    """Of one matrix."""
    single = chunk.window.dim() == chunk.theta.dim()
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
    apply, write = by_channel(rates.apply), by_channel(rates.write)
    at, before = tokens_of_steps(rule), rule.window.read == "before"
    decay = fading.to_steps * torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, at]
    if rule.live and not rule.optimiser.waits:
        mix, gamma, inertia = _of_live(fading, decay, write, chunk, pairs)
        return Schedule(fading.retained, decay, gamma, rule.every, before, inertia, mix)
    weights = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    if fading.momentum is None:
        return Schedule(fading.retained, decay, weights, rule.every, before, None)
    plain, shown, (carried, by_theta) = None, None, fading.momentum
    if fading.plain is not None and rates.plain is not None:
        weights = _of_pairs(by_theta * write[..., None, :], chunk, pairs)
        plain = _of_pairs(fading.plain * by_channel(rates.plain)[..., None, :], chunk, pairs)
    else:
        weights = by_theta * weights[..., None, :] if single else by_theta @ weights
    last = weights[..., -1, :]  # weights are P now
    if _shows(rule):
        shown = _shown(rule, carried, weights)
    if weights.shape[-2] > decay.shape[-1]:
        weights = weights[..., at, :]
    inertia = Inertia(carried, carried[..., at], last, plain, shown)
    return Schedule(fading.retained, decay, weights, rule.every, before, inertia)


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


def _of_live(
    fading: Fading, decay: Tensor, write: Tensor, chunk: Chunk, pairs: Pairs | None
) -> tuple[Tensor, Tensor, Inertia | None]:
    """R, the gates of the window and the momentum for updates of pairs. R is at hand, since it is read twice."""
    gamma, mix, inertia = chunk.window if pairs is None else pairs.gates(chunk.window), decay, None
    gamma = gamma[..., None, :]
    if fading.momentum is not None:
        carried, by_theta = fading.momentum
        weights = by_theta * write[..., None, :]
        mix, last = decay @ weights, weights[..., -1, :]
        inertia = Inertia(carried, carried, (last if pairs is None else pairs.each(last, -1)) * gamma)
    return (mix if pairs is None else pairs.each(mix, -1)) * gamma[..., None, :], gamma, inertia


def _from_start(factor: Tensor, fading: Tensor) -> Tensor:
    """factor_1 * ... * factor_t ``[..., b]``, with the decay matrix at hand where it is whole."""
    whole = fading.shape[-2] == fading.shape[-1]
    return factor[..., :1] * fading[..., 0] if whole else factor.cumprod(-1)


def by_channel(gate: Tensor) -> Tensor:
    """``[..., b]`` or ``[..., b, dim]`` -> ``[..., C, b]``."""
    return gate.mT if gate.dim() == 4 else gate[..., None, :]
