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

Below, n = batch * heads, and factors have C channels: C = dim where gates are channel-wise, else 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.autograd import Function, call, without_autocast

LARGE = 1 << 17
"""Entries of all matrices of a batch from which on ``times``, ``add_product`` and ``decayed`` have gradients of their
own. Smaller ones take longer to call than they save; a compiler makes one pass of PyTorch's own gradient; on a GPU a
step of ``titans`` takes 4 % longer with them."""


def _own_gradient(x: Tensor) -> bool:
    return not x.is_cuda and not torch.compiler.is_compiling()


def times(f: Tensor, w: Tensor) -> Tensor:
    """W f for each token: ``[n, tokens, F], [n, m, F] -> [n, tokens, m]``. W may be one matrix a head, ``[heads, m,
    F]``: a product would copy it for each sequence."""
    if len(w) == len(f):
        return call(_Times, f, w) if w.numel() >= LARGE and _own_gradient(w) else f.bmm(w.mT)
    by_head = f.unflatten(0, (-1, len(w))).transpose(0, 1).flatten(1, 2)
    out = call(_Times, by_head, w) if f.numel() >= LARGE and _own_gradient(f) else by_head.bmm(w.mT)
    return out.unflatten(1, (-1, f.shape[1])).transpose(0, 1).flatten(0, 1)


class _Times(Function):
    """``times`` with its gradients, both by rows, as f and W lie. PyTorch's own of W lies by columns, and that of W f^T
    for f: what they are added to and multiplied by is then passed over twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, w: Tensor) -> Tensor:
        return f.bmm(w.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        f, w = ctx.saved_tensors
        return g.bmm(w), g.mT.bmm(f)


def add_product(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """A write, W + sum_i a_i f_i^T: f ``[n, N, F]``, w ``[n, m, F]``, a ``[n, N, m]``."""
    return call(_AddProduct, f, w, a) if w.numel() >= LARGE and _own_gradient(w) else torch.baddbmm(w, a.mT, f)


class _AddProduct(Function):
    """``add_product`` with its gradients by rows, as its arguments lie."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return torch.baddbmm(w, a.mT, f)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, a = ctx.saved_tensors
        return a.bmm(g), g, f.bmm(g.mT)


def decayed(factor: Tensor, matrix: Tensor, target: Tensor | None) -> Tensor:
    """What ``factor`` ``[n, C]`` leaves of the matrix ``[n, m, F]``: target + factor (matrix - target). ``target`` is
    ``[n, m, F]``, or one a head, or None for zero; on infinite-dimensional features it has fewer columns."""
    rows = by_row(factor, matrix)
    if target is None:
        return rows * matrix
    if (more := matrix.shape[-1] - target.shape[-1]) > 0:
        target = F.pad(target, (0, more))
    if matrix.numel() >= LARGE and _own_gradient(matrix):
        return call(_Decayed, factor, matrix, target)
    if len(target) == len(matrix):
        return torch.lerp(target, matrix, rows)
    sequences = (-1, len(target))
    return torch.lerp(target, matrix.unflatten(0, sequences), rows.unflatten(0, sequences)).flatten(0, 1)


class _Decayed(Function):
    """``decayed`` to a target, with its gradient. PyTorch's own of ``lerp`` makes several tensors as large as the
    matrices of the whole batch, which took a quarter of a training step; here the sums over a matrix are products."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
        matrix, rows = (x.unflatten(0, (-1, len(target))) for x in (matrix, by_row(factor, matrix)))
        return torch.lerp(target, matrix, rows).flatten(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor, matrix, target = ctx.saved_tensors
        to_matrix, shape = by_row(factor, g) * g, target.shape
        g, matrix, factor = (x.unflatten(0, (-1, len(target))) for x in (g, matrix, factor))  # [batch, heads, ...]
        g, matrix, target = (x.unflatten(-2, (factor.shape[-1], -1)).flatten(-2) for x in (g, matrix, target))
        to_factor = torch.einsum("bhcx, bhcx -> bhc", g, matrix) - torch.einsum("bhcx, hcx -> bhc", g, target)
        return to_factor.flatten(0, 1), to_matrix, torch.einsum("bhc, bhcx -> hcx", 1.0 - factor, g).view(shape)


def by_row(factor: Tensor, matrix: Tensor) -> Tensor:
    """``[n, C]`` as factors of the rows of matrices ``[n, m, F]``: each channel serves m / C adjoining rows."""
    if factor.shape[-1] == 1:
        return factor[..., None]
    return factor.repeat_interleave(matrix.shape[-2] // factor.shape[-1], -1)[..., None]


def to_rows(factor: Tensor, rows: int) -> Tensor:
    """Factors of tokens ``[n, tokens, C]`` as factors of what a matrix of so many rows answers to them."""
    channels = factor.shape[-1]
    return factor if channels == 1 else factor.repeat_interleave(rows // channels, -1)


def split_channels(x: Tensor, channels: int) -> Tensor:
    """The m channels of some tokens in C groups of adjoining ones: ``[n, tokens, m]`` -> ``[n, C, tokens, m / C]``."""
    return x.unflatten(-1, (channels, -1)).transpose(1, 2)


def join_channels(x: Tensor) -> Tensor:
    """The inverse of ``split_channels``."""
    return x.transpose(1, 2).flatten(2)


def minus_masked(out: Tensor, mask: Tensor, kernel: Tensor, updates: Tensor) -> Tensor:
    """out - (mask * kernel) updates: out ``[n, b, m]``, updates ``[n, U, m]``, mask ``[n, b, U]`` or ``[n, C, b, U]``,
    kernel ``[n, b, U]``."""
    if mask.dim() == 3:
        return out - (mask * kernel).bmm(updates)
    return out - join_channels((mask * kernel[:, None]) @ split_channels(updates, mask.shape[1]))


def weighted(numbers: Tensor, updates: Tensor) -> Tensor:
    """Updates ``[n, U, m]`` times one number each ``[n, U]``, or one for each of C groups of channels ``[n, C, U]``."""
    return (numbers[..., None] if numbers.dim() == 2 else to_rows(numbers.mT, updates.shape[-1])) * updates
