"""How M_0 begins: the matrices of a fresh memory. The papers do not say how theirs begin.

A write under one key is felt at another in proportion to the squared cosine between their hidden units. So the first
matrix is an ``isometry`` that ignores the constant of phi: it sees the entries that are x itself and, in the directions
that hidden units have beyond the width of x, the others, all directions with the same share
(docs/explanation/initialisation.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-6
"""A smaller squared length of the other entries counts as zero."""


class FeatureLayout(NamedTuple):
    """phi(x): its size, the entries that are x itself, the squared length of those behind and the value of those
    before."""

    size: int
    own: slice
    others: float
    constant: float = 1.0


def normal(heads: int, rows: int, columns: int) -> Tensor:
    """Normal entries of variance 1 / columns, ``[heads, rows, columns]``, which keep lengths on average."""
    return _noise(heads, rows, columns) * columns**-0.5


def isometry(heads: int, rows: int, columns: int) -> Tensor:
    """Random with orthogonal columns, rows >= columns: W x has the mean square 1 / columns for a unit x."""
    return orthonormal_columns(_noise(heads, rows, columns)) * (rows / columns) ** 0.5


def orthonormal_columns(matrix: Tensor) -> Tensor:
    """The columns of ``matrix`` ``[..., rows, columns]``, rows >= columns, made orthonormal; float32 or float64."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # so that Q is uniformly distributed


def on_keys(matrix: Tensor, phi: FeatureLayout) -> Tensor:
    """A matrix for phi(x), ``[heads, rows, phi.size]``, from one for x: zero for other entries of phi(x) than x;
    random, with products about as long, where x is not among them."""
    if phi.own.start < phi.own.stop:
        return F.pad(matrix, (phi.own.start, phi.size - phi.own.stop))
    return _noise(*matrix.shape[:2], phi.size) * (matrix.square().mean() / max(phi.others, LEAST)).sqrt()


def mapped_isometry(heads: int, rows: int, dim: int, phi: FeatureLayout) -> Tensor:
    """The first matrix ``[heads, rows, phi.size]``, rows >= dim: an ``isometry`` of x, shorter where other entries of
    phi(x) have a part."""
    own = isometry(heads, rows, dim)
    whole, more = on_keys(own, phi), phi.size - phi.own.stop
    if not more or rows == dim or phi.own.start == phi.own.stop or phi.others <= LEAST:
        return whole
    other = _noise(heads, rows, more) * (dim * phi.others) ** -0.5
    other = other - own @ (own.mT @ other) * (dim / rows)  # orthogonal to what x gives
    whole = (dim / rows) ** 0.5 * whole
    whole[..., phi.own.stop :] = other
    return whole


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))  # for QR
