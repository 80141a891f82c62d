"""One fast-weight matrix over one chunk: reading W_t phi(q_t) for every t without forming any W_t.

For a matrix W whose token gradients are delta_i f_i^T, with f_i = phi(x_i), and with

    P = D_theta diag(a) Gamma  (b x N),   cT[t] = theta_1..theta_t,   cA[t] = alpha_1..alpha_t,
    S_t = cT[t] S_0 + sum_i P[t, i] delta_i f_i^T,
    W_t = cA[t] W_0 - sum_{n <= t} D_alpha[t, n] e_n O(S_n)

(optimisers.py has a, e, theta and O), the feature dimension enters only in phi W_0^T, phi S_0^T and the chunk's end;
everything between goes through the kernel k(x, y) = phi(x) . phi(y):

* O = identity: y = cA (phi_q W_0^T) - (D_alpha diag(e) cT) (phi_q S_0^T) - (R * K_qk) Delta with R = D_alpha diag(e) P,
  which is attention with a decaying, windowed mask.
* The delta step W_t = W_{t-1} (alpha_t I - e_t f_t f_t^T) - e_t delta_t f_t^T: the same with Delta replaced by
  U = Delta + [W_{t-1} f_t], which solves a triangular system in K_kk (the WY form of DeltaNet).
* O = Newton-Schulz in *output space*: NS(S_n) = Q_n S_n with Q_n a polynomial in the rows x rows matrix S_n S_n^T, and
  S_n S_n^T = E_n^T K_kk E_n + cT_n (X^T E_n + E_n^T X) + cT_n^2 S_0 S_0^T, E_n = diag(P[n]) Delta, X = phi_k S_0^T.
* O = Newton-Schulz in *feature space*: every S_n is formed; cheaper when the features are few.
* O = Newton-Schulz in *token space*, where S_0 is a sum over tokens too (``Muon.horizon``): S_n = Delta^T D_n f with T
  tokens and D_n diagonal, and NS(S_n) = Delta^T D_n Q_n f with Q_n the same polynomial in the T x T matrix
  K D_n (Delta Delta^T) D_n, K = f f^T, for (S S^T)^j S = Delta^T D (K D Delta Delta^T D)^j f. Neither m nor F enters:
  cheaper when both are longer than T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .horizon import Factors
from .newton_schulz import gram_cost, gram_polynomial, newton_schulz, schulz_cost
from .windows import EVERYTHING


class Inertia(NamedTuple):
    """What the momentum adds to a ``Schedule``: ``carried``, cT ``[..., b]``; ``at_steps``, cT at the tokens of steps
    ``[..., J]``; and ``last``, P at the chunk's last token ``[..., N]``."""

    carried: Tensor
    at_steps: Tensor
    last: Tensor


@dataclass(frozen=True)
class Schedule:
    """The scalars of one chunk of b tokens with N = b + c - 1 window tokens; leading dimensions ``[batch, heads, C]``,
    with C = dim where alpha or eta are channel-wise, else C = 1.

    Attributes:
        retained: cA ``[..., b]``, after each token.
        decay: D_alpha diag(e), restricted to the J tokens after which a step is taken, ``[..., b, J]``.
        weights: P at those tokens, ``[..., J, N]``; where it is diagonal, as with a window of one token and no
            momentum, its diagonal ``[..., N]``.
        every: a step is taken after every so many tokens.
        before: whether query t reads M_{t-1} instead of M_t.
        inertia: None without momentum.
    """

    retained: Tensor
    decay: Tensor
    weights: Tensor
    every: int
    before: bool
    inertia: Inertia | None

    @property
    def moving(self) -> Inertia:
        """``inertia``, for what has a momentum."""
        assert self.inertia is not None
        return self.inertia

    def mixing(self, rows: slice = EVERYTHING) -> Tensor:
        """R = D_alpha diag(e) P ``[..., b, N]``, or some of its rows."""
        decay, diagonal = self.decay[..., rows, :], self.weights.dim() == self.retained.dim()
        return decay * self.weights[..., None, :] if diagonal else decay @ self.weights

    def seen(self, rows: Tensor, at_start: float = 0.0) -> Tensor:
        """Of rows ``[..., b, n]``, one for the memory after each token, those that the queries see; what stands
        before the first token is ``at_start``."""
        return F.pad(rows[..., :-1, :], (0, 0, 1, 0), value=at_start) if self.before else rows

    def seen_retained(self) -> Tensor:
        """cA as the queries see it ``[..., b]``."""
        return self.seen(self.retained[..., None], 1.0)[..., 0]


