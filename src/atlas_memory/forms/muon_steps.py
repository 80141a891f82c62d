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

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mathematics.gates import pick
from ..mathematics.optimisers import Muon
from ..mathematics.rules import Rule
from .fast_newton_schulz import gram_polynomial, newton_schulz, saturated
from .fast_weight import Schedule, Seen, Steps, Tokens, last_factors, last_momentum, scale_rows
from .fast_weight import scale as fade
from .horizon import Factors, Recent
from .parts import Part
from .spaces import Spaces, StepGroup, muon_of, step_groups


def muon_steps(part: Part, tokens: Tokens) -> Steps:
    """Of one matrix over a chunk, in the cheapest of the exact spaces or in the one that was asked for."""
    held, rule, spaces = part.held, part.setting.rule, part.setting.spaces
    muon = muon_of(rule)
    if held.recent is not None:
        return _token_space(part, held.recent.old, tokens)
    s = held.sums[0] if muon.horizon is None else held.sums[0] + held.sums[1]
    taken, window = part.plan.weights.shape[-2], tokens.inputs.inputs.shape[-2]
    space = spaces.of(rule, s.shape[-2], s.shape[-1], taken, window, eigenvalues=spaces.eigenvalues_pay(s))
    return (_output_space if space == "outputs" else _feature_space)(part, s, tokens)


def waiting(part: Part, tokens: Tokens, queries: Seen) -> Tensor:
    """S_t f for every query ``[..., b, m]``, 0 where a step has been taken: what waits for the next one."""
    shown, recent, sums = part.plan.moving.shown, part.held.recent, part.held.sums
    assert shown is not None
    of_start, rows = shown
    near, pairs = queries.kernel(), part.setting.pairs
    out = (rows[..., 0, :, :] * (near if pairs is None else pairs.columns(near))) @ tokens.deltas
    if recent is None:
        before = queries.apply(sums[0] if part.setting.rule.optimiser.horizon is None else sums[0] + sums[1])
    elif recent.old is None:
        return out
    else:
        before = tokens.product(queries.inputs, recent.old.inputs) @ recent.old.deltas
    return out + of_start[..., 0, :, None] * before


def muon_sums(part: Part, tokens: Tokens) -> tuple[tuple[Tensor, ...], Recent | None]:
    """The sums of a matrix after the chunk: in matrices, and as sums over tokens."""
    plan, filled, sums = part.plan, part.setting.filled, part.held.sums
    if part.setting.rule.optimiser.horizon is not None:
        return _with_horizon(part, tokens)
    s = last_momentum(sums[0], tokens, plan)
    if len(sums) == 1:
        return (s,), None
    nothing = torch.zeros_like(s)
    if filled is True or plan.moving.plain is None:
        return (s, nothing), None
    added = plan.moving.plain[..., 0, -1, :, None] * tokens.deltas  # what plain steps would have changed
    changed = tokens.write(fade(plan.retained[..., -1], sums[1]), tokens.fold(added))
    return (s, pick(filled, nothing, changed)), None


def _with_horizon(part: Part, tokens: Tokens) -> tuple[tuple[Tensor, ...], Recent | None]:
    plan, (old, new), recent = part.plan, part.held.sums, part.held.recent
    rule, chunk, filled = part.setting.rule, part.setting.chunk, part.setting.filled
    if recent is not None:  # from here on, no matrices
        carried, inside = plan.moving.carried[..., 0, -1], chunk.inside.any(-1)[..., 0]
        return part.held.sums, recent.after(last_factors(tokens, plan), carried, filled, inside)
    new, old = last_momentum(new, tokens, plan), fade(plan.moving.carried[..., -1], old)
    sums = pick(filled, new, old), pick(filled, torch.zeros_like(new), new)
    if not takes_token_space(rule, new.shape[-2], new.shape[-1], part.setting.spaces):
        return sums, None
    goes_on = 0.0 if filled is False else 1.0 if filled is True else filled[:, None, None, None].to(new)
    return sums, Recent(last_factors(tokens, plan).times(goes_on))


