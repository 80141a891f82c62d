"""The steps of Muon over a chunk: Newton-Schulz of the momentum S_n of every step n (ATLAS Eqs. 32 and 40), in one of
two spaces that give the same numbers. The other letters are those of fast_weight.py.

* In *output space* no S_n is formed. NS(S_n) = Q_n S_n with Q_n a polynomial in the Gram matrix S_n S_n^T, rows x rows.
  With E_n = diag(P[n]) Delta the weighted updates, K_kk the kernel among the window tokens, phi_k the rows f_i and
  X = phi_k S_0^T, the Gram matrix is S_n S_n^T = E_n^T K_kk E_n + cT_n (X^T E_n + E_n^T X) + cT_n^2 S_0 S_0^T.
* In *feature space* every S_n is formed, rows x columns: cheaper where the features are few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.gates import pick
from ..rules.optimisers import Muon
from .chunk_context import Inputs, MatrixContext
from .decay_masks import DecayMasks, GateDecay
from .fast_weight import decayed
from .muon_space import StepGroup, muon_of, step_groups
from .newton_schulz import gram_polynomial, newton_schulz, saturated
from .triangular import late


class MuonSteps:
    """The steps that one matrix makes over a chunk, in the cheapest of the two spaces or in the one that was asked for.
    Arguments and methods are those of ``PlainSteps``."""

    def __init__(self, part: MatrixContext, decay: GateDecay, masks: DecayMasks, updates: Tensor) -> None:
        self.part, self.decay, self.masks, self.updates = part, decay, masks, updates
        s, rule, muon_space = part.state.sums[0], part.context.rule, part.context.muon_space
        assert masks.sums is not None and decay.start is not None
        taken, window = masks.sums.shape[-2], part.keys.f.shape[-2]
        # One group where a compiler would unroll the loop.
        together = taken if torch.compiler.is_compiling() else muon_space.at_once(s)
        self.groups = step_groups(taken, window, decay.retained.shape[1], rule.every, together)
        self.start = decay.start[:, rule.every - 1 :: rule.every, None, None]  # cT at the steps
        space = muon_space.of(rule, s.shape[-2], s.shape[-1], taken, window, eigenvalues=muon_space.eigenvalues_pay(s))
        self.in_features = space == "features"
        self.taken: list[Tensor] = self._in_features(s) if self.in_features else []
        self.polynomials: list[_Polynomials] = [] if self.in_features else self._in_outputs(s)

    def _in_features(self, s: Tensor) -> list[Tensor]:
        """O(S_n) of the J' steps of each group, ``[n, J', m, F]``."""
        muon, f = muon_of(self.part.context.rule), self.part.keys.written
        assert f is not None
        taken = []
        for group in self.groups:
            new = self._weighted(group).mT @ f[:, None, : group.seen]
            sums = self.start[:, group.steps] * s[:, None] + new
            taken.append(muon.direction(sums, newton_schulz, saturated))
        return taken

    def _in_outputs(self, s: Tensor) -> list[_Polynomials]:
        muon, keys, kernel = muon_of(self.part.context.rule), self.part.keys, self.part.keys.kernel
        assert kernel is not None
        by_eigenvalues = self.part.context.muon_space.eigenvalues
        inverse, most = _power_of_two(_largest(s)), muon.most(s.shape[-2]) if muon.normalised else None
        self.s = s = s * inverse
        kernel, past, of_start = kernel[:, None], keys.apply(s)[:, None], (s @ s.mT)[:, None]  # K, X, S_0 S_0^T
        found = []
        for group in self.groups:
            upto, start = slice(group.seen), self.start[:, group.steps] / inverse[:, None]
            e = self._weighted(group)
            scale = _scale(muon, torch.maximum(_largest(e), start))
            start, e = start * scale, e * scale
            # The two cross terms are one another's transpose: one is added twice, and all made symmetric.
            gram = e.mT @ (kernel[..., upto, upto] @ e + (2.0 * start) * past[..., upto, :])
            gram = 0.5 * (gram + gram.mT) + start.square() * of_start
            q = gram_polynomial(gram, muon.steps, floor=_floor(most, scale), eigenvalues=by_eigenvalues)
            found.append(_Polynomials(group, start, e, q if most is None else most * q))
        return found

    def _weighted(self, group: StepGroup) -> Tensor:
        """E_n = diag(P[n]) Delta ``[n, J', N', m]`` for the J' steps of a group and the N' window tokens they see."""
        pairs, sums = self.part.context.pairs, self.masks.sums
        assert sums is not None
        if pairs is None:
            return sums[:, group.steps, : group.seen, None] * self.updates[:, None, : group.seen]
        seen = pairs.upto(group.seen)
        numbers = sums[:, group.steps, : seen.number]
        return (numbers[:, :, None] * seen.of_token) @ self.updates[:, None, : seen.number]

    def read(self, queries: Inputs) -> Tensor:
        """W_t f for the input f of every query, ``[n, b, m]``, as if the retention were linear at all tokens."""
        moved, late_by_one = [], self.part.context.rule.window.read == "before"
        if self.in_features:
            for group, step in zip(self.groups, self.taken, strict=True):
                moved.append(queries.f[:, None, group.first :] @ step.mT)
        else:
            assert queries.kernel is not None
            near, old = queries.kernel[:, None], queries.apply(self.s)[:, None]
            for group, start, e, q in self.polynomials:  # S_n phi(q), and then Q_n of it
                moved.append((start * old[:, :, group.first :] + near[..., group.first :, : group.seen] @ e) @ q)
        part, retained, steps = self.part, self.decay.retained, self.masks.steps
        assert steps is not None
        if late_by_one:
            retained, steps = late(retained, 1.0), late(steps)
        out = part.decayed_answer(queries, retained)
        by_step = steps.mT[..., None]
        for group, change in zip(self.groups, moved, strict=True):
            total = (by_step[:, group.steps, group.first :] * change).sum(1)
            out = out - F.pad(total, (0, 0, group.first, 0))
        return out

    def matrix(self, token: int, start: Tensor, target: Tensor | None) -> Tensor:
        """The matrix after a token (-1: the last) if it makes these steps from ``start`` on and decays to ``target``,
        ``[n, m, F]``; None: to zero."""
        assert self.masks.steps is not None
        end, steps = decayed(self.decay.retained[:, token], start, target), self.masks.steps[:, token, :, None, None]
        if self.in_features:
            for group, step in zip(self.groups, self.taken, strict=True):
                end = end - (steps[:, group.steps] * step).sum(1)
            return end
        count, m = self.part.keys.f.shape[-2], start.shape[-2]
        written, of_old = start.new_zeros(len(start), count, m), start.new_zeros(len(start), m, m)
        for group, of_start, e, q in self.polynomials:
            final = steps[:, group.steps] * q
            written = written - F.pad((e @ final).sum(1), (0, 0, 0, count - group.seen))
            of_old = of_old + (of_start * final).sum(1)
        return self.part.write(end - of_old @ self.s, written)

    def sums(self) -> tuple[Tensor, ...]:
        """The sums of a matrix after the chunk: S, and with online errors D (step.py)."""
        part, masks, filled, sums = self.part, self.masks, self.part.context.filled, self.part.state.sums
        assert masks.last is not None and self.decay.start is not None
        left = self.decay.start[:, -1, None, None] * sums[0]
        s = part.write(left, part.summed(masks.last, self.updates))
        if len(sums) == 1:
            return (s,)
        nothing = torch.zeros_like(s)
        if filled is True or masks.mix is None:
            return s, nothing
        added = part.summed(masks.mix[:, -1], self.updates)  # what plain steps would have changed
        changed = part.write(decayed(self.decay.retained[:, -1], sums[1], None), added)
        return s, pick(filled, nothing, changed)


class _Polynomials(NamedTuple):
    """Of the J' steps of a group, which see N' tokens: cT_n, E_n ``[n, J', N', m]`` and Q_n ``[n, J', m, m]``."""

    group: StepGroup
    start: Tensor
    e: Tensor
    q: Tensor


def pending_answer(part: MatrixContext, masks: DecayMasks, updates: Tensor, queries: Inputs) -> Tensor:
    """S f for every query, ``[n, b, m]``, with the pending update S when the query is answered; 0 just after a step.
    The memory answers with W - S where ``Muon.read_pending``."""
    assert masks.pending is not None and queries.kernel is not None
    of_start, rows = masks.pending
    pairs, kernel = part.context.pairs, queries.kernel
    out = (rows * (kernel if pairs is None else pairs.columns(kernel))) @ updates
    return torch.addcmul(out, of_start, queries.apply(part.state.sums[0]))


def _largest(x: Tensor) -> Tensor:
    """The largest entry of each matrix, ``[..., 1, 1]``."""
    return x.detach().abs().amax((-2, -1), keepdim=True)


def _power_of_two(size: Tensor) -> Tensor:
    """The factor that brings numbers of this size to about 1: a power of two, which rounds nothing, and is finite where
    they are too small for that. (In float32, since PyTorch's compiler makes no code for ``frexp`` of float64.)"""
    return torch.ldexp(torch.ones_like(size), -torch.frexp(size.clamp(2.0**-126, 2.0**127).float())[1])


def _scale(muon: Muon, size: Tensor) -> Tensor:
    """The factor by which S, with entries up to ``size``, is multiplied, so that its products neither over- nor
    underflow. Where steps are normalised, a floor is added to the products, and small ones may underflow."""
    inverse = _power_of_two(size.detach())
    return inverse.clamp_max(1.0) if muon.normalised else inverse


def _floor(most: float | None, scale: Tensor) -> Tensor | None:
    """The floor of ``gram_polynomial`` for a normalised step, where S has been multiplied by ``scale``: L^2 so scaled.
    ``most`` is L; None: steps are raw."""
    return None if most is None else (most * scale).square()
