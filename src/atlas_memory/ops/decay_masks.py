"""The numbers of a chunk (``DecayMasks``): how much of every token's update is in a matrix, and in its momentum, after
each token. The letters are those of fast_weight.py: b tokens, N window tokens, b c pairs, J steps, C channels; cA, cT,
D_alpha, D_theta, P and R."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.networks import ForwardCache
from ..rules.rule import Params, Rule
from .banded import decay_matrix, running_product
from .chunk_context import Chunk
from .fast_weight import DecayMasks, InterBlock, MomentumCoefficients
from .triangular import WindowPairs

Weights = tuple[Tensor, ...]


class GateDecay(NamedTuple):
    """What alpha and theta do over a chunk, the same for all matrices; leading dimensions as those of ``DecayMasks``.

    Attributes:
        retained: cA ``[..., b]``, how much of W_0 is left after each token.
        to_steps: D_alpha ``[..., b, J]``, only the columns of the J tokens after which a step is taken.
        momentum: cT ``[..., b]`` and D_theta ``[..., b, b]``, under Muon only the rows of those J tokens, unless the
            memory also answers with the pending update; None without momentum.
        plain: D_alpha ``[..., b, b]``, where errors see what plain steps would have changed; else None.
    """

    retained: Tensor
    to_steps: Tensor
    momentum: tuple[Tensor, Tensor] | None = None
    plain: Tensor | None = None

    @staticmethod
    def of(rule: Rule, alpha: Tensor, theta: Tensor) -> GateDecay:
        """What the gates of one chunk do: alpha ``[batch, heads, b]`` or channel-wise ``[batch, heads, b, dim]``, theta
        ``[batch, heads, b]``."""
        alpha, at = by_channel(alpha), tokens_of_steps(rule)
        to_steps = decay_matrix(alpha, columns=at)
        retained = _from_start(alpha, to_steps)
        if not rule.optimiser.has_momentum:
            return GateDecay(retained, to_steps)
        theta, estimates_change = by_channel(_from_step_to_step(rule, theta)), rule.optimiser.estimates_change
        gate_decay = decay_matrix(theta, rows=at if estimates_change and not _reads_pending(rule) else None)
        plain = None
        if estimates_change and rule.online:
            plain = to_steps if rule.every == 1 else decay_matrix(alpha)
        return GateDecay(retained, to_steps, (_from_start(theta, gate_decay), gate_decay), plain)

    @staticmethod
    def of_each(rule: Rule, chunks: Chunk) -> list[GateDecay]:
        """``of`` for each of n chunks, which are the first dimension of every tensor, from a few large operations."""
        n, batch = chunks.theta.shape[:2]
        gate_decay = GateDecay.of(
            rule, chunks.alpha.flatten(0, 1), chunks.theta.flatten(0, 1)
        )  # as sequences of a batch
        momentum = gate_decay.momentum or (None, None)

        def each(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * n if x is None else x.unflatten(0, (n, batch)).unbind()

        parts = zip(*map(each, (gate_decay.retained, gate_decay.to_steps, *momentum, gate_decay.plain)), strict=True)
        return [GateDecay(c, d, None if t is None else (t, by), plain) for c, d, t, by, plain in parts]


def tokens_of_steps(rule: Rule) -> slice:
    """The tokens of a chunk after which a step is taken."""
    return slice(rule.every - 1, None, rule.every)


def _reads_pending(rule: Rule) -> bool:
    """Whether queries are also answered with the pending update S for a step; the frozen memory has nothing that
    waits."""
    return rule.optimiser.read_pending and rule.window.read != "frozen"


def decay_masks(
    rule: Rule,
    params: Params,
    frozen: Weights,
    cache: ForwardCache,
    curvature_bound: Tensor | None,
    chunk: Chunk,
    pairs: WindowPairs | None,
    gate_decay: GateDecay | None = None,
) -> list[DecayMasks]:
    """The ``DecayMasks`` of every matrix over a chunk; where steps are raw, it is the same for all.

    Args:
        frozen: the matrices of M_f.
        trace, response: the pass of the window tokens through M_f, and their r_t (step.py) ``[..., N]``, which bounded
            steps need.
        pairs: where updates are those of pairs; else None.
        fading: what ``GateDecay.of`` gives for the chunk, if it has been computed.
    """
    if not rule.optimiser.normalised:
        return [raw_masks(rule, chunk, pairs, gate_decay)] * len(frozen)
    gate_decay = gate_decay or GateDecay.of(rule, chunk.alpha, chunk.theta)
    assert curvature_bound is not None
    sizes = rule.step_normalisers(frozen, cache, curvature_bound, params)
    return [_masks(rule, chunk, gate_decay, _over_window(chunk, size), pairs) for size in sizes]


def raw_masks(
    rule: Rule, chunk: Chunk, pairs: WindowPairs | None = None, gate_decay: GateDecay | None = None
) -> DecayMasks:
    """The ``DecayMasks`` of all matrices where steps are raw; arguments as for ``decay_masks``."""
    return _masks(rule, chunk, gate_decay or GateDecay.of(rule, chunk.alpha, chunk.theta), None, pairs)


def _over_window(chunk: Chunk, size: Tensor) -> Tensor:
    """For every token the size that bounds its step ``[..., b]``, from that of each window token alone ``[..., N]``:
    its own, and those of the older tokens of its window, weighted by its gates gamma."""
    if chunk.window.dim() == chunk.theta.dim():
        return size
    b, n = chunk.window.shape[-2:]
    own = chunk.window.diagonal(n - b, -2, -1)
    return (chunk.window @ size[..., None]).squeeze(-1) + (1.0 - own) * size[..., n - b :]


def _masks(
    rule: Rule, chunk: Chunk, gate_decay: GateDecay, size: Tensor | None, pairs: WindowPairs | None
) -> DecayMasks:
    """The ``DecayMasks`` of one matrix, whose steps are normalised by ``size`` ``[..., b]``; None: not bounded."""
    single = chunk.window.dim() == chunk.theta.dim()  # windows of one token: Gamma is its diagonal
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
    apply, write = by_channel(rates.apply), by_channel(rates.write)
    at, before = tokens_of_steps(rule), rule.window.read == "before"
    decay = gate_decay.to_steps * torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, at]
    if rule.online and not rule.optimiser.estimates_change:
        return _of_online(rule, gate_decay, decay, write, chunk, pairs)
    written = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    if gate_decay.momentum is None:  # then diag(a) Gamma is P
        return DecayMasks(gate_decay.retained, decay, written, rule.every, before, None)
    plain, pending, (carried, by_theta) = None, None, gate_decay.momentum
    inter_block: InterBlock = ()
    if gate_decay.plain is not None and rates.plain is not None:
        in_sum = _of_pairs(by_theta * write[..., None, :], chunk, pairs)  # P, of pairs
        plain = _of_pairs(gate_decay.plain * by_channel(rates.plain)[..., None, :], chunk, pairs)
        if pairs is not None:
            inter_block = ((gate_decay.plain[..., pairs.ends], plain[..., pairs.ends, :]),)
    else:
        in_sum = by_theta * written[..., None, :] if single else by_theta @ written  # P
    last = in_sum[..., -1, :]
    if _reads_pending(rule):
        pending = _pending(rule, carried, in_sum)
    if in_sum.shape[-2] > decay.shape[-1]:  # P has all rows (``read_pending``); steps take only those of their tokens
        in_sum = in_sum[..., at, :]
    inertia = MomentumCoefficients(carried, carried[..., at], last, plain, pending)
    return DecayMasks(gate_decay.retained, decay, in_sum, rule.every, before, inertia, inter_block=inter_block)


def _of_pairs(x: Tensor, chunk: Chunk, pairs: WindowPairs | None) -> Tensor:
    """Rows of numbers for pairs ``[..., n, b c]``, from rows of numbers for tokens ``[..., n, b]``: each pair has its
    token's number times its gamma."""
    gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, None, :]
    return (x if pairs is None else pairs.each(x, -1)) * gamma


