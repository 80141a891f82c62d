"""The momentum of ``Muon(horizon="chunk")`` in the fast form: sums over tokens that are never formed.

With a horizon, S at a chunk's start sums the gradients of the chunk before and nothing else: one outer product for each
of its N window tokens. Where all of S is known so, Newton-Schulz works in token space (muon_steps.py), and what passes
from chunk to chunk is the tokens themselves. Matrices are made at the end of the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """The matrix sum_i deltas_i features_i^T, not formed. ``inputs`` are u_i ``[batch, heads, n, d]``, ``features``
    f_i ``[batch, heads, n, F]``: phi(u_i) where the matrix is lifted, else u_i; ``deltas`` ``[batch, heads, n, m]``."""

    deltas: Tensor
    inputs: Tensor
    features: Tensor

    def times(self, factor: Tensor | float) -> Factors:
        """The matrix times a factor that goes with the deltas."""
        return self._replace(deltas=factor * self.deltas)

    def where(self, rows: Tensor, other: Factors) -> Factors:
        """These where ``rows`` ``[batch]`` is true, else the others."""
        pairs = zip(self, other, strict=True)
        return Factors(*(torch.where(rows[:, None, None, None], mine, theirs) for mine, theirs in pairs))

    def matrix(self) -> Tensor:
        """``[batch, heads, m, F]``."""
        return self.deltas.mT @ self.features


class Recent(NamedTuple):
    """Both sums of one matrix's momentum at a chunk's start, None for zero. ``new`` is other than zero only for
    sequences that have ended."""

    old: Factors | None = None
    new: Factors | None = None

    def after(self, chunk: Factors, carried: Tensor, filled: Tensor | bool, inside: Tensor) -> Recent:
        """Both sums at the next chunk's start.

        Args:
            chunk: what this chunk adds to S^new by its end.
            carried: theta_1 .. theta_b, ``[batch, heads]``.
            filled: whether the chunk is read to its end, for all rows or each ``[batch]``.
            inside: ``[batch or 1]`` bool, whether the chunk has a token of this call.
        """
        if filled is True:
            return Recent(chunk)
        carried = carried[..., None, None]
        if filled is False:
            return Recent(None if self.old is None else self.old.times(carried), chunk)
        nothing = chunk.times(0.0)
        old, new = (nothing if part is None else part for part in self)
        return Recent(chunk.where(filled, old.times(carried)), nothing.where(filled, chunk.where(inside, new)))

    def added_to(self, sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Both sums in matrices, where ``sums`` has what is not held here."""
        return tuple(s if part is None else s + part.matrix() for s, part in zip(sums, self, strict=True))
