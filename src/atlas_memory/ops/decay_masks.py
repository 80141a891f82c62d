"""How much of every update is in a matrix, and in its momentum, after each token of a chunk. The letters are those of
fast_weight.py: b tokens, N window tokens, J steps, C channels; cA, cT, D_alpha, D_theta, P and R. There are U updates:
one a token with windows of one token; b c pairs with longer windows and online errors; one a window token otherwise."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.rule import Rule
from .banded import decay_matrix, running_product
from .chunk_context import Chunk, ChunkContext
from .triangular import WindowPairs, late


class GateDecay(NamedTuple):
    """What the gates alone say of a chunk, the same for all matrices and whatever the sizes of the steps. Masks are
    ``[n, b, U]``, or ``[n, C, b, U]`` where alpha is channel-wise; where errors are frozen and windows longer than one
    token, they have a column for each token, and Gamma comes later (``DecayMasks``).

    Attributes:
        retained: cA ``[n, b, C]``; ``retained_before`` the same just before the token of each update, ``[n, U, C]``.
        start: cT ``[n, b]``, how much of S_0 is in the momentum.
        started: how much of S_0 the steps have brought into the matrix, ``[n, b, C]``; ``started_before`` as above.
            Under Muon and without momentum, None.
        mix: R without the sizes of steps; under Muon with online errors the same of plain steps, else None.
        sums: P without the sizes of steps: its last row; under Muon the rows of the J steps, or all rows where the
            memory answers with the pending update; None without momentum.
        steps: under Muon, D_alpha ``[n, b, J]``, only the columns of the J tokens after which a step is taken.
        after: with more than one block of pairs (triangular.py), how much of W as it is after each of the E blocks is
            in it at later tokens, ``[n, b, E]`` or ``[n, C, b, E]``; with momentum the same of S, and P at the blocks'
            ends without the sizes of steps.
    """

    retained: Tensor
    retained_before: Tensor | None = None
    start: Tensor | None = None
    started: Tensor | None = None
    started_before: Tensor | None = None
    mix: Tensor | None = None
    sums: Tensor | None = None
    steps: Tensor | None = None
    after: tuple[Tensor, ...] = ()

    @staticmethod
    def of(rule: Rule, chunk: Chunk, pairs: WindowPairs | None) -> GateDecay:
        """For one chunk, or for several as sequences of a batch."""
        alpha = chunk.alpha if chunk.alpha.dim() == 2 else chunk.alpha.mT
        muon = rule.optimiser.estimates_change
        at_steps = slice(rule.every - 1, None, rule.every) if muon and not rule.online else None
        decay = decay_matrix(alpha, columns=at_steps)
        retained = _by_token(_from_start(alpha, decay))
        before = _before_updates(retained, 1.0, pairs) if rule.online or rule.optimiser.erases else None
        inside = chunk.inside if at_steps is None else chunk.inside[:, at_steps]
        steps, ends = torch.where(inside[:, None] if decay.dim() == 3 else inside[:, None, None], decay, 0.0), None
        after: tuple[Tensor, ...] = ()
        if pairs is not None and pairs.chunk > pairs.block:
            ends = pairs.ends
            after = (decay[..., ends],)
        if muon:
            return GateDecay._of_muon(rule, chunk, pairs, GateDecay(retained, before, after=after), decay, steps)
        if not rule.optimiser.has_momentum:
            return GateDecay(retained, before, mix=_of_updates(steps, chunk, pairs), after=after)
        by_theta = decay_matrix(chunk.theta)
        start = _from_start(chunk.theta, by_theta)
        wide = by_theta if steps.dim() == 3 else by_theta[:, None]
        started = _by_token((steps @ (start if steps.dim() == 3 else start[:, None])[..., None]).squeeze(-1))
        if ends is not None:
            after = (*after, steps @ wide.tril(-1)[..., ends], _of_updates(by_theta[..., ends, :], chunk, pairs))
        return GateDecay(
            retained,
            before,
            start,
            started,
            None if before is None else _before_updates(started, 0.0, pairs),
            _of_updates(steps @ wide, chunk, pairs),
            _of_updates(by_theta[..., -1:, :], chunk, pairs),
            after=after,
        )

    @staticmethod
    def _of_muon(
        rule: Rule, chunk: Chunk, pairs: WindowPairs | None, found: GateDecay, decay: Tensor, steps: Tensor
    ) -> GateDecay:
        at = slice(rule.every - 1, None, rule.every)
        theta = chunk.theta
        if rule.every > 1:  # theta acts at the tokens that follow a step
            slot = torch.arange(theta.shape[-1], device=theta.device)
            theta = torch.where(slot % rule.every == 0, theta, 1.0)
        by_theta = decay_matrix(theta, rows=None if reads_pending(rule) else at)
        return found._replace(
            start=_from_start(theta, by_theta),
            mix=_of_updates(decay, chunk, pairs) if rule.online else None,
            sums=_of_updates(by_theta, chunk, pairs),
            steps=steps[..., at] if rule.online else steps,
        )


class DecayMasks(NamedTuple):
    """The masks of one matrix, with the sizes of its steps; shapes as in ``GateDecay``.

    Attributes:
        mix: R ``[n, b, U]`` or ``[n, C, b, U]``, how much of each update is in the matrix after each token; under Muon
            with online errors, how much plain steps would have brought there (D of step.py).
        last: P at the chunk's last token, ``[n, U]`` or ``[n, C, U]``; None without momentum.
        steps: under Muon, D_alpha diag(e) ``[n, b, J]``.
        sums: under Muon, P at the J steps, ``[n, J, U]``.
        pending: where the memory answers with the pending update, how much of S_0 and of each update the query of each
            token meets in S, ``[n, b, 1]`` and ``[n, b, U]``; 0 just after a step.
        between: the inter-block coefficients. For W and, with momentum, for S: how much of the matrix as it is after
            each of the E blocks is in W at later tokens, and how much of each update it then has, ``[n, E, U]``.
    """

    mix: Tensor | None = None
    last: Tensor | None = None
    steps: Tensor | None = None
    sums: Tensor | None = None
    pending: tuple[Tensor, Tensor] | None = None
    between: tuple[tuple[Tensor, Tensor], ...] = ()

    @staticmethod
    def of(context: ChunkContext, decay: GateDecay, size: Tensor | None) -> DecayMasks:
        """For steps that are normalised by ``size`` ``[n, b]``; None: raw steps."""
        rule, chunk, pairs = context.rule, context.chunk, context.pairs
        rates = rule.optimiser.rates(chunk.theta, chunk.eta, size, rule.every, rule.window.chunk)
        if decay.steps is not None:
            return _of_muon(context, decay, rates.write, rates.apply, rates.plain)
        momentum = decay.sums is not None
        sizes = rates.write if momentum else rates.apply
        sizes = sizes if pairs is None else pairs.each(sizes, 1)
        assert decay.mix is not None
        mix, last = _sized(decay.mix, sizes, context), None
        between: tuple[tuple[Tensor, Tensor], ...] = ()
        if decay.after and pairs is not None:
            between = ((decay.after[0], mix[..., pairs.ends, :]),)
            if momentum:
                between = (*between, (decay.after[1], _sized(decay.after[2], sizes, context)))
        if decay.sums is not None:
            last = _sized(decay.sums, sizes, context).squeeze(-2)
        return DecayMasks(mix, last, between=between)


def _of_muon(context: ChunkContext, decay: GateDecay, write: Tensor, apply: Tensor, plain: Tensor | None) -> DecayMasks:
    rule, pairs = context.rule, context.pairs
    assert decay.steps is not None and decay.sums is not None
    at = slice(rule.every - 1, None, rule.every)
    # Normalised steps have e = 1, raw ones a = 1.
    steps = decay.steps if rule.optimiser.normalised else decay.steps * apply[:, None, at]
    sums = _sized(decay.sums, write if pairs is None else pairs.each(write, 1), context)
    mix, pending = None, None
    between: tuple[tuple[Tensor, Tensor], ...] = ()
    if decay.mix is not None and plain is not None:
        mix = _sized(decay.mix, plain if pairs is None else pairs.each(plain, 1), context)
        if decay.after and pairs is not None:
            between = ((decay.after[0], mix[..., pairs.ends, :]),)
    last = sums[..., -1, :]
    if reads_pending(rule):
        assert decay.start is not None
        pending = _pending(rule, decay.start, sums)
        sums = sums[..., at, :]
    return DecayMasks(mix, last, steps, sums, pending, between)


def reads_pending(rule: Rule) -> bool:
    """Whether queries are read with the pending update; the frozen memory has none."""
    return rule.optimiser.read_pending and rule.window.read != "frozen"


def over_window(window: Tensor | None, size: Tensor) -> Tensor:
    """For every token the size that normalises its step ``[n, b]``, from that of each window token alone ``[n, N]``:
    its own, and those of the older tokens of its window, weighted by their gates (``own_gate_one``)."""
    return size if window is None else window.bmm(size[..., None]).squeeze(-1)


def own_gate_one(window: Tensor) -> Tensor | None:
    """Gamma ``[n, b, N]`` with 1 as the gate of each token itself; None with windows of one token."""
    if window.dim() == 2:
        return None
    b, n = window.shape[-2:]
    return window.diagonal_scatter(window.new_ones(len(window), b), n - b, -2, -1)


def _of_updates(mask: Tensor, chunk: Chunk, pairs: WindowPairs | None) -> Tensor:
    """A mask with a column for each update, times its gamma, from one with a column for each token. With frozen errors
    and windows longer than one token ``_sized`` does that, after the sizes of steps."""
    if chunk.window.dim() == 2:
        gamma = chunk.window
    elif pairs is not None:
        mask, gamma = pairs.each(mask, -1), pairs.gates(chunk.window)
    else:
        return mask
    return mask * (gamma[:, None] if mask.dim() == 3 else gamma[:, None, None])


def _sized(mask: Tensor, sizes: Tensor, context: ChunkContext) -> Tensor:
    """A mask of ``GateDecay`` with the size of each update's step, ``[n, U]`` or ``[n, U, C]``."""
    if sizes.dim() == 3:
        mask = (mask if mask.dim() == 4 else mask[:, None]) * sizes.mT[:, :, None]
    else:
        mask = mask * (sizes[:, None] if mask.dim() == 3 else sizes[:, None, None])
    window = context.chunk.window
    if context.pairs is not None or window.dim() == 2:
        return mask
    return mask @ (window if mask.dim() == 3 else window[:, None])


