"""What one chunk of the fast form is made of: its tokens, the matrices of the memory, and how the two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..rules.rule import Rule
from ..rules.state import Matrix
from .fast_weight import DecayMasks, Inputs, Updates, scale_rows
from .muon_space import MuonSpace
from .triangular import WindowPairs

Condition = Tensor | bool
"""Whether something holds: for all sequences of the batch, or for each, ``[batch]``."""


class Chunk(NamedTuple):
    """One chunk of b slots for tokens, and its N window tokens: its own, the c - 1 before it, and before these a few
    empty places (``tokens_before`` in chunk_layout.py). Leading dimensions ``[batch, heads]``. A slot is empty where
    the sequence has no token of this call, since the call begins or ends inside the chunk.

    Attributes:
        kq: the window tokens' keys, then the queries, ``[..., N + b, dim]``.
        v: the window tokens' values, ``[..., N, dim]``, or ``dim + 1`` with the gate delta.
        window: Gamma ``[..., b, N]``, gamma of each token (row) and window token; with windows of one token its
            diagonal, ``[..., b]``.
        alpha, eta: ``[..., b]`` or channel-wise ``[..., b, dim]``; 1 and 0 in empty slots.
        theta: ``[..., b]``; 1 in empty slots, where it is read.
        inside: which slots are not empty, bool ``[batch or 1, 1, b]``.
    """

    kq: Tensor
    v: Tensor
    window: Tensor
    alpha: Tensor
    theta: Tensor
    eta: Tensor
    inside: Tensor


class MatrixState(NamedTuple):
    """One matrix of the memory between two chunks: ``Matrix`` (rules/state.py), except that ``frozen`` is None
    where it equals ``weights``, as at the start of every chunk under a linear retention."""

    weights: Tensor
    frozen: Tensor | None
    sums: tuple[Tensor, ...] = ()
    dual: Tensor | None = None

    @staticmethod
    def of(matrix: Matrix, together: bool) -> MatrixState:
        """From a state in which, if ``together``, all sequences of the batch stand at the start of a chunk."""
        frozen = None if together and matrix.dual is None else matrix.frozen
        return MatrixState(matrix.weights, frozen, matrix.sums, matrix.dual)

    @property
    def start(self) -> Tensor:
        """The frozen matrix, W as it carried_prediction at the start of the chunk."""
        return self.weights if self.frozen is None else self.frozen

    def map(self, fn: Callable[[Tensor], Tensor]) -> MatrixState:
        """The same with ``fn`` applied to every tensor."""
        frozen, dual = (None if x is None else fn(x) for x in (self.frozen, self.dual))
        return MatrixState(fn(self.weights), frozen, tuple(map(fn, self.sums)), dual)

    @property
    def matrix(self) -> Matrix:
        """The ``Matrix`` that a state holds."""
        return Matrix(self.weights, self.start, self.sums, self.dual)


class ChunkContext(NamedTuple):
    """What all matrices of a memory have in common over a chunk.

    Attributes:
        rule, chunk: the rule, and the chunk's tokens.
        filled: whether the chunk is read to its end.
        pairs: the pairs of triangular.py, where errors are online and windows longer than one token; else None.
        spaces: how Muon orthogonalises.
    """

    rule: Rule
    chunk: Chunk
    filled: Condition
    pairs: WindowPairs | None
    muon_space: MuonSpace


@dataclass(frozen=True)
class MatrixContext:
    """One matrix of the memory over one chunk.

    Attributes:
        setting: what all matrices have in common.
        held: the matrix before the chunk.
        initial: its M_0, ``[heads, rows, columns]``.
        home, dual_home: what W and its accumulator A decay to, None for zero; on phi* the columns of M_0 only.
        keys: how the matrix sees the window tokens.
        write: the function that adds to it under the window tokens; see ``Updates``.
        plan: how much of every update is in it after each token.
    """

    context: ChunkContext
    held: MatrixState
    initial: Tensor
    decay_target: Tensor | None
    dual_target: Tensor | None
    keys: Inputs
    write: Callable[[Tensor, Tensor], Tensor]
    masks: DecayMasks

    def tokens(self, deltas: Tensor) -> Updates:
        """The window tokens with their updates ``deltas``, ``[..., N, rows]``, or ``[..., b c, rows]`` of pairs."""

        def summed(numbers: Tensor) -> Tensor:
            weighted = scale_rows(numbers, deltas)
            return weighted if self.context.pairs is None else self.context.pairs.fold(weighted)

        return Updates(self.keys, deltas, self.write, summed)