@dataclass(frozen=True)
class Seen:
    """Inputs f = phi(u), or f = u, of a matrix: ``inputs`` is u ``[..., n, d]``; ``apply(W)`` gives W f
    ``[..., n, rows]``; ``features`` is f ``[..., n, columns]``, or None where it has no finite size; ``kernel()`` gives
    f . f_i against the window tokens, ``[..., n, N]``; ``known`` is W_0 f of the matrix that takes the steps, where it
    is at hand."""

    inputs: Tensor
    apply: Callable[[Tensor], Tensor]
    features: Tensor | None
    kernel: Callable[[], Tensor]
    known: Tensor | None = None

    def held(self, w: Tensor) -> Tensor:
        """W_0 f, given W_0."""
        return self.apply(w) if self.known is None else self.known


@dataclass(frozen=True)
class Tokens:
    """What a matrix sees of the window tokens: inputs f_i, deltas delta_i ``[..., N, m]``; ``write(W, A)``, giving
    W + sum_i A_i f_i^T for A ``[..., N, m]``; and ``product(u, v)``, giving f(u_i) . f(v_j)."""

    inputs: Seen
    deltas: Tensor
    write: Callable[[Tensor, Tensor], Tensor]
    product: Callable[[Tensor, Tensor], Tensor]


class Steps(NamedTuple):
    """The steps of one matrix over a chunk: ``read(queries)`` gives W_t f ``[..., b, m]`` for every query,
    ``weights(t, w)`` the W after token t (0: the first, -1: the last) of a memory that makes these steps from w."""

    read: Callable[[Seen], Tensor]
    weights: Callable[[int, Tensor], Tensor]


def identity_steps(w: Tensor, s: Tensor | None, tokens: Tokens, plan: Schedule) -> Steps:
    """Gradient descent and momentum.

    Args:
        w: W_0 ``[batch, heads, m, F]``; s: S_0 of the same shape, or None without momentum.

    """
    deltas = _split(tokens.deltas, plan.decay.shape[-3])

    def read(queries: Seen) -> Tensor:
        out = scale_rows(plan.seen_retained(), queries.held(w))
        if s is not None:
            old = plan.decay @ plan.moving.at_steps[..., None]
            out = out - scale_rows(plan.seen(old)[..., 0], queries.apply(s))
        mask = -plan.seen(plan.mixing())
        if mask.shape[-3] == 1:
            return add_product(out, mask[..., 0, :, :] * queries.kernel(), tokens.deltas)
        return out + _join((mask * queries.kernel()[..., None, :, :]) @ deltas)

    def weights(row: int, start: Tensor) -> Tensor:
        rows = slice(row, row + 1 or None)
        end = scale(plan.retained[..., row], start)
        if s is not None:
            end = end - scale((plan.decay[..., row, :] * plan.moving.at_steps).sum(-1), s)
        return tokens.write(end, _join(-plan.mixing(rows).mT * deltas))

    return Steps(read, weights)


def delta_steps(w: Tensor, tokens: Tokens, plan: Schedule, after_decay: bool) -> Steps:
    """The delta step; the window is one token, so that N = b = J. Arguments and result as for ``identity_steps``."""
    rate = plan.weights  # gamma
    # Row t: from W_n to the memory out of which token t takes its part, n <= t - 1; e_n is in `decay` already.
    if after_decay:
        reach = plan.decay * (1.0 - torch.eye(rate.shape[-1], dtype=w.dtype, device=w.device))
        retained = plan.retained
    else:
        reach = F.pad(plan.decay[..., :-1, :], (0, 0, 1, 0))
        retained = F.pad(plan.retained[..., :-1], (1, 0), value=1.0)
    channels = reach.shape[-3]
    held = _split(tokens.inputs.held(w), channels)
    system = reach * rate[..., None, :] * tokens.inputs.kernel()[..., None, :, :]
    right = retained[..., None] * held + _split(tokens.deltas, channels)
    size = torch.eye(rate.shape[-1], dtype=w.dtype, device=w.device)
    updates = torch.linalg.solve_triangular(size + system, right, upper=False, unitriangular=True)
    return identity_steps(w, None, replace(tokens, deltas=_join(updates)), plan)


