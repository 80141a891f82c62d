"""One fast-weight matrix over one chunk: reading W_t phi(q_t) for every t without forming any W_t.

For a matrix W whose token gradients are delta_i f_i^T, with f_i = phi(x_i), and with

    P = D_theta diag(a) Gamma  (b x N),   cT[t] = theta_1..theta_t,   cA[t] = alpha_1..alpha_t,
    S_t = cT[t] S_0 + sum_i P[t, i] delta_i f_i^T,
    W_t = cA[t] W_0 - sum_{n <= t} D_alpha[t, n] e_n O(S_n)

(optimisers.py has a, e, theta and O), the feature dimension enters only in phi W_0^T, phi S_0^T and the chunk's end;
everything between goes through the kernel k(x, y) = phi(x) . phi(y):

* O = identity: y = cA (phi_q W_0^T) - (D_alpha diag(e) cT) (phi_q S_0^T) - (R * K_qk) Delta with R = D_alpha diag(e) P,
  which is attention with a decaying, windowed mask.
* Live errors and the delta step: the same with updates that solve a triangular system in place of Delta (live.py).
* O = Newton-Schulz: muon_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .bands import EVERYTHING


class Inertia(NamedTuple):
    """What the momentum adds to a ``Schedule``: ``carried``, cT ``[..., b]``; ``at_steps``, cT at the tokens of steps
    ``[..., J]``; ``last``, P at the chunk's last token ``[..., N]``; and under Muon, where errors see what plain steps
    would have changed, ``plain``, how much of each update that has in it after each token ``[..., b, P]``; where what
    waits is shown, ``shown``, how much of S_0 and of each update is shown at each token, ``[..., b]`` and
    ``[..., b, P]``."""

    carried: Tensor
    at_steps: Tensor
    last: Tensor
    plain: Tensor | None = None
    shown: tuple[Tensor, Tensor] | None = None


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
        mix: R ``[..., b, P]`` where updates are those of the P pairs of live.py; None: ``decay`` times ``weights``.
        before: whether query t reads M_{t-1} instead of M_t.
        inertia: None without momentum.
    """

    retained: Tensor
    decay: Tensor
    weights: Tensor
    every: int
    before: bool
    inertia: Inertia | None
    mix: Tensor | None = None

    @property
    def moving(self) -> Inertia:
        """``inertia``, for what has a momentum."""
        assert self.inertia is not None
        return self.inertia

    def mixing(self, rows: slice = EVERYTHING) -> Tensor:
        """R = D_alpha diag(e) P ``[..., b, N]``, or some of its rows."""
        if self.mix is not None:
            return self.mix[..., rows, :]
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
    """What a matrix sees of the window tokens: inputs f_i, deltas delta_i ``[..., N, m]``; and ``write(W, A)``, giving
    W + sum_i A_i f_i^T for A ``[..., N, m]``. Where deltas are those of pairs (live.py), ``[..., P, m]``, ``fold`` sums
    rows of pairs into rows of their tokens."""

    inputs: Seen
    deltas: Tensor
    write: Callable[[Tensor, Tensor], Tensor]
    fold: Callable[[Tensor], Tensor] = lambda rows: rows


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
    deltas = split_channels(tokens.deltas, plan.decay.shape[-3])

    def read(queries: Seen) -> Tensor:
        out = scale_rows(plan.seen_retained(), queries.held(w))
        if s is not None:
            old = plan.decay @ plan.moving.at_steps[..., None]
            out = out - scale_rows(plan.seen(old)[..., 0], queries.apply(s))
        mask = -plan.seen(plan.mixing())
        if mask.shape[-3] == 1:
            return add_product(out, mask[..., 0, :, :] * queries.kernel(), tokens.deltas)
        return out + join_channels((mask * queries.kernel()[..., None, :, :]) @ deltas)

    def weights(row: int, start: Tensor) -> Tensor:
        rows = slice(row, row + 1 or None)
        end = scale(plan.retained[..., row], start)
        if s is not None:
            end = end - scale((plan.decay[..., row, :] * plan.moving.at_steps).sum(-1), s)
        return tokens.write(end, tokens.fold(join_channels(-plan.mixing(rows).mT * deltas)))

    return Steps(read, weights)


def last_momentum(s: Tensor, tokens: Tokens, plan: Schedule) -> Tensor:
    """A sum S after the chunk, from that before it ``[batch, heads, m, F]``."""
    added = plan.moving.last[..., None] * split_channels(tokens.deltas, plan.moving.last.shape[-2])
    return tokens.write(scale(plan.moving.carried[..., -1], s), tokens.fold(join_channels(added)))


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in one pass over x: ``[batch, heads, n, m]``, ``[batch, heads, n, k]``, ``[batch, heads, k, m]``."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).view(x.shape)


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


def split_channels(x: Tensor, channels: int) -> Tensor:
    """``[..., n, m]`` -> ``[..., C, n, m / C]``."""
    return x[..., None, :, :] if channels == 1 else x.unflatten(-1, (channels, -1)).transpose(-3, -2)


def join_channels(x: Tensor) -> Tensor:
    """The inverse of ``split_channels``."""
    return x[..., 0, :, :] if x.shape[-3] == 1 else x.transpose(-3, -2).flatten(-2)