def takes_token_space(rule: Rule, rows: int, columns: int, spaces: Spaces) -> bool:
    """Whether a matrix is stepped in token space wherever its momentum is known as a sum over tokens."""
    if rule.optimiser.horizon is None:
        return False
    taken, window = -(-rule.window.chunk // rule.every), rule.window.chunk + rule.window.size - 1
    return spaces.of(rule, rows, columns, taken, window, tokens=True) == "tokens"


def _feature_space(part: Part, s: Tensor, tokens: Tokens) -> Steps:
    plan, muon, w, features = part.plan, muon_of(part.setting.rule), part.from_home, tokens.inputs.features
    assert features is not None
    groups, carried = _groups(part, tokens), _matrix(plan.moving.at_steps)
    taken = []  # O(S_n): [..., J', m, F]
    for group in groups:
        new = _weighted(plan, tokens, tokens.deltas, group).mT @ features[..., None, : group.seen, :]
        sums = carried[..., group.steps, :, :] * s[..., None, :, :] + new
        taken.append(muon.direction(sums, newton_schulz, saturated))

    def read(queries: Seen) -> Tensor:
        f = queries.features
        assert f is not None
        moved = [f[..., None, group.first :, :] @ step.mT for group, step in zip(groups, taken, strict=True)]
        return _after_steps(queries.held(w), moved, groups, plan)

    def weights(row: int, start: Tensor) -> Tensor:
        end, decay = fade(plan.retained[..., row], start), plan.decay[..., 0, row, :, None, None]
        for group, step in zip(groups, taken, strict=True):
            end = end - (decay[..., group.steps, :, :] * step).sum(-3)
        return end

    return Steps(read, weights)


def _output_space(part: Part, s: Tensor, tokens: Tokens) -> Steps:
    plan, muon, w = part.plan, muon_of(part.setting.rule), part.from_home
    by_eigenvalues = part.setting.spaces.eigenvalues
    inverse, most = _power_of_two(_largest(s)), muon.most(s.shape[-2]) if muon.bounded else None
    s = s * inverse
    kernel, past = tokens.inputs.kernel()[..., None, :, :], tokens.inputs.apply(s)[..., None, :, :]  # K, X
    groups, carried = _groups(part, tokens), _matrix(plan.moving.at_steps)
    of_start = (s @ s.mT)[..., None, :, :]
    parts = []  # E_n: [..., J', N', m]; Q_n: [..., J', m, m]
    for group in groups:
        seen, cut = slice(group.seen), carried[..., group.steps, :, :] / inverse[..., None, :, :]
        weighted = _weighted(plan, tokens, tokens.deltas, group)
        scale = _scale(muon, torch.maximum(_largest(weighted), cut))
        cut, weighted = cut * scale, weighted * scale
        # The two cross terms are one another's transpose: one is added twice, and all made symmetric.
        cross = (2.0 * cut) * past[..., seen, :]
        gram = weighted.mT @ (kernel[..., seen, seen] @ weighted + cross)
        gram = 0.5 * (gram + gram.mT) + cut.square() * of_start
        q = gram_polynomial(gram, muon.steps, symmetric=True, floor=_floor(most, scale), eigenvalues=by_eigenvalues)
        q = q if most is None else most * q
        parts.append((group, cut, weighted, q))

    def read(queries: Seen) -> Tensor:
        near, old = queries.kernel()[..., None, :, :], queries.apply(s)[..., None, :, :]
        moved = []
        for group, cut, weighted, q in parts:  # S_n phi(q), and then Q_n of it
            seen = cut * old[..., group.first :, :] + near[..., group.first :, : group.seen] @ weighted
            moved.append(seen @ q)
        return _after_steps(queries.held(w), moved, groups, plan)

    def weights(row: int, start: Tensor) -> Tensor:
        end, decay = fade(plan.retained[..., row], start), plan.decay[..., 0, row, :, None, None]
        count = tokens.inputs.inputs.shape[-2]
        written = s.new_zeros(*s.shape[:-2], count, s.shape[-2])
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


def _token_space(part: Part, old: Factors | None, tokens: Tokens) -> Steps:
    """From a momentum that is a sum over tokens itself; None: zero."""
    plan, muon, w, features = part.plan, muon_of(part.setting.rule), part.from_home, tokens.inputs.features
    assert features is not None
    deltas, inputs, weights = tokens.deltas, tokens.inputs.inputs, plan.weights[..., 0, :, :]
    before = 0 if old is None else old.deltas.shape[-2]
    if old is not None:
        deltas, inputs = torch.cat([old.deltas, deltas], -2), torch.cat([old.inputs, inputs], -2)
        weights = torch.cat([plan.moving.at_steps[..., 0, :, None].expand(*weights.shape[:-1], before), weights], -1)
    most = muon.most(deltas.shape[-1]) if muon.bounded else None
    largest = deltas.detach().abs().amax(-1, keepdim=True)
    inverse = _power_of_two(largest)
    # Under a floor what is zero has a slope; without, it must not set the scale of S.
    deltas, sizes = deltas * inverse, torch.where(largest > 0, 1.0 / inverse, float(muon.bounded))
    inner, outer = tokens.product(inputs, inputs), deltas @ deltas.mT
    together = part.setting.spaces.together
    groups = step_groups(weights.shape[-2], weights.shape[-1], plan.retained.shape[-1], plan.every, together)
    polynomials = []
    for group in groups:
        seen = slice(group.seen)
        at = weights[..., group.steps, seen, None] * sizes[..., None, seen, :]  # D_n
        scale = _scale(muon, _largest(at))
        at = at * scale
        left = at * outer[..., None, seen, seen] * at.mT
        gram = (left.flatten(-3, -2) @ inner[..., seen, seen]).view(left.shape)
        q = gram_polynomial(gram, muon.steps, floor=_floor(most, scale))
        q = q if most is None else most * q
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
        end = tokens.write(fade(plan.retained[..., row], start_from), written[..., before:, :])
        return end if old is None else end + written[..., :before, :].mT @ old.features

    return Steps(read, weights_at)


def _groups(part: Part, tokens: Tokens) -> list[StepGroup]:
    """Of the steps on matrices; all at once where a compiler would unroll them."""
    taken, window = part.plan.weights.shape[-2], tokens.inputs.inputs.shape[-2]
    together = taken if torch.compiler.is_compiling() else part.setting.spaces.together
    return step_groups(taken, window, part.plan.retained.shape[-1], part.plan.every, together)


def _largest(x: Tensor) -> Tensor:
    """Of the entries of each matrix ``[..., 1, 1]``."""
    return x.detach().abs().amax((-2, -1), keepdim=True)


def _power_of_two(size: Tensor) -> Tensor:
    """What brings numbers of this size to about 1. A power of two rounds nothing."""
    return torch.ldexp(torch.ones_like(size), -torch.frexp(size)[1])


def _scale(muon: Muon, size: Tensor) -> Tensor:
    """What S is multiplied by: products of S must neither over- nor underflow. Under a floor small ones may."""
    inverse = _power_of_two(size.detach())
    return inverse.clamp_max(1.0) if muon.bounded else inverse


def _floor(most: float | None, scale: Tensor) -> Tensor | None:
    """Under S S^T of a bounded step, where S has been multiplied by ``scale``."""
    return None if most is None else (most * scale).square()


def _matrix(factor: Tensor) -> Tensor:
    """``[..., 1, J]`` -> ``[..., J, 1, 1]``."""
    return factor[..., 0, :, None, None]
