"""Newton-Schulz at every step of a chunk (ATLAS Eqs. 32 and 40), in one of three exact spaces; see fast_weight.py.

* O = Newton-Schulz in *output space*: NS(S_n) = Q_n S_n with Q_n a polynomial in the rows x rows matrix S_n S_n^T, and
  S_n S_n^T = E_n^T K_kk E_n + cT_n (X^T E_n + E_n^T X) + cT_n^2 S_0 S_0^T, E_n = diag(P[n]) Delta, X = phi_k S_0^T.
* O = Newton-Schulz in *feature space*: every S_n is formed; cheaper when the features are few.
* O = Newton-Schulz in *token space*, where S_0 is a sum over tokens too (``Muon.horizon``): S_n = Delta^T D_n f with T
  tokens and D_n diagonal, and NS(S_n) = Delta^T D_n Q_n f with Q_n the same polynomial in the T x T matrix
  K D_n (Delta Delta^T) D_n, K = f f^T, for (S S^T)^j S = Delta^T D (K D Delta Delta^T D)^j f. Neither m nor F enters:
  cheaper when both are longer than T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast_newton_schulz import gram_cost, gram_polynomial, kept_length_of_gram, newton_schulz, schulz_cost
from .fast_weight import Schedule, Seen, Steps, Tokens, scale, scale_rows
from .gram_eigenvalues import eigenvalues_cost, eigenvalues_pay
from .horizon import Factors
from .optimisers import Muon


def muon_steps(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, muon: Muon) -> Steps:
    """Muon from a momentum in matrices; arguments and result as for ``identity_steps``, C = 1. Picks the cheaper of the
    two exact spaces."""
    taken, window, chunk = plan.weights.shape[-2], tokens.inputs.inputs.shape[-2], plan.retained.shape[-1]
    fast = eigenvalues_pay(w)
    space = cheapest_space(w.shape[-2], w.shape[-1], taken, window, chunk, muon.steps, plan.every, eigenvalues=fast)
    return (_output_space if space == "outputs" else _feature_space)(w, s, tokens, plan, muon)


def cheapest_space(
    rows: int,
    columns: int,
    taken: int,
    window: int,
    chunk: int,
    steps: int,
    every: int = 1,
    horizon: bool = False,
    eigenvalues: bool = False,
) -> str:
    """In which space Newton-Schulz needs the fewest multiply-adds: "features", "outputs" or, with a ``horizon`` and so
    twice ``window`` tokens in S, "tokens"; for ``taken`` steps, of ``steps`` iterations each, in a chunk of ``chunk``
    tokens with ``window`` window tokens. ``eigenvalues``: symmetric matrices go by theirs."""
    m, f, n, b, t = rows, columns, window, chunk, 2 * window
    costs = {"features": n * m * f, "outputs": 2 * m * m * f + (3 * n + b) * m * f}
    of_gram = min(gram_cost(m, steps), eigenvalues_cost(m)) if eigenvalues else gram_cost(m, steps)
    for group in step_groups(taken, n, b, every):
        count, seen, left = group.steps.stop - group.steps.start, group.seen, b - group.first
        costs["features"] += count * (seen * m * f + schulz_cost(m, f, steps) + left * m * f)
        each = m * (seen * seen + 2 * seen * m + left * seen + left * m) + of_gram
        costs["outputs"] += count * each
    if horizon:
        costs["tokens"] = 2 * t * t * m + t * m * f
        for group in step_groups(taken, t, b, every):
            count, seen, left = group.steps.stop - group.steps.start, group.seen, b - group.first
            costs["tokens"] += count * (seen * seen * (seen + left) + gram_cost(seen, steps)) + left * seen * m
    return min(costs, key=lambda space: costs[space])


def _feature_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, muon: Muon) -> Steps:
    features = tokens.inputs.features
    assert features is not None
    groups, carried = step_groups_of(plan, tokens), _matrix(plan.moving.at_steps)
    taken = []  # O(S_n): [..., J', m, F]
    for group in groups:
        new = _weighted(plan, tokens, tokens.deltas, group).mT @ features[..., None, : group.seen, :]
        sums = carried[..., group.steps, :, :] * s[..., None, :, :] + new
        taken.append(muon.direction(sums, newton_schulz(sums, muon.steps)))

    def read(queries: Seen) -> Tensor:
        f = queries.features
        assert f is not None
        moved = [f[..., None, group.first :, :] @ step.mT for group, step in zip(groups, taken, strict=True)]
        return _after_steps(queries.held(w), moved, groups, plan)

    def weights(row: int, start: Tensor) -> Tensor:
        end, decay = scale(plan.retained[..., row], start), plan.decay[..., 0, row, :, None, None]
        for group, step in zip(groups, taken, strict=True):
            end = end - (decay[..., group.steps, :, :] * step).sum(-3)
        return end

    return Steps(read, weights)


def _output_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, muon: Muon) -> Steps:
    inverse = _power_of_two(tokens.deltas, s)
    s, deltas = s * inverse, tokens.deltas * inverse
    kernel, past = tokens.inputs.kernel()[..., None, :, :], tokens.inputs.apply(s)[..., None, :, :]  # K, X
    groups, carried = step_groups_of(plan, tokens), _matrix(plan.moving.at_steps)
    of_start = (s @ s.mT)[..., None, :, :]
    parts = []  # E_n: [..., J', N', m]; Q_n: [..., J', m, m]
    for group in groups:
        seen, cut = slice(group.seen), carried[..., group.steps, :, :]
        weighted = _weighted(plan, tokens, deltas, group)
        # The two cross terms are one another's transpose: one is added twice, and all made symmetric.
        cross = (2.0 * cut) * past[..., seen, :]
        gram = weighted.mT @ (kernel[..., seen, seen] @ weighted + cross)
        gram = 0.5 * (gram + gram.mT) + cut.square() * of_start
        q = gram_polynomial(gram, muon.steps, symmetric=True)
        q = q * (kept_length_of_gram(gram, q) / inverse[..., None, :, :]) if muon.bounded else q
        parts.append((group, cut, weighted, q))

    def read(queries: Seen) -> Tensor:
        near, old = queries.kernel()[..., None, :, :], queries.apply(s)[..., None, :, :]
        moved = []
        for group, cut, weighted, q in parts:  # S_n phi(q), and then Q_n of it
            seen = cut * old[..., group.first :, :] + near[..., group.first :, : group.seen] @ weighted
            moved.append(seen @ q)
        return _after_steps(queries.held(w), moved, groups, plan)

    def weights(row: int, start: Tensor) -> Tensor:
        end, decay = scale(plan.retained[..., row], start), plan.decay[..., 0, row, :, None, None]
        count = tokens.inputs.inputs.shape[-2]
        written = deltas.new_zeros(*deltas.shape[:-2], count, deltas.shape[-1])
        of_old = torch.zeros_like(of_start[..., 0, :, :])
        for group, cut, weighted, q in parts:
            final = decay[..., group.steps, :, :] * q
            written = written - F.pad((weighted @ final).sum(-3), (0, 0, 0, count - group.seen))
            of_old = of_old + (cut * final).sum(-3)
        return tokens.write(end - of_old @ s, written)

    return Steps(read, weights)


def _weighted(plan: Schedule, tokens: Tokens, deltas: Tensor, group: StepGroup) -> Tensor:
    """E_n = diag(P[n]) Delta ``[..., J', N', m]``, of the steps of a group and the tokens that they have seen."""
    if plan.weights.shape[-1] != tokens.inputs.inputs.shape[-2]:  # of pairs
        of_pairs = plan.weights[..., 0, group.steps, :, None] * deltas[..., None, :, :]
        return tokens.fold(of_pairs)[..., : group.seen, :]
    return plan.weights[..., 0, group.steps, : group.seen, None] * deltas[..., None, : group.seen, :]


def _after_steps(held: Tensor, moved: list[Tensor], groups: list[StepGroup], plan: Schedule) -> Tensor:
    """W_t f ``[..., b, m]`` from W_0 f, and the steps of each group O(S_n) f ``[..., J', b - first, m]``."""
    out, decay = scale_rows(plan.seen_retained(), held), plan.seen(plan.decay)[..., 0, :, :].mT[..., None]
    for group, part in zip(groups, moved, strict=True):
        total = (decay[..., group.steps, group.first :, :] * part).sum(-3)
        out = out - F.pad(total, (0, 0, group.first, 0))
    return out


def muon_steps_of_tokens(w: Tensor, old: Factors | None, tokens: Tokens, plan: Schedule, muon: Muon) -> Steps:
    """Muon in token space, from a momentum that is a sum over tokens itself (None: zero). Result as ``muon_steps``."""
    features = tokens.inputs.features
    assert features is not None
    deltas, inputs, weights = tokens.deltas, tokens.inputs.inputs, plan.weights[..., 0, :, :]
    before = 0 if old is None else old.deltas.shape[-2]
    if old is not None:
        deltas, inputs = torch.cat([old.deltas, deltas], -2), torch.cat([old.inputs, inputs], -2)
        weights = torch.cat([plan.moving.at_steps[..., 0, :, None].expand(*weights.shape[:-1], before), weights], -1)
    inverse = _power_of_two(deltas)
    deltas = deltas * inverse
    inner, outer = tokens.product(inputs, inputs), deltas @ deltas.mT
    groups = step_groups(weights.shape[-2], weights.shape[-1], plan.retained.shape[-1], plan.every)
    polynomials = []
    for group in groups:
        seen = slice(group.seen)
        at = weights[..., group.steps, seen, None]  # D_n
        left = at * outer[..., None, seen, seen] * at.mT
        gram = (left.flatten(-3, -2) @ inner[..., seen, seen]).view(left.shape)
        q = gram_polynomial(gram, muon.steps)
        q = q * (kept_length_of_gram(gram, q) / inverse[..., None, :, :]) if muon.bounded else q
        polynomials.append(q * at.mT)  # Q_n^T D_n: [..., J', T', T']

    def read(queries: Seen) -> Tensor:
        near, decay = tokens.product(queries.inputs, inputs), plan.seen(plan.decay)[..., 0, :, :].mT[..., None]
        out = scale_rows(plan.seen_retained(), queries.held(w))
        for group, q in zip(groups, polynomials, strict=True):
            moved = near[..., None, group.first :, : group.seen] @ q  # [..., J', b - first, T']
            moved = (decay[..., group.steps, group.first :, :] * moved).sum(-3)
            out = out - F.pad(moved @ deltas[..., : group.seen, :], (0, 0, group.first, 0))
        return out

    def weights_at(row: int, start_from: Tensor) -> Tensor:
        mixed = inner.new_zeros(inner.shape)
        for group, q in zip(groups, polynomials, strict=True):
            final = (plan.decay[..., 0, row, group.steps, None, None] * q).sum(-3)
            mixed = mixed + F.pad(final, (0, inner.shape[-1] - group.seen) * 2)
        written = -(mixed @ deltas)
        end = tokens.write(scale(plan.retained[..., row], start_from), written[..., before:, :])
        return end if old is None else end + written[..., :before, :].mT @ old.features

    return Steps(read, weights_at)


class StepGroup(NamedTuple):
    """Some steps of a chunk, together: which; how many tokens, from the earliest on, they have seen; and the first
    query that reads what they leave."""

    steps: slice
    seen: int
    first: int


TOGETHER = 8
"""Steps in a group."""


def step_groups(taken: int, tokens: int, chunk: int, every: int, together: int | None = None) -> list[StepGroup]:
    """``taken`` steps, ``together`` at a time (None: ``TOGETHER``): an early step has seen few of the ``tokens`` up to
    the chunk's end, a late one is read by few queries."""
    groups, together = [], together or TOGETHER
    for start in range(0, taken, together):
        stop = min(start + together, taken)
        groups.append(StepGroup(slice(start, stop), tokens - max(chunk - every * stop, 0), every * start))
    return groups


def step_groups_of(plan: Schedule, tokens: Tokens) -> list[StepGroup]:
    """Of the steps on matrices; all at once where a compiler would unroll them."""
    taken, window = plan.weights.shape[-2], tokens.inputs.inputs.shape[-2]
    return step_groups(
        taken, window, plan.retained.shape[-1], plan.every, taken if torch.compiler.is_compiling() else None
    )


def _power_of_two(*matrices: Tensor) -> Tensor:
    """What brings the largest entry of all matrices to about 1 ``[..., 1, 1]``. Newton-Schulz ignores the scale of S,
    but products of S must neither over- nor underflow. A power of two rounds nothing: it looks at all of a chunk, whose
    results must not depend on where the chunk ends."""
    size = torch.stack([x.detach().abs().amax((-2, -1), keepdim=True) for x in matrices]).amax(0)
    return torch.ldexp(torch.ones_like(size), -torch.frexp(size)[1])


def _matrix(factor: Tensor) -> Tensor:
    """``[..., 1, J]`` -> ``[..., J, 1, 1]``."""
    return factor[..., 0, :, None, None]
