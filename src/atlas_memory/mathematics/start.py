"""How M_0 begins: from what a fresh memory's matrices are made. The papers do not say how theirs begin.

A fresh memory should keep apart what its keys keep apart, and answer nothing until something is written.

* **Hidden units are a rotation of the key.** What is written under one key is felt at another in proportion to the
  square of the cosine between their hidden units. Of two random keys 32 wide it is 1/32 on average, and as much for
  hidden units that are an ``isometry`` of the key. Of a normal random matrix it is twice that. On lifted keys, of which
  all have the constant 1 in common, it would be 0.2; so at the start a matrix sees the entries of phi(x) that are x
  itself (``on_keys``), and learns to see the others.
* **A memory with a residual takes the key back.** It answers x + body(x). ``back_to_key`` makes the last matrix one
  with which body(x) is nearly -x, so that the whole is about 0, as a matrix memory is that begins at zero. A fresh
  value is then stored as it is, and not less its key.

docs/learning.md has what both are worth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import MEAN_SLOPE


def normal(heads: int, rows: int, columns: int) -> Tensor:
    """Normal entries ``[heads, rows, columns]`` of the variance 1 / columns, which keeps lengths on average."""
    return _noise(heads, rows, columns) * columns**-0.5


def isometry(heads: int, rows: int, columns: int) -> Tensor:
    """A random ``[heads, rows, columns]``, rows no fewer than columns, that keeps all angles: its columns are at right
    angles, and the entries of W x, for x of unit length, have the mean square 1 / columns."""
    q, r = torch.linalg.qr(_noise(heads, rows, columns))
    signs = r.diagonal(dim1=-2, dim2=-1).sign()  # or else Q would not be uniformly distributed
    return q * (signs[:, None] * (rows / columns) ** 0.5)


def on_keys(matrix: Tensor, own: slice, features: int) -> Tensor:
    """The matrix ``[heads, rows, dim]`` for keys x as one ``[heads, rows, features]`` for phi(x), of which the entries
    ``own`` are x; the columns of the others are zero."""
    return torch.nn.functional.pad(matrix, (own.start, features - own.stop))


def back_to_key(hidden: Tensor) -> Tensor:
    """The last matrix ``[heads, dim, width]`` of a memory that answers about -x by it, where its hidden units
    ``[heads, width, dim]`` are an isometry of x, but for a factor, before their activation."""
    return -hidden.mT / (MEAN_SLOPE * hidden[..., 0].square().sum(-1)[:, None, None])


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))  # for QR
