"""The grid of chunks: where the tokens of a call lie when its rows (the sequences of its batch) begin at different
places of their chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..mathematics.windows import Window
from .bands import shift_right, take


@dataclass(frozen=True)
class Grid:
    """``time`` tokens of each row, laid on chunks of ``chunk`` slots, the first token at slot ``phase`` of its row.

    Attributes:
        phase: ``[batch]``, how many tokens of its chunk each row has read before; None: none.
        length: ``[batch]``, how many of a row's tokens are there, the rest being right padding; None: all.
    """

    chunk: int
    time: int
    phase: Tensor | None
    length: Tensor | None

    @property
    def count(self) -> int:
        """How many chunks the grid has."""
        return -(-(self.time if self.phase is None else self.time + self.chunk - 1) // self.chunk)

    @property
    def start(self) -> Tensor | int:
        """The slot of each row's first token, ``[batch, 1]``; or one slot for all rows."""
        return 0 if self.phase is None else self.phase[:, None]

    @property
    def end(self) -> Tensor | int:
        """The slot behind each row's last token, ``[batch]``; or one for all rows."""
        return (self.time if self.length is None else self.length) + (0 if self.phase is None else self.phase)

    def filled(self, j: int) -> Tensor | bool:
        """Whether chunk j is read to its end, of each row ``[batch]`` or of all."""
        return (j + 1) * self.chunk <= self.end

    def lay(self, x: Tensor, before: int = 0) -> Tensor:
        """Lay tokens on the grid: from ``[batch, ..., before + time, dim]`` to
        ``[batch, ..., before + count * chunk, dim]``. Slots without a token are undefined. The ``before`` earlier
        tokens come directly before each row's first."""
        return shift_right(x, self.phase, self.count * self.chunk + before)

    def chunks(self, x: Tensor) -> Tensor:
        """Lay tokens on the grid, by chunks: ``[batch, ..., time, dim]`` -> ``[batch, ..., count, chunk, dim]``."""
        return self.lay(x).unflatten(-2, (self.count, self.chunk))

    def inside(self, device: torch.device, before: int = 0) -> Tensor:
        """Which slots hold a token of the call or one of those ``before``, bool ``[batch or 1, before + count *
        chunk]``."""
        slot = torch.arange(before + self.count * self.chunk, device=device) - self.start
        tokens = before + (self.time if self.length is None else self.length[:, None])
        return ((slot >= 0) & (slot < tokens)).view(-1, slot.shape[-1])

    def back(self, y: Tensor) -> Tensor:
        """The inverse of ``lay``: take tokens from the grid, ``[batch, ..., count * chunk, dim]`` ->
        ``[batch, ..., time, dim]``."""
        if self.phase is None:
            return y[..., : self.time, :]
        return take(y, self.start + torch.arange(self.time, device=y.device))


def tokens_before(window: Window) -> int:
    """How many places for window tokens there are before a chunk: the c - 1, and empty ones that bring the window
    tokens of a chunk to a multiple of 8, where that adds at most a quarter. A matrix product 71 columns wide takes half
    as long again as one of 72, and in float64 one of 23 three times as long as one of 24."""
    tokens = window.chunk + window.size - 1
    spare = -tokens % 8
    return window.size - 1 + (spare if window.size > 1 and 4 * spare <= tokens else 0)
