"""The numbers of a chunk (``Schedule``): how much of every token's update is in a matrix, and in its momentum, after
each token. The letters are those of fast_weight.py: b tokens, N window tokens, b c pairs, J steps, C channels; cA, cT,
D_alpha, D_theta, P and R."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.networks import Trace
from ..rules.rule import Params, Rule
from .banded import decay_matrix, running_product
from .chunk_context import Chunk
from .fast_weight import Inertia, Onward, Schedule
from .triangular import Pairs

Weights = tuple[Tensor, ...]


class Fading(NamedTuple):
    """What alpha and theta do over a chunk, the same for all matrices; leading dimensions as those of ``Schedule``.

    Attributes:
        retained: cA ``[..., b]``, how much of W_0 is left after each token.
        to_steps: D_alpha ``[..., b, J]``, only the columns of the J tokens after which a step is taken.
        momentum: cT ``[..., b]`` and D_theta ``[..., b, b]``, under Muon only the rows of those J tokens, unless the
            memory also answers with what waits for a step; None without momentum.
        plain: D_alpha ``[..., b, b]``, where errors see what plain steps would have changed; else None.
    """

    retained: Tensor
    to_steps: Tensor
    momentum: tuple[Tensor, Tensor] | None = None
    plain: Tensor | None = None

    @staticmethod
    def of(rule: Rule, alpha: Tensor, theta: Tensor) -> Fading:
        """What the gates of one chunk do: alpha ``[batch, heads, b]`` or channel-wise ``[batch, heads, b, dim]``, theta
        ``[batch, heads, b]``."""
        alpha, at = by_channel(alpha), tokens_of_steps(rule)
        to_steps = decay_matrix(alpha, columns=at)
        retained = _from_start(alpha, to_steps)
        if not rule.optimiser.has_momentum:
            return Fading(retained, to_steps)
        theta, waits = by_channel(_from_step_to_step(rule, theta)), rule.optimiser.waits
        fading = decay_matrix(theta, rows=at if waits and not _shows(rule) else None)
        plain = None
        if waits and rule.live:
            plain = to_steps if rule.every == 1 else decay_matrix(alpha)
        return Fading(retained, to_steps, (_from_start(theta, fading), fading), plain)

    @staticmethod
    def of_each(rule: Rule, chunks: Chunk) -> list[Fading]:
        """``of`` for each of n chunks, which are the first dimension of every tensor, from a few large operations."""
        n, batch = chunks.theta.shape[:2]
        fading = Fading.of(rule, chunks.alpha.flatten(0, 1), chunks.theta.flatten(0, 1))  # as sequences of a batch
        momentum = fading.momentum or (None, None)

        def each(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * n if x is None else x.unflatten(0, (n, batch)).unbind()

        parts = zip(*map(each, (fading.retained, fading.to_steps, *momentum, fading.plain)), strict=True)
        return [Fading(c, d, None if t is None else (t, by), plain) for c, d, t, by, plain in parts]


def tokens_of_steps(rule: Rule) -> slice:
    """The tokens of a chunk after which a step is taken."""
    return slice(rule.every - 1, None, rule.every)


def _shows(rule: Rule) -> bool:
    """Whether queries are also answered with what waits in S for a step; the frozen memory has nothing that waits."""
    return rule.optimiser.shows and rule.window.read != "frozen"


def schedules(
    rule: Rule,
    params: Params,
    frozen: Weights,
    trace: Trace,
    response: Tensor | None,
    chunk: Chunk,
    pairs: Pairs | None,
    fading: Fading | None = None,
) -> list[Schedule]:
    """The ``Schedule`` of every matrix over a chunk; where steps are not bounded, it is the same for all.

    Args:
        frozen: the matrices of M_f.
        trace, response: the pass of the window tokens through M_f, and their r_t (step.py) ``[..., N]``, which bounded
            steps need.
        pairs: where updates are those of pairs; else None.
        fading: what ``Fading.of`` gives for the chunk, if it has been computed.
    """
    if not rule.optimiser.bounded:
        return [bare_schedule(rule, chunk, pairs, fading)] * len(frozen)
    fading = fading or Fading.of(rule, chunk.alpha, chunk.theta)
    assert response is not None
    sizes = rule.sizes(frozen, trace, response, params)
    return [_schedule(rule, chunk, fading, _over_window(chunk, size), pairs) for size in sizes]


def bare_schedule(rule: Rule, chunk: Chunk, pairs: Pairs | None = None, fading: Fading | None = None) -> Schedule:
    """The ``Schedule`` of all matrices where steps are not bounded; arguments as for ``schedules``."""
    return _schedule(rule, chunk, fading or Fading.of(rule, chunk.alpha, chunk.theta), None, pairs)


def _over_window(chunk: Chunk, size: Tensor) -> Tensor:
    """For every token the size that bounds its step ``[..., b]``, from that of each window token alone ``[..., N]``:
    its own, and those of the older tokens of its window, weighted by its gates gamma."""
    if chunk.window.dim() == chunk.theta.dim():
        return size
    b, n = chunk.window.shape[-2:]
    own = chunk.window.diagonal(n - b, -2, -1)
    return (chunk.window @ size[..., None]).squeeze(-1) + (1.0 - own) * size[..., n - b :]


def _schedule(rule: Rule, chunk: Chunk, fading: Fading, size: Tensor | None, pairs: Pairs | None) -> Schedule:
    """The ``Schedule`` of one matrix, whose steps are bounded by ``size`` ``[..., b]``; None: not bounded."""
    single = chunk.window.dim() == chunk.theta.dim()  # windows of one token: Gamma is its diagonal
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
    apply, write = by_channel(rates.apply), by_channel(rates.write)
    at, before = tokens_of_steps(rule), rule.window.read == "before"
    decay = fading.to_steps * torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, at]
    if rule.live and not rule.optimiser.waits:
        return _of_live(rule, fading, decay, write, chunk, pairs)
    written = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    if fading.momentum is None:  # then diag(a) Gamma is P
        return Schedule(fading.retained, decay, written, rule.every, before, None)
    plain, shown, (carried, by_theta) = None, None, fading.momentum
    onward: Onward = ()
    if fading.plain is not None and rates.plain is not None:
        in_sum = _of_pairs(by_theta * write[..., None, :], chunk, pairs)  # P, of pairs
        plain = _of_pairs(fading.plain * by_channel(rates.plain)[..., None, :], chunk, pairs)
        if pairs is not None:
            onward = ((fading.plain[..., pairs.ends], plain[..., pairs.ends, :]),)
    else:
        in_sum = by_theta * written[..., None, :] if single else by_theta @ written  # P
    last = in_sum[..., -1, :]
    if _shows(rule):
        shown = _shown(rule, carried, in_sum)
    if in_sum.shape[-2] > decay.shape[-1]:  # P has all rows (``shows``); steps take only those of their tokens
        in_sum = in_sum[..., at, :]
    inertia = Inertia(carried, carried[..., at], last, plain, shown)
    return Schedule(fading.retained, decay, in_sum, rule.every, before, inertia, onward=onward)


def _of_pairs(x: Tensor, chunk: Chunk, pairs: Pairs | None) -> Tensor:
    """Rows of numbers for pairs ``[..., n, b c]``, from rows of numbers for tokens ``[..., n, b]``: each pair has its
    token's number times its gamma."""
    gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, None, :]
    return (x if pairs is None else pairs.each(x, -1)) * gamma


