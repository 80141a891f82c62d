"""One fast-weight matrix over one chunk: reading W_t phi(q_t) for every t without forming any W_t.

For a matrix W whose token gradients are delta_i f_i^T, with f_i = phi(x_i), and with

    P = D_theta diag(a) Gamma  (b x N),   cT[t] = theta_1..theta_t,   cA[t] = alpha_1..alpha_t,
    S_t = cT[t] S_0 + sum_i P[t, i] delta_i f_i^T,
    W_t = cA[t] W_0 - sum_{n <= t} D_alpha[t, n] e_n O(S_n)

(optimisers.py has a, e, theta and O), the feature dimension enters only in phi W_0^T, phi S_0^T and the chunk's end;
everything between goes through the kernel k(x, y) = phi(x) . phi(y):

* O = identity: y = cA (phi_q W_0^T) - (D_alpha diag(e) cT) (phi_q S_0^T) - (R * K_qk) Delta with R = D_alpha diag(e) P,
  which is attention with a decaying, windowed mask.
* O = Newton-Schulz in *output space*: NS(S_n) = Q_n S_n with Q_n a polynomial in the rows x rows matrix S_n S_n^T, and
  S_n S_n^T = E_n^T K_kk E_n + cT_n (X^T E_n + E_n^T X) + cT_n^2 S_0 S_0^T, E_n = diag(P[n]) Delta, X = phi_k S_0^T.
* O = Newton-Schulz in *feature space*: every S_n is formed; cheaper when the features are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .newton_schulz import gram_polynomial, newton_schulz


@dataclass(frozen=True)
class Schedule:
    """The scalars of one chunk of b tokens with N = b + c - 1 window tokens; leading dimensions ``[batch, heads]``.

    Attributes:
        retained: cA ``[..., b]``.
        carried: cT ``[..., b]``.
        decay: D_alpha diag(e), restricted to the J tokens after which a step is taken, ``[..., b, J]``.
        weights: P at those tokens, ``[..., J, N]``.
        carried_steps: cT at those tokens, ``[..., J]``.
        last: P at the chunk's last token, ``[..., N]``.
    """

    retained: Tensor
    carried: Tensor
    decay: Tensor
    weights: Tensor
    carried_steps: Tensor
    last: Tensor


@dataclass(frozen=True)
class Tokens:
    """What a matrix sees of the window tokens: phi(x_i) ``[..., N, F]``, kernel on demand, delta_i ``[..., N, m]``."""

    features: Tensor
    kernel: Callable[[], Tensor]
    deltas: Tensor


Read = Callable[[Tensor, Tensor], Tensor]
Ends = tuple[Tensor, Tensor | None]


def identity_steps(w: Tensor, s: Tensor | None, tokens: Tokens, plan: Schedule) -> tuple[Read, Ends]:
    """Gradient descent and momentum.

    Args:
        w: W_0 ``[batch, heads, m, F]``; s: S_0 of the same shape, or None without momentum.

    Returns:
        ``read(phi_q [..., b, F], K_qk [..., b, N]) -> [..., b, m]``, and (W_b, S_b).
    """
    mixing = plan.decay @ plan.weights  # R
    old = plan.decay @ plan.carried_steps[..., None]

    def read(features: Tensor, kernel: Tensor) -> Tensor:
        out = plan.retained[..., None] * (features @ w.mT) - (mixing * kernel) @ tokens.deltas
        return out if s is None else out - old * (features @ s.mT)

    end = _scale(plan.retained[..., -1], w) - (mixing[..., -1, :, None] * tokens.deltas).mT @ tokens.features
    if s is None:
        return read, (end, None)
    return read, (end - old[..., -1:, :] * s, _last_momentum(s, tokens, plan))


def muon_steps(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> tuple[Read, Ends]:
    """Muon; arguments and result as for ``identity_steps``. Picks the cheaper of the two exact spaces."""
    (taken, window), chunk = plan.weights.shape[-2:], plan.decay.shape[-2]
    in_output_space = prefers_output_space(w.shape[-2], w.shape[-1], taken, window, chunk)
    form = _output_space if in_output_space else _feature_space
    return form(w, s, tokens, plan, steps)


def prefers_output_space(rows: int, columns: int, taken: int, window: int, chunk: int) -> bool:
    """Whether output space needs fewer multiply-adds than feature space, for ``taken`` steps in a chunk of ``chunk``
    tokens with ``window`` window tokens."""
    short, long = sorted((rows, columns))
    feature = taken * (window * rows * columns + 5 * (2 * short**2 * long + short**3) + chunk * rows * columns)
    output = taken * (window**2 * rows + window * rows**2 + 20 * rows**3 + chunk * rows * (window + rows))
    return output + 2 * rows**2 * columns + window * rows * columns < feature


def _feature_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> tuple[Read, Ends]:
    weighted = plan.weights[..., None] * tokens.deltas[..., None, :, :]  # E_n: [..., J, N, m]
    momentum = _scale(plan.carried_steps, s[..., None, :, :]) + weighted.mT @ tokens.features[..., None, :, :]
    step = newton_schulz(momentum, steps)  # [..., J, m, F]

    def read(features: Tensor, kernel: Tensor) -> Tensor:
        moved = features[..., None, :, :] @ step.mT  # [..., J, b, m]
        return plan.retained[..., None] * (features @ w.mT) - (plan.decay.mT[..., None] * moved).sum(-3)

    end = _scale(plan.retained[..., -1], w) - (plan.decay[..., -1, :, None, None] * step).sum(-3)
    return read, (end, _last_momentum(s, tokens, plan))


def _output_space(w: Tensor, s: Tensor, tokens: Tokens, plan: Schedule, steps: int) -> tuple[Read, Ends]:
    # Newton-Schulz ignores the scale of S, but S S^T must neither over- nor underflow: work with S / scale throughout.
    # A power of two, which rounds nothing: the scale looks at all of the chunk, its results must not.
    size = [x.detach().abs().amax((-2, -1), keepdim=True) for x in (tokens.deltas, s)]
    inverse = torch.ldexp(torch.ones_like(size[0]), -torch.frexp(torch.maximum(*size))[1])
    unscaled, s = s, s * inverse
    weighted = plan.weights[..., None] * (tokens.deltas * inverse)[..., None, :, :]  # E_n: [..., J, N, m]
    past = tokens.features @ s.mT  # X
    carried = plan.carried_steps[..., None, None]
    # The two cross terms are one another's transpose: one is added twice, and gram_polynomial symmetrises.
    gram = weighted.mT @ (tokens.kernel()[..., None, :, :] @ weighted + (2.0 * carried) * past[..., None, :, :])
    q = gram_polynomial(gram + carried.square() * (s @ s.mT)[..., None, :, :], steps)  # [..., J, m, m]

    def read(features: Tensor, kernel: Tensor) -> Tensor:
        seen = carried * (features @ s.mT)[..., None, :, :] + kernel[..., None, :, :] @ weighted  # S_n phi(q_t)
        return plan.retained[..., None] * (features @ w.mT) - (plan.decay.mT[..., None] * (seen @ q)).sum(-3)

    final = plan.decay[..., -1, :, None, None] * q
    written = (weighted @ final).sum(-3)  # [..., N, m]
    end = _scale(plan.retained[..., -1], w) - (carried * final).sum(-3) @ s - written.mT @ tokens.features
    return read, (end, _last_momentum(unscaled, tokens, plan))


def _last_momentum(s: Tensor, tokens: Tokens, plan: Schedule) -> Tensor:
    return _scale(plan.carried[..., -1], s) + (plan.last[..., None] * tokens.deltas).mT @ tokens.features


def _scale(factor: Tensor, matrix: Tensor) -> Tensor:
    return factor[..., None, None] * matrix


def rows_at(x: Tensor, index: Tensor | slice) -> Tensor:
    """Rows of ``x`` ``[batch, heads, b, n]`` at a slice, or at each sequence's own indices ``[batch, J]``."""
    if isinstance(index, slice):
        return x[..., index, :]
    return x.gather(-2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))


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
