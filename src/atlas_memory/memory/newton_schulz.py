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
    """Orthogonalise ``matrix`` ``[..., rows, columns]``; same shape and dtype. ``schulz_cost`` has its multiply-adds.

    Where one side is more than twice the other, few of the products are with the long side: two steps on the Gram
    matrix, then the product with X and, from it, a new Gram matrix, at most three steps from there, and so on.
    """
    a, b, c = COEFFICIENTS
    scale = matrix.detach().abs().amax((-2, -1), keepdim=True)
    x = matrix * reciprocal_or_zero(scale)
    # After the scaling |x|_F >= 1 unless the matrix is zero; the clamp only keeps zero at zero.
    x = x * x.square().sum((-2, -1), keepdim=True).clamp_min(0.25).rsqrt()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.reshape(-1, *x.shape[-2:])
    for count in _between_restarts(x.shape[-2], x.shape[-1], steps):
        gram = x @ x.mT
        if count > 1:
            x = _product(gram, count) @ x
        else:
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.mT if tall else x
    return x.reshape(matrix.shape)


def gram_polynomial(gram: Tensor, steps: int = 5, symmetric: bool = False) -> Tensor:
    """Q with NS(S) = Q S, from ``gram`` = S S^T ``[..., m, m]``; same shape and dtype. (4 steps - 3) m^3 multiply-adds.

    Q is a polynomial in the Gram matrix, and so of use wherever (S S^T)^j S can be written with the powers of a small
    matrix, symmetric or not: S = A B^T over n tokens has (S S^T)^j S = A (B^T B A^T A)^j B^T, so that
    ``gram_polynomial(B^T B A^T A)`` ``[..., n, n]`` is a Y with NS(S) = A Y B^T. The trace must be that of S S^T.

    The caller scales S so that the trace of ``gram`` neither over- nor underflows. A Gram matrix squares the condition
    number, and Newton-Schulz amplifies small directions: give it float64 where the result must hold to float32. A
    restart, as ``newton_schulz`` makes one, mends nothing here. It recovers what rounding did to the Gram matrix when
    there is an X, of the Gram matrix's root condition, to compute it from again; where S is never formed, Q G Q^T has
    the errors of the G it began with.

    ``symmetric``: promises that ``gram`` is, which is what a GPU kernel needs (docs/kernels.md).
    """
    if symmetric and gram.is_cuda:
        from ..kernels.dispatch import supports_gram

        if supports_gram(gram.device.type, gram.dtype, gram.shape[-1]):
            from ..kernels.gram_newton_schulz import gram_newton_schulz

            return gram_newton_schulz(gram, steps)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    tiny = torch.finfo(gram.dtype).tiny
    scale = torch.where(trace > tiny, trace.clamp_min(tiny).rsqrt(), 0.0)
    unit = (gram * reciprocal_or_zero(trace)).reshape(-1, *gram.shape[-2:])
    return scale * _product(unit, steps).view(gram.shape)


def _product(gram: Tensor, steps: int) -> Tensor:
    """Q with X_steps = Q X_0, from X_0 X_0^T ``[batch, m, m]``."""
    a, b, c = COEFFICIENTS
    diagonal = a * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    q, power = None, gram
    for step in range(steps):
        z = torch.baddbmm(torch.add(diagonal, power, alpha=b), power, power, alpha=c)
        q = z if q is None else z @ q
        if step + 1 < steps:
            power = z @ power @ z
    assert q is not None
    return q


def _between_restarts(short: int, long: int, steps: int) -> list[int]:
    """How many of ``steps`` to take on each Gram matrix of a short x long X."""
    if long <= 2 * short:
        return [1] * steps
    counts = [min(2, steps)]
    while sum(counts) < steps:
        counts.append(min(3, steps - sum(counts)))
    return counts


def schulz_cost(rows: int, columns: int, steps: int) -> int:
    """Multiply-adds of ``newton_schulz`` on one matrix."""
    short, long = sorted((rows, columns))
    return sum(2 * short**2 * long + gram_cost(short, count) for count in _between_restarts(short, long, steps))


def gram_cost(m: int, steps: int) -> int:
    """Multiply-adds of ``gram_polynomial`` on one matrix."""
    return (4 * steps - 3) * m**3


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """1 / x where x is a normal positive number, else 0. Any shape."""
    tiny = torch.finfo(x.dtype).tiny  # the reciprocal of anything smaller would overflow
    return torch.where(x > tiny, 1.0 / x.clamp_min(tiny), 0.0)