def _pending(rule: Rule, start: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """``DecayMasks.pending`` from cT and P: nothing where a step has just been taken."""
    after = rule.window.read == "after"
    slot = torch.arange(int(after), start.shape[-1] + after, device=start.device)
    if not after:
        start, sums = F.pad(start[..., :-1], (1, 0), value=1.0), late(sums)
    held = (slot % rule.every != 0).to(start)[:, None]
    return held * start[..., None], held * sums


def _before_updates(factor: Tensor, at_start: float, pairs: WindowPairs | None) -> Tensor:
    """Factors of tokens ``[n, b, C]`` just before the token of each update, ``[n, U, C]``."""
    factor = late(factor, at_start)
    return factor if pairs is None else pairs.each(factor, 1)


def _by_token(factor: Tensor) -> Tensor:
    """``[n, b]`` or ``[n, C, b]`` as ``[n, b, C]``."""
    return factor[..., None] if factor.dim() == 2 else factor.mT


def _from_start(factor: Tensor, decay: Tensor) -> Tensor:
    """factor_1 * ... * factor_t for each t, ``[..., b]``: from the first column of its decay matrix, where that has all
    rows."""
    return factor[..., :1] * decay[..., 0] if decay.shape[-2] == decay.shape[-1] else running_product(factor)
