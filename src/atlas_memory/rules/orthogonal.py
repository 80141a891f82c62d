"""O of Muon: Newton-Schulz (ATLAS Eqs. 32 and 40), and a form that leaves small singular values as they are."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of Muon's quintic (Jordan et al. 2024): five iterations bring 0.005 to 1 into 0.68 to 1.16."""

CONVERGENT = (15 / 8, -10 / 8, 3 / 8)
"""a, b, c of the quintic that converges to 1 from below, for ``saturate``, where no singular value is small."""


def orthogonalise(s: Tensor, steps: int = 5) -> Tensor:
    """NS(S), as printed: X_0 = S / |S|_F, then ``steps`` times X <- a X + b (X X^T) X + c (X X^T)^2 X.

    There is no eps: NS(c S) = NS(S) for every c > 0, and NS(0) = 0 with a zero gradient.
    """
    scaled = s * reciprocal_or_zero(s.detach().abs().amax((-2, -1), keepdim=True))  # squares must not overflow
    return _iterated(scaled * scaled.square().sum((-2, -1), keepdim=True).clamp_min(0.25).rsqrt(), COEFFICIENTS, steps)


def saturate(s: Tensor, steps: int = 5) -> Tensor:
    """(S S^T + I)^(-1/2) S: the columns of S in the orthogonalised [S, I], which has no small singular values.

    The ``CONVERGENT`` iteration from [S, I] / sqrt(|S|_F^2 + 1). A singular value sigma becomes sigma / sqrt(sigma^2 +
    1), or less where ``steps`` iterations do not converge."""
    rows = s.shape[-2]
    size = s.detach().abs().amax((-2, -1), keepdim=True).clamp_min(1.0)
    both = torch.cat([s, torch.eye(rows, dtype=s.dtype, device=s.device).expand(*s.shape[:-1], rows)], -1) / size
    length = ((s / size).square().sum((-2, -1), keepdim=True) + size**-2).sqrt()
    return _iterated(both / length, CONVERGENT, steps)[..., : s.shape[-1]]


def _iterated(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        x = a * x + b * (x @ x.mT) @ x + c * (x @ x.mT) @ (x @ x.mT) @ x
    return x


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """1 / x where x is a normal positive number, else 0."""
    tiny = torch.finfo(x.dtype).tiny  # the reciprocal of anything smaller would overflow
    return torch.where(x > tiny, 1.0 / x.clamp_min(tiny), 0.0)