def _shown(rule: Rule, carried: Tensor, in_sum: Tensor) -> tuple[Tensor, Tensor]:
    """``Inertia.shown`` from cT (``carried``) and P (``in_sum``): how much of S_0 and of each update waits for a step
    when the query of each token is answered; nothing where a step has just been taken."""
    after = rule.window.read == "after"
    slot = torch.arange(int(after), carried.shape[-1] + after, device=carried.device)
    if not after:
        carried = F.pad(carried[..., :-1], (1, 0), value=1.0)
        in_sum = F.pad(in_sum[..., :-1, :], (0, 0, 1, 0))
    waits = (slot % rule.every != 0).to(carried)
    return waits * carried, waits[..., None] * in_sum


def _from_step_to_step(rule: Rule, theta: Tensor) -> Tensor:
    """theta ``[..., b]`` at the tokens that follow a step, 1 at the others."""
    if rule.every == 1 or not rule.optimiser.has_momentum:
        return theta
    slot = torch.arange(theta.shape[-1], device=theta.device)
    return torch.where(slot % rule.every == 0, theta, 1.0)


def _of_live(rule: Rule, fading: Fading, decay: Tensor, write: Tensor, chunk: Chunk, pairs: Pairs | None) -> Schedule:
    """The ``Schedule`` of live errors, whose updates are those of pairs. R is computed here once, since both the
    triangular system of the errors and the queries need it."""
    mix, inertia = decay, None
    onward: Onward = ()
    if fading.momentum is not None:
        carried, by_theta = fading.momentum
        in_sum = by_theta * write[..., None, :]  # D_theta diag(a), P without its gamma
        mix = decay @ in_sum
        inertia = Inertia(carried, carried, _of_pairs(in_sum[..., -1:, :], chunk, pairs).squeeze(-2))
        if pairs is not None:
            later = decay @ by_theta.tril(-1)[..., pairs.ends]  # what the steps after n take of S_n
            onward = ((later, _of_pairs(in_sum[..., pairs.ends, :], chunk, pairs)),)
    gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, :]
    mix = _of_pairs(mix, chunk, pairs)
    if pairs is not None:
        onward = ((fading.to_steps[..., pairs.ends], mix[..., pairs.ends, :]), *onward)
    return Schedule(fading.retained, decay, gamma, rule.every, rule.window.read == "before", inertia, mix, onward)


def _from_start(factor: Tensor, fading: Tensor) -> Tensor:
    """factor_1 * ... * factor_t for each t, ``[..., b]``: from the first column of its decay matrix, ``fading``, where
    that has all rows and columns."""
    whole = fading.shape[-2] == fading.shape[-1]
    return factor[..., :1] * fading[..., 0] if whole else running_product(factor)


def by_channel(gate: Tensor) -> Tensor:
    """A gate ``[..., b]``, or ``[..., b, dim]`` where it is channel-wise, as ``[..., C, b]`` with C = 1 or dim."""
    return gate.mT if gate.dim() == 4 else gate[..., None, :]
