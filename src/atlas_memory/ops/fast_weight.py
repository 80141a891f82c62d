"""One matrix of a memory over one chunk: W_t phi(q_t) for every token t, without forming any W_t.

The gradient of window token i is the outer product delta_i f_i^T, with f_i = phi(x_i) the input of the matrix. A chunk
has b tokens, and N window tokens: its own, those before it that are in a window of them, and a few empty places
(``tokens_before`` in chunk_layout.py). W_0 and S_0 are the matrix and its momentum before the chunk. With
(optimisers.py has the factors a, e, theta and O)

    Gamma[t, i] = gamma_i^(t)  (b x N),   D_x[t, n] = x_{n+1}..x_t for n <= t, else 0  (b x b; x is alpha or theta),
    P = D_theta diag(a) Gamma  (b x N),   cT[t] = theta_1..theta_t,   cA[t] = alpha_1..alpha_t,
    S_t = cT[t] S_0 + sum_i P[t, i] delta_i f_i^T,
    W_t = cA[t] W_0 - sum_{n <= t} D_alpha[t, n] e_n O(S_n),

the length of f, which can be great, enters only in f W_0^T, in f S_0^T and where the matrix is made at the chunk's end.
Everything between goes through the kernel k(x, y) = phi(x) . phi(y), of which K_qk are the values for each query and
window token. phi_q and Delta have phi(q_t) and delta_i as rows:

* O = identity: y = cA (phi_q W_0^T) - (D_alpha diag(e) cT) (phi_q S_0^T) - (R * K_qk) Delta with R = D_alpha diag(e) P,
  which is attention with a decaying, windowed mask.
* Online errors and the delta step: the same with updates that solve a triangular system in place of Delta
  (triangular.py). With windows of c > 1 tokens each of the b tokens has c updates of its own, the b c *pairs*.
* O = Newton-Schulz: muon_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.autograd import Function, call, without_autocast
from .banded import EVERYTHING


class MomentumCoefficients(NamedTuple):
    """What the momentum adds to a ``DecayMasks``, with the same leading dimensions.

    Attributes:
        carried: cT ``[..., b]``, how much of S_0 is in the momentum after each token.
        at_steps: cT at the J tokens after which a step is taken, ``[..., J]``.
        last: P at the chunk's last token, ``[..., N]``, or ``[..., b c]`` where updates are those of pairs.
        plain: under Muon with online errors, how much of each update is in D (step.py) after each token,
            ``[..., b, b c]``.
        shown: where the memory answers with W - S between steps, how much of S_0 and of each update the query of each
            token meets in S, ``[..., b]`` and ``[..., b, N]`` (or ``b c``); 0 just after a step.
    """

    carried: Tensor
    at_steps: Tensor
    last: Tensor
    plain: Tensor | None = None
    pending: tuple[Tensor, Tensor] | None = None


InterBlock = tuple[tuple[Tensor, Tensor], ...]
"""For W and, where there is a momentum, for S (under Muon for D of step.py alone), what later tokens t meet of it from
each of E tokens n on (triangular.py): how much of the matrix as it is after n is in W_t (under Muon in D_t),
``[..., b, E]``; and how much of each update of a pair is in the matrix after n, R[n] or P[n], ``[..., E, b c]``."""


@dataclass(frozen=True)
class DecayMasks:
    """The numbers by which W_0, S_0 and the updates of one matrix are weighted over one chunk of b tokens. Leading
    dimensions ``[batch, heads, C]``, with C = dim channels where alpha or eta are channel-wise, else C = 1.

    Attributes:
        retained: cA ``[..., b]``, how much of W_0 is in the matrix after each token.
        decay: D_alpha diag(e) ``[..., b, J]``, how much of a step is in the matrix after each token; only the columns
            of the J tokens after which a step is taken.
        in_sum: P at those J tokens, ``[..., J, N]``, or ``[..., J, b c]`` where updates are those of pairs: how much
            of each update is in S. Where it is diagonal, as with a window of one token and no momentum, its diagonal
            ``[..., N]``. Where there is a ``mix``, which is read in its place, only the gamma of each pair.
        every: a step is taken after every so many tokens.
        before: whether query t reads M_{t-1} instead of M_t.
        inertia: what the momentum needs; None without momentum.
        mix: R ``[..., b, b c]``, how much of each update is in the matrix after each token, where errors are online and
            steps are not Muon's; None: R is ``decay`` times ``in_sum``.
        onward: for the errors of pairs, from the last token of each block on; else empty.
    """

    retained: Tensor
    decay: Tensor
    in_sum: Tensor
    every: int
    before: bool
    inertia: MomentumCoefficients | None
    mix: Tensor | None = None
    inter_block: InterBlock = ()

    def started(self) -> Tensor:
        """How much of S_0 the steps have brought into the matrix after each token, ``[..., b]``."""
        return (self.decay @ self.moving.at_steps[..., None]).squeeze(-1)

    @property
    def moving(self) -> MomentumCoefficients:
        """``inertia``, where there is a momentum."""
        assert self.inertia is not None
        return self.inertia

    def mixing(self, rows: slice | None = None) -> Tensor:
        """R = D_alpha diag(e) P ``[..., b, N]``, or some of its rows."""
        rows = EVERYTHING if rows is None else rows
        if self.mix is not None:
            return self.mix[..., rows, :]
        decay, diagonal = self.decay[..., rows, :], self.in_sum.dim() == self.retained.dim()
        return decay * self.in_sum[..., None, :] if diagonal else decay @ self.in_sum

    def for_queries(self, rows: Tensor, at_start: float = 0.0) -> Tensor:
        """One row for each query, from ``rows`` ``[..., b, n]``, one for the memory after each token: the same, or a
        row late where query t reads the memory before token t. ``at_start`` fills the row before the first token."""
        return F.pad(rows[..., :-1, :], (0, 0, 1, 0), value=at_start) if self.before else rows

    def retained_for_queries(self) -> Tensor:
        """cA ``[..., b]`` of the memory that each query reads."""
        return self.for_queries(self.retained[..., None], 1.0).squeeze(-1)


@dataclass(frozen=True)
class Inputs:
    """How a matrix sees n tokens, its window tokens or its queries: by their inputs f, which are phi(u) where the
    matrix is feature-mapped, else u.

    Attributes:
        inputs: u ``[..., n, d]``.
        apply: the function of a matrix W that gives W f for every token, ``[..., n, rows]``.
        features: f ``[..., n, columns]``, or None where f is infinitely long.
        written: for each window token the part f_i of its input of which writes are made (``tangent`` of retentions),
            ``[..., N, columns]``.
        kernel: the function that gives f . f_i, ``[..., n, N]``.
        known: W_0 f for the matrix that makes the chunk's steps, where it has been computed.
    """

    inputs: Tensor
    apply: Callable[[Tensor], Tensor]
    features: Tensor | None
    written: Tensor
    kernel: Callable[[], Tensor]
    known: Tensor | None = None

    def held(self, w: Tensor) -> Tensor:
        """W_0 f, given W_0."""
        return self.apply(w) if self.known is None else self.known


@dataclass(frozen=True)
class Updates:
    """What is written to a matrix of m rows under the window tokens.

    Attributes:
        inputs: how the matrix sees the window tokens.
        deltas: the updates delta_i, ``[..., N, m]``, or those of pairs (triangular.py), ``[..., b c, m]``.
        write: the function of W and A ``[..., N, m]`` that gives W + sum_i A_i f_i^T.
        summed: the function of numbers ``[..., C, N]`` that multiplies the updates by them: ``[..., N, m]``. Numbers
            for pairs are ``[..., C, b c]``; what belongs to one window token is then summed.
    """

    inputs: Inputs
    deltas: Tensor
    write: Callable[[Tensor, Tensor], Tensor]
    summed: Callable[[Tensor], Tensor]


class ChunkSteps(NamedTuple):
    """The steps that one matrix makes over a chunk, as two functions: ``read(queries)`` gives W_t f for every query,
    ``[..., b, m]``; ``weights(t, w, home)`` makes the matrix after token t (0: the first, -1: the last) if it makes
    these steps from the matrix ``w`` on and decays to ``decay_target``; None: to zero."""

    read: Callable[[Inputs], Tensor]
    weights: Callable[[int, Tensor, Tensor | None], Tensor]


def identity_steps(w: Tensor, s: Tensor | None, tokens: Updates, masks: DecayMasks) -> ChunkSteps:
    """The steps of gradient descent and momentum, O = identity.

    Args:
        w: W_0 ``[batch, heads, m, F]``.
        s: S_0, of the same shape; None without momentum.
        tokens, plan: the updates, and the numbers that weigh them.
    """

    def read(queries: Inputs) -> Tensor:
        out = scale_rows(masks.retained_for_queries(), queries.held(w))
        if s is not None:
            started = masks.for_queries(masks.started()[..., None]).squeeze(-1)
            out = out - scale_rows(started, queries.apply(s))
        mask = -masks.for_queries(masks.mixing())
        if mask.shape[-3] == 1:
            return add_product(out, mask.squeeze(-3) * queries.kernel(), tokens.deltas)
        deltas = split_channels(tokens.deltas, mask.shape[-3])
        return out + join_channels((mask * queries.kernel()[..., None, :, :]) @ deltas)

    def weights(row: int, start: Tensor, decay_target: Tensor | None) -> Tensor:
        mixing = masks.mixing(slice(row, row + 1 or None)).squeeze(-2)
        end = decayed(masks.retained[..., row], start, decay_target)
        if s is not None:
            taken = (masks.decay[..., row, :] * masks.moving.at_steps).sum(-1)
            end = torch.addcmul(end, _by_row(-taken, s), s)
        return tokens.write(end, tokens.summed(-mixing))

    return ChunkSteps(read, weights)


def last_momentum(s: Tensor, tokens: Updates, masks: DecayMasks) -> Tensor:
    """The momentum S after the chunk, from S_0 before it, both ``[batch, heads, m, F]``."""
    return tokens.write(scale(masks.moving.carried[..., -1], s), tokens.summed(masks.moving.last))


def add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a @ b, in one pass over x: ``[batch, heads, n, m]``, ``[batch, heads, n, k]``, ``[batch, heads, k, m]``."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).view(x.shape)


LARGE = 1 << 17  # entries, of all matrices of a batch together


def large(matrix: Tensor) -> bool:
    """Whether matrices ``[batch, heads, m, F]`` are so large that their gradients are made by ``_Faded`` and by rows
    (``times``). Calls take longer than they save if there are fewer entries; a compiler makes one pass of PyTorch's own
    gradient; on a GPU a step of ``titans`` takes 4 % longer with them."""
    return matrix.numel() >= LARGE and not matrix.is_cuda and not torch.compiler.is_compiling()


def scale(factor: Tensor, matrix: Tensor) -> Tensor:
    """A matrix ``[..., m, F]`` times a factor ``[..., C]``: one number for each of C groups of adjoining rows."""
    return _by_row(factor, matrix) * matrix


def decayed(factor: Tensor, matrix: Tensor, decay_target: Tensor | None) -> Tensor:
    """What ``factor`` ``[batch, heads, C]`` leaves of the matrix ``[batch, heads, m, F]``: home + factor (matrix -
    home), with ``factor`` as in ``scale``. ``decay_target`` is ``[heads, m, F]``, or None for zero."""
    if decay_target is None:
        return scale(factor, matrix)
    if large(matrix):
        return call(_Faded, factor, matrix, decay_target)
    return torch.lerp(decay_target, matrix, _by_row(factor, matrix))


class _Faded(Function):
    """``decayed`` with its gradient. PyTorch's own of ``lerp`` makes several tensors as large as the matrices of the
    whole batch, which took a quarter of a training step; here the sums over a matrix are products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, matrix: Tensor, decay_target: Tensor) -> Tensor:
        return torch.lerp(decay_target, matrix, _by_row(factor, matrix))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor, matrix, decay_target = ctx.saved_tensors
        to_matrix, shape = _by_row(factor, g) * g, decay_target.shape
        g, matrix, decay_target = (
            x.unflatten(-2, (factor.shape[-1], -1)).flatten(-2) for x in (g, matrix, decay_target)
        )
        to_factor = torch.einsum("bhcx, bhcx -> bhc", g, matrix) - torch.einsum("bhcx, hcx -> bhc", g, decay_target)
        return to_factor, to_matrix, torch.einsum("bhc, bhcx -> hcx", 1.0 - factor, g).view(shape)


def _by_row(factor: Tensor, matrix: Tensor) -> Tensor:
    rows = 1 if factor.shape[-1] == 1 else matrix.shape[-2] // factor.shape[-1]
    return (factor if rows == 1 else factor.repeat_interleave(rows, -1))[..., None]


def scale_rows(factor: Tensor, out: Tensor) -> Tensor:
    """What a matrix puts out for n tokens, ``[..., n, m]``, times a factor ``[..., C, n]``: one number for each token
    and each of C groups of adjoining channels."""
    if factor.shape[-2] == 1:
        return factor.mT * out
    return factor.repeat_interleave(out.shape[-1] // factor.shape[-2], -2).mT * out


def split_channels(x: Tensor, channels: int) -> Tensor:
    """The m channels of n tokens in C groups of adjoining ones: ``[..., n, m]`` -> ``[..., C, n, m / C]``."""
    return x[..., None, :, :] if channels == 1 else x.unflatten(-1, (channels, -1)).transpose(-3, -2)


def join_channels(x: Tensor) -> Tensor:
    """The inverse of ``split_channels``."""
    return x.squeeze(-3) if x.shape[-3] == 1 else x.transpose(-3, -2).flatten(-2)
