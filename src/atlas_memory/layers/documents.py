"""Rows that hold several documents, each read as a sequence of its own.

A document begins with everything empty: memory, window, momentum, convolution and attention. Rows are therefore cut
where documents begin, the pieces read as a batch of sequences of unequal lengths, and the results put back. Nothing
below this file knows of documents, so a packed document is exactly the document alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mathematics.state import State
from .stateful import Stateful


@dataclass(frozen=True)
class Documents:
    """How rows `[batch, time]` are cut into pieces, none of which reaches over the beginning of a document.

    Attributes:
        index: `[pieces, longest]` int64, where a piece's tokens stand in the rows put one behind the other.
        real: `[pieces, longest]` bool, False behind the end of a shorter piece.
        row: `[pieces]`, the row that a piece is of; pieces are in the order of the tokens.
        continues: `[pieces]` bool, whether it goes on with the document that the row was in before this call.
        last: `[batch]`, the last piece of each row.
        shape: (batch, time).
    """

    index: Tensor
    real: Tensor
    row: Tensor
    continues: Tensor
    last: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, starts: Tensor | None, x: Tensor) -> Documents | None:
        """The cuts for x `[batch, time, ...]`; None where nothing begins.

        Args:
            starts: `[batch, time]`, bool or numbers, nonzero at the first token of every document.

        Raises:
            ValueError: starts is not `[batch, time]`.
        """
        if starts is None:
            return None
        if starts.shape != x.shape[:2]:
            raise ValueError(
                f"document_starts has shape {list(starts.shape)} but the tokens are [batch, time] = "
                f"{list(x.shape[:2])}; mark the first token of every document in this call"
            )
        batch, time = starts.shape
        starts = starts.to(x.device).bool()
        if not time or not starts.any():
            return None
        begins = starts.clone()
        begins[:, 0] = True
        row, column = begins.nonzero(as_tuple=True)
        first = row * time + column
        length = torch.diff(first, append=first.new_tensor([batch * time]))
        steps = torch.arange(int(length.max()), device=x.device)
        return cls(
            index=(first[:, None] + steps).clamp(max=batch * time - 1),
            real=steps < length[:, None],
            row=row,
            continues=~starts[row, column],
            last=begins.sum(1).cumsum(0) - 1,
            shape=(batch, time),
        )

    def split(self, x: Tensor) -> Tensor:
        """Tokens `[batch, time, ...]` as `[pieces, longest, ...]`; what stands behind a piece's end is not of it."""
        return x.flatten(0, 1)[self.index]

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Which tokens of the pieces are real, of those that `mask` `[batch, time]` calls so; None: all."""
        if len(self.row) == self.shape[0] and mask is None:  # rows that begin anew, whole
            return None
        return self.real if mask is None else self.real & self.split(mask.bool())

    def join(self, y: Tensor) -> Tensor:
        """Results `[pieces, longest, ...]` as `[batch, time, ...]`."""
        return y[self.real].unflatten(0, self.shape)

    def begin(self, layer: Stateful, state: State | None) -> State | None:
        """The state with which each piece begins: that of its row, or a fresh one.

        Raises:
            ValueError: the state grows with what was read, so that a fresh one does not stand beside it.
        """
        if state is None or not self.continues.any():
            return None
        if (held := next(state.tensors()).shape[0]) != self.shape[0]:
            raise ValueError(f"x has batch size {self.shape[0]} but the state has {held}; give the same rows")
        fresh = layer.initial_state()
        source = torch.where(self.continues, self.row, self.shape[0])
        of_fresh = fresh.tensors()

        def choose(held: Tensor) -> Tensor:
            new = next(of_fresh)
            if held.shape[1:] != new.shape[1:]:
                raise ValueError(
                    f"a {type(layer).__name__} has a state that grows with what it reads: give document_starts to a "
                    "call that begins without a state"
                )
            return torch.cat([held, new.to(held.dtype)])[source.to(held.device)]

        return state.map(choose)

    def end(self, state: State) -> State:
        """Of the states after each piece those after each row."""
        return state.map(lambda t: t[self.last.to(t.device)])


def read_documents(
    layer: Stateful, x: Tensor, state: Any, mask: Tensor | None, starts: Tensor, **options: Any
) -> tuple[Tensor, Any]:
    """`layer(x, state, mask, **options)` with every document a sequence of its own; starts as in `Documents.of`."""
    documents = Documents.of(starts, x)
    if documents is None:
        y, after = layer(x, state, mask, **options)
        return y, after
    y, after = layer(documents.split(x), documents.begin(layer, state), documents.mask(mask), **options)
    return layer.with_every_parameter(documents.join(y), state), documents.end(after)
