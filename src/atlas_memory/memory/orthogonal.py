"""O in Muon: Newton-Schulz, which drives the singular values of S towards 1 (ATLAS Eqs. 32 and 40), and its length."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic used by Muon (Jordan et al. 2024)."""


def orthogonalise(s: Tensor, steps: int = 5) -> Tensor:
    """NS(S), as it is printed: X_0 = S / |S|_F, then ``steps`` times X <- a X + b (X X^T) X + c (X X^T)^2 X.

    ``s`` and the result ``[..., rows, columns]``. There is no eps: NS(c S) = NS(S) for every c > 0 at any magnitude,
    and NS(0) = 0 with a zero gradient. ``newton_schulz`` (fast_newton_schulz.py) is the same, faster.
    """
    a, b, c = COEFFICIENTS
    scaled = s * reciprocal_or_zero(s.detach().abs().amax((-2, -1), keepdim=True))  # squares must not overflow
    x = scaled * scaled.square().sum((-2, -1), keepdim=True).clamp_min(0.25).rsqrt()  # at least 1, but for zero
    for _ in range(steps):
        x = a * x + b * (x @ x.mT) @ x + c * (x @ x.mT) @ (x @ x.mT) @ x
    return x


def kept_length(matrix: Tensor, orthogonal: Tensor) -> Tensor:
    """c = <S, O> / <O, O> for O = NS(S): c O is the multiple of O nearest to S, whose singular values are all about the
    mean of those of S. ``[..., rows, columns]`` twice ``-> [..., 1, 1]``; 0 where O is zero.

    NS(S) itself has the slope 1 / |S|: where little is left to learn, its direction is chaos at full length. c NS(S)
    grows with S, and has a bounded slope.
    """
    return ratio((matrix * orthogonal).sum((-2, -1)), orthogonal.square().sum((-2, -1)))


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b for b >= 0, and 0 for 0 / 0: ``[...] -> [..., 1, 1]``."""
    return (a / b.clamp_min(torch.finfo(b.dtype).tiny ** 0.5))[..., None, None]


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """1 / x where x is a normal positive number, else 0. Any shape."""
    tiny = torch.finfo(x.dtype).tiny  # the reciprocal of anything smaller would overflow
    return torch.where(x > tiny, 1.0 / x.clamp_min(tiny), 0.0)
