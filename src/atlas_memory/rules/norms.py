"""The layer norm at the end of a memory network, its adjoint, and the spectral norm of a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = tuple[Tensor, Tensor]
"""Gain and shift of a layer norm, ``[heads, dim]`` each."""
NORM_EPS = 1e-6

POWER_STEPS = 4
"""How many power iterations estimate a spectral norm."""


def squared_spectral_norm(matrix: Tensor) -> Tensor:
    """The square of the largest singular value of ``[..., rows, columns]``: ``[...]``, by power iteration from a fixed
    start; an estimate from below, by at most a third for random matrices (tests/memory/test_networks.py)."""
    (rows, columns), tiny = matrix.shape[-2:], torch.finfo(matrix.dtype).tiny
    start = torch.arange(1, rows + 1, dtype=matrix.dtype, device=matrix.device).square().mul(0.7).cos()
    size = matrix.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    unit = (matrix / size).reshape(-1, rows, columns)  # squares of huge entries must not overflow
    # No gradient flows through the direction u: the singular value's does not need it. The squared norm of ``fixed`` is
    # between 1 / rows and the number of columns, so that a few powers of it neither over- nor underflow.
    u, fixed = start.expand(len(unit), 1, rows), unit.detach() * rows**-0.5
    for _ in range(POWER_STEPS):
        u = u.bmm(fixed).bmm(fixed.mT)
    u = u / u.norm(dim=-1, keepdim=True).clamp_min(tiny)
    return u.bmm(unit).square().sum((-2, -1)).view(matrix.shape[:-2]) * size.square()[..., 0, 0]


def layer_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """The layer norm of x ``[..., heads, time, dim]`` over its last dimension; norm None: gain 1, shift 0."""
    out = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return out if norm is None else out * norm[0][..., None, :] + norm[1][..., None, :]


def layer_norm_vjp(x: Tensor, norm: Norm | None, error: Tensor) -> Tensor:
    """The error at x, the input of a layer norm, from ``error``, that at its output; ``[..., time, dim]`` all."""
    error = error if norm is None else error * norm[0][..., None, :]
    centred = x - x.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit = centred * inverse
    return inverse * (error - error.mean(-1, keepdim=True) - unit * (error * unit).mean(-1, keepdim=True))
