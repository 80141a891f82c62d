"""Matrices on phi*, the infinite features of ``Exponential``, in the fast form. Such a matrix has a column for every
key; the columns for the keys of a group of chunks are made, as zeros, before its first token is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.gates import pick
from ..rules.rule import Rule
from ..rules.state import MemoryState, map_columns
from .banded import take
from .chunk_context import Condition, MatrixState
from .chunk_layout import ChunkLayout, tokens_before


class KernelColumns(NamedTuple):
    """Where a chunk finds its columns.

    Attributes:
        keys: ``[n, columns, dim]``, the keys of all columns.
        filled: how many columns, from the first on, can be other than zero yet.
        window: ``[n, N]``, which column each window token has.
    """

    keys: Tensor
    filled: int
    window: Tensor


@dataclass(frozen=True)
class KernelCache:
    """The columns of a group of chunks: those of the state, and one for every slot of the layout.

    Attributes:
        keys: ``[batch, heads, n, dim]``, the keys of all columns.
        read_before: how many columns the state had.
    """

    rule: Rule
    layout: ChunkLayout
    keys: Tensor
    read_before: int

    @staticmethod
    def of(rule: Rule, state: MemoryState, k: Tensor, layout: ChunkLayout) -> KernelCache:
        """For the keys k ``[batch, heads, time, dim]`` of a group."""
        room = layout.count * layout.chunk - layout.time
        return KernelCache(rule, layout, torch.cat([state.keys, F.pad(k, (0, 0, 0, room))], -2), state.keys.shape[-2])

    def widen(self, memory: tuple[MatrixState, ...]) -> tuple[MatrixState, ...]:
        """The matrices before the group, with zero columns for its slots."""
        return self._each(memory, lambda w: F.pad(w, (0, self.layout.count * self.layout.chunk)))

    def columns(self, j: int) -> KernelColumns:
        """The ``KernelColumns`` of chunk j."""
        filled, before = (
            self.read_before + j * self.layout.chunk,
            tokens_before(self.rule.window.chunk, self.rule.window.size),
        )
        window = torch.arange(self.layout.chunk + before, device=self.keys.device)[None] + (filled - before)
        # Below zero lie tokens before the sequence's first, which have no weight in any window.
        window = (window - self.layout.start).clamp_min(0)
        batch, heads = self.keys.shape[:2]
        window = window[:, None].expand(batch, heads, -1).flatten(0, 1)
        return KernelColumns(self.keys.flatten(0, 1), filled, window)

    def forget(
        self, memory: tuple[MatrixState, ...], columns: KernelColumns, filled: Condition
    ) -> tuple[MatrixState, ...]:
        """Clear the columns that lie beyond the horizon, if there is one, where the chunk is ``filled``."""
        if self.rule.features.horizon is None:
            return memory
        newest = columns.window[:, -1:]
        old = torch.arange(self.keys.shape[-2], device=newest.device) <= newest - self.rule.features.horizon
        return self._each(memory, lambda w: pick(filled, torch.where(old[:, None], 0.0, w), w))

    def narrow(self, state: MemoryState, read: Tensor) -> MemoryState:
        """The state after ``read`` ``[batch]`` tokens of the group, without the columns of empty slots and, where there
        is a horizon, of forgotten tokens; those of the latest tokens are at the right."""
        count, horizon, window = self.read_before + self.layout.time, self.rule.features.horizon, self.rule.window
        if horizon is not None:
            count = min(count, horizon + window.chunk + window.size - 2)
        at = read[:, None] + self.read_before - count + torch.arange(count, device=read.device)
        real, index = at >= 0, at.clamp_min(0)

        def pick_columns(w: Tensor) -> Tensor:
            picked = w.gather(-1, index[:, None, None].expand(*w.shape[:3], -1))
            return torch.where(real[:, None, None], picked, 0.0)

        keys = torch.where(real[:, None, :, None], take(self.keys, index), 0.0)
        return state.map_key_columns(self.rule, pick_columns, keys)

    def _each(self, memory: tuple[MatrixState, ...], fn: Callable[[Tensor], Tensor]) -> tuple[MatrixState, ...]:
        of_keys = partial(map_columns, fn, self.keys.shape[-1])
        return tuple(h.map(of_keys) if self.rule.kernelised(i) else h for i, h in enumerate(memory))
