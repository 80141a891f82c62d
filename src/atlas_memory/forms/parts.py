"""What one chunk of the fast form is made of: its tokens, the matrices of the memory, and how the two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ..mathematics.retention import widened
from ..mathematics.rules import Rule
from ..mathematics.state import Matrix
from .fast_weight import Schedule, Seen, Tokens
from .live import Pairs
from .spaces import Spaces

Where = Tensor | bool
"""Something that holds for all rows, or for each ``[batch]``."""


class Chunk(NamedTuple):
    """One chunk of b tokens and its N = b + c - 1 window tokens; leading dimensions ``[batch, heads]``.

    Attributes:
        kq: the window tokens' keys, then the queries, ``[..., N + b, dim]``; v: ``[..., N, dim]``.
        window: Gamma ``[..., b, N]``; where the window is one token its diagonal, gamma ``[..., b]``.
        alpha, eta: ``[..., b]`` or channel-wise ``[..., b, dim]``, 1 and 0 where there is no token.
        theta: ``[..., b]``.
        inside: which slots are tokens of this call, bool ``[batch or 1, 1, b]``.
    """

    kq: Tensor
    v: Tensor
    window: Tensor
    alpha: Tensor
    theta: Tensor
    eta: Tensor
    inside: Tensor


class Held(NamedTuple):
    """One matrix between two chunks, as ``Matrix``. ``frozen`` is None where it equals ``weights``, as at the start of
    every chunk under a linear retention."""

    weights: Tensor
    frozen: Tensor | None
    sums: tuple[Tensor, ...] = ()
    dual: Tensor | None = None

    @staticmethod
    def of(matrix: Matrix, together: bool) -> Held:
        """``together``: whether all rows stand at the start of a chunk."""
        frozen = None if together and matrix.dual is None else matrix.frozen
        return Held(matrix.weights, frozen, matrix.sums, matrix.dual)

    @property
    def start(self) -> Tensor:
        """The frozen matrix."""
        return self.weights if self.frozen is None else self.frozen

    def map(self, fn: Callable[[Tensor], Tensor]) -> Held:
        """The same with ``fn`` applied to all."""
        frozen, dual = (None if x is None else fn(x) for x in (self.frozen, self.dual))
        return Held(fn(self.weights), frozen, tuple(map(fn, self.sums)), dual)

    @property
    def matrix(self) -> Matrix:
        """As it is carried."""
        return Matrix(self.weights, self.start, self.sums, self.dual)


class Setting(NamedTuple):
    """What all matrices of a memory have in common over a chunk: the rule, the chunk's tokens, whether it is read to
    its end, the pairs of windows where errors are live and windows longer than one token, and how to orthogonalise."""

    rule: Rule
    chunk: Chunk
    filled: Where
    pairs: Pairs | None
    spaces: Spaces


@dataclass(frozen=True)
class Part:
    """One matrix over one chunk.

    Attributes:
        held: the matrix at its start; initial: its M_0; home, dual_home: what W and A fade to, None for zero; on
            phi* the columns of M_0 only.
        keys: how it meets the window tokens; write: see ``Tokens``.
        plan: its scalars.
    """

    setting: Setting
    held: Held
    initial: Tensor
    home: Tensor | None
    dual_home: Tensor | None
    keys: Seen
    write: Callable[[Tensor, Tensor], Tensor]
    plan: Schedule

    @property
    def from_home(self) -> Tensor:
        """What is left of W_0 beside what it fades to, which fades to zero."""
        w = self.held.weights
        return w if self.home is None else w - widened(self.home, w)

    def tokens(self, deltas: Tensor) -> Tokens:
        """The window tokens with their deltas, or with those of pairs."""
        tokens = Tokens(self.keys, deltas, self.write)
        return tokens if self.setting.pairs is None else replace(tokens, fold=self.setting.pairs.fold)
