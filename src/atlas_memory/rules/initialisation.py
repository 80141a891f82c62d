"""How M_0 begins: from what a fresh memory's matrices are made. The papers do not say how theirs begin.

A fresh memory should keep apart what its keys keep apart. What is written under one key is felt at another in
proportion to the square of the cosine between their hidden units. Of two random keys 32 wide it is 1/32 on average,
and as much for hidden units that are an ``isometry`` of the key. Of a normal random matrix it is twice that. On
feature-mapped keys, of which all have the constant 1 in common, it would be 0.2. So at the start the matrix of
``feature_mapped`` does not see the constant. It sees the entries of phi(x) that are x itself, and in the directions
that hidden units have beyond the width of x, the other entries; all directions have the same share.

docs/explanation/initialisation.md has what this is worth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-6
"""A squared length of other entries that is no longer than this counts as none."""


class FeatureLayout(NamedTuple):
    """phi as a fresh memory meets it: its length ``size``; which of its entries are x itself, if any; the squared
    length of all after those, for an x of unit length; and what those before them are."""

    size: int
    own: slice
    others: float
    constant: float = 1.0


def normal(heads: int, rows: int, columns: int) -> Tensor:
    """Normal entries ``[heads, rows, columns]`` of the variance 1 / columns, which keeps lengths on average."""
    return _noise(heads, rows, columns) * columns**-0.5


def isometry(heads: int, rows: int, columns: int) -> Tensor:
    """A random ``[heads, rows, columns]``, rows no fewer than columns, that keeps all angles: its columns are at right
    angles, and the entries of W x, for x of unit length, have the mean square 1 / columns. So near zero an
    activation is nearly linear; wider starts learned recall more slowly (notes/diary.md)."""
    return at_right_angles(_noise(heads, rows, columns)) * (rows / columns) ** 0.5


def at_right_angles(matrix: Tensor) -> Tensor:
    """The columns of ``matrix`` ``[..., rows, columns]``, rows no fewer than columns, made orthonormal one after the
    other. Float32 or float64, which QR asks for."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # or else Q would not be uniformly distributed


def on_keys(matrix: Tensor, phi: FeatureLayout) -> Tensor:
    """A matrix for phi(x), ``[heads, rows, phi.size]``, made of one for keys x, ``[heads, rows, dim]``: the columns of
    entries of phi(x) that are not x are zero. Where x is not among the entries, all columns are random, of such a size
    that the product with phi(x) is about as long as that of the given matrix with x."""
    if phi.own.start < phi.own.stop:
        return F.pad(matrix, (phi.own.start, phi.size - phi.own.stop))
    return _noise(*matrix.shape[:2], phi.size) * (matrix.square().mean() / max(phi.others, LEAST)).sqrt()


def mapped_isometry(heads: int, rows: int, dim: int, phi: FeatureLayout) -> Tensor:
    """The first matrix ``[heads, rows, phi.size]``, rows no fewer than dim: an ``isometry`` of x, shorter where other
    entries of phi(x) are seen too."""
    own = isometry(heads, rows, dim)
    whole, more = on_keys(own, phi), phi.size - phi.own.stop
    if not more or rows == dim or phi.own.start == phi.own.stop or phi.others <= LEAST:
        return whole
    other = _noise(heads, rows, more) * (dim * phi.others) ** -0.5
    other = other - own @ (own.mT @ other) * (dim / rows)  # at right angles to what x gives
    whole = (dim / rows) ** 0.5 * whole
    whole[..., phi.own.stop :] = other
    return whole


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))  # for QR