def muon_steps(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> Steps:
    """Muon from a momentum in matrices; arguments and result as for ``identity_steps``, C = 1. Picks the cheaper of the
    two exact spaces."""
    (taken, window), chunk = plan.weights.shape[-2:], plan.retained.shape[-1]
    space = cheapest_space(w.shape[-2], w.shape[-1], taken, window, chunk, steps)
    return (_output_space if space == "outputs" else _feature_space)(w, s, tokens, plan, steps)


def cheapest_space(
    rows: int, columns: int, taken: int, window: int, chunk: int, steps: int, every: int = 1, horizon: bool = False
) -> str:
    """In which space Newton-Schulz needs the fewest multiply-adds: "features", "outputs" or, with a ``horizon`` and so
    twice ``window`` tokens in S, "tokens"; for ``taken`` steps, of ``steps`` iterations each, in a chunk of ``chunk``
    tokens with ``window`` window tokens."""
    m, f, n, b, t = rows, columns, window, chunk, 2 * window
    outputs = taken * (m * (n * n + 2 * n * m + b * n + b * m) + gram_cost(m, steps))
    costs = {
        "features": taken * (n * m * f + schulz_cost(m, f, steps) + b * m * f) + n * m * f,
        "outputs": outputs + 2 * m * m * f + (3 * n + b) * m * f,
    }
    if horizon:
        costs["tokens"] = 2 * t * t * m + t * m * f
        for start, stop, seen in token_groups(taken, t, b, every):
            each = seen * seen * (seen + b) + gram_cost(seen, steps)
            costs["tokens"] += (stop - start) * each + b * seen * m
    return min(costs, key=lambda space: costs[space])


def _feature_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> Steps:
    features = tokens.inputs.features
    assert features is not None
    weighted = plan.weights[..., 0, :, :, None] * tokens.deltas[..., None, :, :]  # E_n: [..., J, N, m]
    momentum = _matrix(plan.moving.at_steps) * s[..., None, :, :] + weighted.mT @ features[..., None, :, :]
    step = newton_schulz(momentum, steps)  # [..., J, m, F]

    def read(queries: Seen) -> Tensor:
        assert queries.features is not None
        moved = queries.features[..., None, :, :] @ step.mT  # [..., J, b, m]
        old = scale_rows(plan.seen_retained(), queries.held(w))
        return old - (plan.seen(plan.decay)[..., 0, :, :].mT[..., None] * moved).sum(-3)

    def weights(row: int, start: Tensor) -> Tensor:
        return scale(plan.retained[..., row], start) - (plan.decay[..., 0, row, :, None, None] * step).sum(-3)

    return Steps(read, weights)


def _output_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> Steps:
    inverse = _power_of_two(tokens.deltas, s)
    s = s * inverse
    weighted = plan.weights[..., 0, :, :, None] * (tokens.deltas * inverse)[..., None, :, :]  # E_n: [..., J, N, m]
    past = tokens.inputs.apply(s)  # X
    carried = _matrix(plan.moving.at_steps)
    # The two cross terms are one another's transpose: one is added twice, and all made symmetric.
    cross = (2.0 * carried) * past[..., None, :, :]
    gram = weighted.mT @ (tokens.inputs.kernel()[..., None, :, :] @ weighted + cross)
    gram = 0.5 * (gram + gram.mT) + carried.square() * (s @ s.mT)[..., None, :, :]
    q = gram_polynomial(gram, steps, symmetric=True)  # [..., J, m, m]

    def read(queries: Seen) -> Tensor:
        seen = carried * queries.apply(s)[..., None, :, :] + queries.kernel()[..., None, :, :] @ weighted  # S_n phi(q)
        old = scale_rows(plan.seen_retained(), queries.held(w))
        return old - (plan.seen(plan.decay)[..., 0, :, :].mT[..., None] * (seen @ q)).sum(-3)

    def weights(row: int, start: Tensor) -> Tensor:
        final = plan.decay[..., 0, row, :, None, None] * q
        written = (weighted @ final).sum(-3)  # [..., N, m]
        return tokens.write(scale(plan.retained[..., row], start) - (carried * final).sum(-3) @ s, -written)

    return Steps(read, weights)


def muon_steps_of_tokens(w: Tensor, old: Factors | None, tokens: Tokens, plan: Schedule, steps: int) -> Steps:
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
    groups = token_groups(weights.shape[-2], weights.shape[-1], plan.retained.shape[-1], plan.every)
    polynomials = []
    for start, stop, seen in groups:
        at = weights[..., start:stop, :seen, None]  # D_n
        left = at * outer[..., None, :seen, :seen] * at.mT
        gram = (left.flatten(-3, -2) @ inner[..., :seen, :seen]).view(left.shape)
        polynomials.append(gram_polynomial(gram, steps) * at.mT)  # Q_n^T D_n: [..., J', T', T']

    def read(queries: Seen) -> Tensor:
        near, decay = tokens.product(queries.inputs, inputs), plan.seen(plan.decay)[..., 0, :, :]
        total = torch.zeros_like(near[..., :1])
        for (start, stop, seen), q in zip(groups, polynomials, strict=True):
            moved = near[..., None, :, :seen] @ q  # [..., J', b, T']
            moved = (decay[..., start:stop].mT[..., None] * moved).sum(-3)
            total = total + moved @ deltas[..., :seen, :]
        return scale_rows(plan.seen_retained(), queries.held(w)) - total

    def weights_at(row: int, start_from: Tensor) -> Tensor:
        mixed = inner.new_zeros(inner.shape)
        for (start, stop, seen), q in zip(groups, polynomials, strict=True):
            final = (plan.decay[..., 0, row, start:stop, None, None] * q).sum(-3)
            mixed = mixed + F.pad(final, (0, inner.shape[-1] - seen) * 2)
        written = -(mixed @ deltas)
        end = tokens.write(scale(plan.retained[..., row], start_from), written[..., before:, :])
        return end if old is None else end + written[..., :before, :].mT @ old.features

    return Steps(read, weights_at)


def token_groups(taken: int, tokens: int, chunk: int, every: int) -> list[tuple[int, int, int]]:
    """Steps a few at a time, (first, last + 1, how many tokens they see): an early step has seen few of the chunk."""
    steps = [(start, min(start + 8, taken)) for start in range(0, taken, 8)]
    return [(start, stop, tokens - max(chunk - every * stop, 0)) for start, stop in steps]


def last_momentum(s: Tensor, tokens: Tokens, plan: Schedule) -> Tensor:
    """A sum S after the chunk, from that before it ``[batch, heads, m, F]``."""
    channels = plan.moving.last.shape[-2]
    return tokens.write(
        scale(plan.moving.carried[..., -1], s), _join(plan.moving.last[..., None] * _split(tokens.deltas, channels))
    )


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in one pass over x: ``[batch, heads, n, m]``, ``[batch, heads, n, k]``, ``[batch, heads, k, m]``."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).view(x.shape)


def last_factors(tokens: Tokens, plan: Schedule) -> Factors:
    """What the chunk adds to S by its end; C = 1."""
    features = tokens.inputs.features
    assert features is not None
    return Factors(plan.moving.last[..., 0, :, None] * tokens.deltas, tokens.inputs.inputs, features)


def _power_of_two(*matrices: Tensor) -> Tensor:
    """What brings the largest entry of all matrices to about 1 ``[..., 1, 1]``. Newton-Schulz ignores the scale of S,
    but products of S must neither over- nor underflow. A power of two rounds nothing: it looks at all of a chunk, whose
    results must not depend on where the chunk ends."""
    size = torch.stack([x.detach().abs().amax((-2, -1), keepdim=True) for x in matrices]).amax(0)
    return torch.ldexp(torch.ones_like(size), -torch.frexp(size)[1])


def scale(factor: Tensor, matrix: Tensor) -> Tensor:
    """A factor ``[..., C]`` on C groups of adjoining rows of a matrix ``[..., m, F]``."""
    if factor.shape[-1] == 1:
        return factor[..., None] * matrix
    return factor.repeat_interleave(matrix.shape[-2] // factor.shape[-1], -1)[..., None] * matrix


def scale_rows(factor: Tensor, out: Tensor) -> Tensor:
    """A factor ``[..., C, n]`` on C groups of adjoining channels of outputs ``[..., n, m]``."""
    if factor.shape[-2] == 1:
        return factor[..., 0, :, None] * out
    return factor.repeat_interleave(out.shape[-1] // factor.shape[-2], -2).mT * out


def _matrix(factor: Tensor) -> Tensor:
    """``[..., 1, J]`` -> ``[..., J, 1, 1]``."""
    return factor[..., 0, :, None, None]


def _split(x: Tensor, channels: int) -> Tensor:
    """``[..., n, m]`` -> ``[..., C, n, m / C]``."""
    return x[..., None, :, :] if channels == 1 else x.unflatten(-1, (channels, -1)).transpose(-3, -2)


def _join(x: Tensor) -> Tensor:
    """The inverse of ``_split``."""
    return x[..., 0, :, :] if x.shape[-3] == 1 else x.transpose(-3, -2).flatten(-2)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x`` ``[batch, heads, C, b, n]`` at each sequence's own indices ``[batch, J]``."""
    return x.gather(-2, index[:, None, None, :, None].expand(-1, *x.shape[1:3], -1, x.shape[-1]))


def step_tokens(first: Tensor, every: int, chunk: int) -> tuple[Tensor | slice, Tensor | None]:
    """Which tokens of a chunk are followed by a step, when every ``every``-th token of the sequence is.

    Args:
        first: ``[batch]`` int64, position in its sequence of the chunk's first token.

    Returns:
        a slice when it is the same in every chunk, else indices ``[batch, J]`` with a bool mask of the valid ones.
    """
    if chunk % every == 0:
        return slice(every - 1, None, every), None
    offset = (-(first + 1)) % every
    index = offset[:, None] + every * torch.arange(-(-chunk // every), device=first.device)
    return index.clamp_max(chunk - 1), index < chunk
