"""The steps of Muon over a chunk: Newton-Schulz of the momentum S_n of every step n (ATLAS Eqs. 32 and 40), in one of
two spaces that give the same numbers. The other letters are those of fast_weight.py.

* In *output space* no S_n is formed. NS(S_n) = Q_n S_n with Q_n a polynomial in the Gram matrix S_n S_n^T, rows x rows.
  With E_n = diag(P[n]) Delta the weighted updates, K_kk the kernel among the window tokens, phi_k the rows f_i and
  X = phi_k S_0^T, the Gram matrix is S_n S_n^T = E_n^T K_kk E_n + cT_n (X^T E_n + E_n^T X) + cT_n^2 S_0 S_0^T.
* In *feature space* every S_n is formed, rows x columns: cheaper where the features are few.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.gates import pick
from ..rules.optimisers import Muon
from .chunk_context import MatrixContext
from .fast_weight import ChunkSteps, DecayMasks, Inputs, Updates, decayed, last_momentum, scale_rows
from .muon_space import StepGroup, muon_of, step_groups
from .newton_schulz import gram_polynomial, newton_schulz, saturated
from .triangular import WindowPairs


def muon_steps(part: MatrixContext, tokens: Updates) -> ChunkSteps:
    """The steps of one matrix over a chunk, in the cheapest of the two spaces or in the one that was asked for."""
    s, rule, muon_space = part.held.sums[0], part.context.rule, part.context.muon_space
    taken, window = part.masks.in_sum.shape[-2], tokens.inputs.inputs.shape[-2]
    space = muon_space.of(rule, s.shape[-2], s.shape[-1], taken, window, eigenvalues=muon_space.eigenvalues_pay(s))
    return (_output_space if space == "outputs" else _feature_space)(part, s, tokens)


def pending_answer(part: MatrixContext, tokens: Updates, queries: Inputs) -> Tensor:
    """S f for every query, ``[..., b, m]``, with the S that waits for a step when the query is answered; 0 just after
    a step. The memory answers with W - S where ``Muon.read_pending``."""
    pending = part.masks.moving.pending
    assert pending is not None
    of_start, rows = pending
    near, pairs = queries.kernel(), part.context.pairs
    out = (rows.squeeze(-3) * (near if pairs is None else pairs.columns(near))) @ tokens.deltas
    return out + of_start.mT * queries.apply(part.held.sums[0])


def muon_sums(part: MatrixContext, tokens: Updates) -> tuple[Tensor, ...]:
    """The sums of a matrix after the chunk: S, and with online errors D (step.py)."""
    masks, filled, sums = part.masks, part.context.filled, part.held.sums
    s = last_momentum(sums[0], tokens, masks)
    if len(sums) == 1:
        return (s,)
    nothing = torch.zeros_like(s)
    if filled is True or masks.moving.plain is None:
        return s, nothing
    added = tokens.summed(masks.moving.plain[..., -1, :])  # what plain steps would have changed
    changed = tokens.write(decayed(masks.retained[..., -1], sums[1], None), added)
    return s, pick(filled, nothing, changed)


def _feature_space(part: MatrixContext, s: Tensor, tokens: Updates) -> ChunkSteps:
    masks, muon, w, features = part.masks, muon_of(part.context.rule), part.held.weights, tokens.inputs.written
    groups, carried = _groups(part, tokens), _matrix(masks.moving.at_steps)
    taken = []  # O(S_n) of the J' steps of each group: [..., J', m, F]
    for group in groups:
        new = _weighted(masks, tokens, group, part.context.pairs).mT @ features[..., None, : group.seen, :]
        sums = carried[..., group.steps, :, :] * s[..., None, :, :] + new
        taken.append(muon.direction(sums, newton_schulz, saturated))

    def read(queries: Inputs) -> Tensor:
        f = queries.features
        assert f is not None
        moved = [f[..., None, group.first :, :] @ step.mT for group, step in zip(groups, taken, strict=True)]
        return _after_steps(queries.held(w), moved, groups, masks)

    def weights(row: int, start: Tensor, decay_target: Tensor | None) -> Tensor:
        end, decay = decayed(masks.retained[..., row], start, decay_target), masks.decay[..., 0, row, :, None, None]
        for group, step in zip(groups, taken, strict=True):
            end = end - (decay[..., group.steps, :, :] * step).sum(-3)
        return end

    return ChunkSteps(read, weights)


def _output_space(part: MatrixContext, s: Tensor, tokens: Updates) -> ChunkSteps:
    masks, muon, w = part.masks, muon_of(part.context.rule), part.held.weights
    by_eigenvalues = part.context.muon_space.eigenvalues
    inverse, most = _power_of_two(_largest(s)), muon.most(s.shape[-2]) if muon.normalised else None
    s = s * inverse
    kernel, past = tokens.inputs.kernel()[..., None, :, :], tokens.inputs.apply(s)[..., None, :, :]  # K, X
    groups, carried = _groups(part, tokens), _matrix(masks.moving.at_steps)
    of_start = (s @ s.mT)[..., None, :, :]
    parts = []  # of the J' steps of each group, which see N' tokens: cT_n, E_n [..., J', N', m], Q_n [..., J', m, m]
    for group in groups:
        upto, cut = slice(group.seen), carried[..., group.steps, :, :] / inverse[..., None, :, :]
        weighted = _weighted(masks, tokens, group, part.context.pairs)
        scale = _scale(muon, torch.maximum(_largest(weighted), cut))
        cut, weighted = cut * scale, weighted * scale
        # The two cross terms are one another's transpose: one is added twice, and all made symmetric.
        cross = (2.0 * cut) * past[..., upto, :]
        gram = weighted.mT @ (kernel[..., upto, upto] @ weighted + cross)
        gram = 0.5 * (gram + gram.mT) + cut.square() * of_start
        q = gram_polynomial(gram, muon.steps, floor=_floor(most, scale), eigenvalues=by_eigenvalues)
        q = q if most is None else most * q
        parts.append((group, cut, weighted, q))

    def read(queries: Inputs) -> Tensor:
        near, old = queries.kernel()[..., None, :, :], queries.apply(s)[..., None, :, :]
        moved = []
        for group, cut, weighted, q in parts:  # S_n phi(q), and then Q_n of it
            of_sums = cut * old[..., group.first :, :] + near[..., group.first :, : group.seen] @ weighted
            moved.append(of_sums @ q)
        return _after_steps(queries.held(w), moved, groups, masks)

    def weights(row: int, start: Tensor, decay_target: Tensor | None) -> Tensor:
        end, decay = decayed(masks.retained[..., row], start, decay_target), masks.decay[..., 0, row, :, None, None]
        count = tokens.inputs.inputs.shape[-2]
        written = s.new_zeros(*s.shape[:-2], count, s.shape[-2])
        of_old = torch.zeros_like(of_start.squeeze(-3))
        for group, cut, weighted, q in parts:
            final = decay[..., group.steps, :, :] * q
            written = written - F.pad((weighted @ final).sum(-3), (0, 0, 0, count - group.seen))
            of_old = of_old + (cut * final).sum(-3)
        return tokens.write(end - of_old @ s, written)

    return ChunkSteps(read, weights)


def _weighted(masks: DecayMasks, tokens: Updates, group: StepGroup, pairs: WindowPairs | None) -> Tensor:
    """E_n = diag(P[n]) Delta ``[..., J', N', m]`` for the J' steps of a group and the N' window tokens they see."""
    if pairs is not None:
        seen = pairs.upto(group.seen)
        numbers = masks.in_sum[..., 0, group.steps, : seen.number, None]
        return seen.fold(numbers * tokens.deltas[..., None, : seen.number, :])
    return masks.in_sum[..., 0, group.steps, : group.seen, None] * tokens.deltas[..., None, : group.seen, :]


def _after_steps(held: Tensor, moved: list[Tensor], groups: list[StepGroup], masks: DecayMasks) -> Tensor:
    """W_t f for the queries, ``[..., b, m]``, from W_0 f (``held``) and what the steps of each group change of it
    (``moved``), O(S_n) f ``[..., J', b - first, m]``."""
    out = scale_rows(masks.retained_for_queries(), held)
    decay = masks.for_queries(masks.decay).squeeze(-3).mT[..., None]
    for group, part in zip(groups, moved, strict=True):
        total = (decay[..., group.steps, group.first :, :] * part).sum(-3)
        out = out - F.pad(total, (0, 0, group.first, 0))
    return out


def _groups(part: MatrixContext, tokens: Updates) -> list[StepGroup]:
    """The groups in which the steps of a chunk are computed: one group where a compiler would unroll the loop."""
    taken, window = part.masks.in_sum.shape[-2], tokens.inputs.inputs.shape[-2]
    together = taken if torch.compiler.is_compiling() else part.context.muon_space.at_once(part.held.sums[0])
    return step_groups(taken, window, part.masks.retained.shape[-1], part.masks.every, together)


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


def _matrix(factor: Tensor) -> Tensor:
    """One number a step, ``[..., 1, J]``, as factors of matrices, ``[..., J, 1, 1]``."""
    return factor[..., 0, :, None, None]