def _pending(rule: Rule, carried: Tensor, in_sum: Tensor) -> tuple[Tensor, Tensor]:
    """``MomentumCoefficients.pending`` from cT (``carried``) and P (``in_sum``): how much of S_0 and of each update
    waits for a step when the query of each token is answered; nothing where a step has just been taken."""
    after = rule.window.read == "after"
    slot = torch.arange(int(after), carried.shape[-1] + after, device=carried.device)
    if not after:
        carried = F.pad(carried[..., :-1], (1, 0), value=1.0)
        in_sum = F.pad(in_sum[..., :-1, :], (0, 0, 1, 0))
    estimates_change = (slot % rule.every != 0).to(carried)
    return estimates_change * carried, estimates_change[..., None] * in_sum


def _from_step_to_step(rule: Rule, theta: Tensor) -> Tensor:
    """theta ``[..., b]`` at the tokens that follow a step, 1 at the others."""
    if rule.every == 1 or not rule.optimiser.has_momentum:
        return theta
    slot = torch.arange(theta.shape[-1], device=theta.device)
    return torch.where(slot % rule.every == 0, theta, 1.0)


def _of_online(
    rule: Rule, gate_decay: GateDecay, decay: Tensor, write: Tensor, chunk: Chunk, pairs: WindowPairs | None
) -> DecayMasks:
    """The ``DecayMasks`` of online errors, whose updates are those of pairs. R is computed here once, since both the
    triangular system of the errors and the queries need it."""
    mix, inertia = decay, None
    inter_block: InterBlock = ()
    if gate_decay.momentum is not None:
        carried, by_theta = gate_decay.momentum
        in_sum = by_theta * write[..., None, :]  # D_theta diag(a), P without its gamma
        mix = decay @ in_sum
        inertia = MomentumCoefficients(carried, carried, _of_pairs(in_sum[..., -1:, :], chunk, pairs).squeeze(-2))
        if pairs is not None:
            later = decay @ by_theta.tril(-1)[..., pairs.ends]  # what the steps after n take of S_n
            inter_block = ((later, _of_pairs(in_sum[..., pairs.ends, :], chunk, pairs)),)
    gamma = (chunk.window if pairs is None else pairs.gates(chunk.window))[..., None, :]
    mix = _of_pairs(mix, chunk, pairs)
    if pairs is not None:
        inter_block = ((gate_decay.to_steps[..., pairs.ends], mix[..., pairs.ends, :]), *inter_block)
    return DecayMasks(
        gate_decay.retained, decay, gamma, rule.every, rule.window.read == "before", inertia, mix, inter_block
    )


def _from_start(factor: Tensor, gate_decay: Tensor) -> Tensor:
    """factor_1 * ... * factor_t for each t, ``[..., b]``: from the first column of its decay matrix, ``gate_decay``,
    where that has all rows and columns."""
    whole = gate_decay.shape[-2] == gate_decay.shape[-1]
    return factor[..., :1] * gate_decay[..., 0] if whole else running_product(factor)


def by_channel(gate: Tensor) -> Tensor:
    """A gate ``[..., b]``, or ``[..., b, dim]`` where it is channel-wise, as ``[..., C, b]`` with C = 1 or dim."""
    return gate.mT if gate.dim() == 4 else gate[..., None, :]
