"""The state of a memory between calls: everything the recurrence needs to go on, of constant size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryState:
    """Every tensor has the batch as its first dimension, so that rows can be selected, repeated and reordered.

    Attributes:
        frozen: the matrices before the current chunk, where gradients are taken; ``[batch, heads, rows, columns]``.
        weights: the matrices now, W_t.
        momentum: S_t of each matrix; empty for an optimiser without momentum.
        k, v: the last c - 1 keys and values, ``[batch, heads, c - 1, dim]``, zero where the sequence is younger.
        seen: ``[batch]`` int64, tokens read so far; ``seen % chunk`` is the phase within the chunk.
    """

    frozen: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    k: Tensor
    v: Tensor
    seen: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> MemoryState:
        """The state with ``fn`` applied to every tensor, e.g. ``state.map(torch.Tensor.detach)``."""
        return MemoryState(
            tuple(map(fn, self.frozen)),
            tuple(map(fn, self.weights)),
            tuple(map(fn, self.momentum)),
            fn(self.k),
            fn(self.v),
            fn(self.seen),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state."""
        yield from (*self.frozen, *self.weights, *self.momentum, self.k, self.v, self.seen)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


def initial_state(initial: tuple[Tensor, ...], has_momentum: bool, window: int, k: Tensor) -> MemoryState:
    """The state before the first token: W = M_0 (``initial``, each ``[heads, rows, columns]``), S_0 = 0.

    ``k`` ``[batch, heads, time, dim]`` gives batch, dim, dtype and device.
    """
    batch, heads, _, dim = k.shape
    weights = tuple(m.to(k).repeat(batch, 1, 1, 1) for m in initial)  # copies: M_0 may be trained meanwhile
    past = k.new_zeros(batch, heads, window - 1, dim)
    momentum = tuple(torch.zeros_like(w) for w in weights) if has_momentum else ()
    return MemoryState(weights, weights, momentum, past, past, torch.zeros(batch, dtype=torch.int64, device=k.device))
