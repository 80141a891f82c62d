"""Newton-Schulz: drives the singular values of S towards 1 (Muon's step; ATLAS Eqs. 32 and 40).

With X_0 = S / |S|_F and k times X <- a X + b (X X^T) X + c (X X^T)^2 X, NS(S) = X_k. There is no eps: NS(c S) = NS(S)
for every c > 0 at any magnitude, and NS(0) = 0 with a zero gradient.

The same function has two faces. ``newton_schulz`` works on S itself. ``gram_polynomial`` works on the Gram matrix
G = S S^T and gives Q with NS(S) = Q S, so that S need never exist: G, S and Q S are all reachable through kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic used by Muon (Jordan et al. 2024)."""


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise ``matrix`` ``[..., rows, columns]``; same shape and dtype. Cost: steps * (4 s^2 l + 2 s^3) FLOPs a
    matrix, s and l its shorter and longer side."""
    a, b, c = COEFFICIENTS
    scale = matrix.detach().abs().amax((-2, -1), keepdim=True)
    x = matrix * reciprocal_or_zero(scale)
    # After the scaling |x|_F >= 1 unless the matrix is zero; the clamp only keeps zero at zero.
    x = x * x.square().sum((-2, -1), keepdim=True).clamp_min(0.25).rsqrt()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.reshape(matrix.shape)


def gram_polynomial(gram: Tensor, steps: int = 5) -> Tensor:
    """Q with NS(S) = Q S, from ``gram`` = S S^T ``[..., m, m]``; same shape and dtype. About 8 m^3 * steps FLOPs.

    The caller scales S so that the trace of ``gram`` neither over- nor underflows. A Gram matrix squares the condition
    number, and Newton-Schulz amplifies small directions: give it float64 where the result must hold to float32.
    """
    if gram.is_cuda:
        from ..kernels.dispatch import supports_gram

        if supports_gram(gram.device.type, gram.dtype, gram.shape[-1]):
            from ..kernels.gram_newton_schulz import gram_newton_schulz

            return gram_newton_schulz(gram, steps)
    a, b, c = COEFFICIENTS
    diagonal = a * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    tiny = torch.finfo(gram.dtype).tiny
    power = ((gram + gram.mT) * (0.5 * reciprocal_or_zero(trace))).reshape(-1, *gram.shape[-2:])
    scale = torch.where(trace > tiny, trace.clamp_min(tiny).rsqrt(), 0.0)
    q = None
    for step in range(steps):
        z = torch.baddbmm(torch.add(diagonal, power, alpha=b), power, power, alpha=c)
        q = z if q is None else z @ q
        if step + 1 < steps:
            power = z @ power @ z
    assert q is not None
    return scale * q.view(gram.shape)


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """1 / x where x is a normal positive number, else 0. Any shape."""
    tiny = torch.finfo(x.dtype).tiny  # the reciprocal of anything smaller would overflow
    return torch.where(x > tiny, 1.0 / x.clamp_min(tiny), 0.0)
