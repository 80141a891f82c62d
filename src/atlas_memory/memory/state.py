"""The state of a memory between calls: everything the recurrence needs to go on.

Its size does not depend on what was read, but for ``Exponential`` features without a horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .rules import Rule


@dataclass(frozen=True)
class MemoryState:
    """Every tensor has the batch as its first dimension, so that rows can be selected, repeated and reordered.

    Attributes:
        frozen: the matrices before the current chunk, where gradients are taken; ``[batch, heads, rows, columns]``.
        weights: the matrices now, W_t.
        momentum: S_t of each matrix; empty for an optimiser without momentum. Where errors see what waits in S, and
            with ``Muon.horizon``, first S^old_t of each matrix, then S^new_t of each, which this chunk has put in.
        dual: the accumulators A_t of each matrix; empty for a linear retention.
        k, v: the last c - 1 keys and values, ``[batch, heads, c - 1, dim]``, zero where the sequence is younger. Values
            carry the gate delta as a last entry if the bias reads one.
        keys: ``[batch, heads, n, dim]``, the key of each column of the lifted matrices, the latest at the right; n is 0
            but for ``Exponential`` features.
        seen: ``[batch]`` int64, tokens read so far; ``seen % chunk`` is the phase within the chunk.
    """

    frozen: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    dual: tuple[Tensor, ...]
    k: Tensor
    v: Tensor
    keys: Tensor
    seen: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> MemoryState:
        """The state with ``fn`` applied to every tensor, e.g. ``state.map(torch.Tensor.detach)``."""
        return MemoryState(
            tuple(map(fn, self.frozen)),
            tuple(map(fn, self.weights)),
            tuple(map(fn, self.momentum)),
            tuple(map(fn, self.dual)),
            fn(self.k),
            fn(self.v),
            fn(self.keys),
            fn(self.seen),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the state."""
        yield from (*self.frozen, *self.weights, *self.momentum, *self.dual, self.k, self.v, self.keys, self.seen)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())


def initial_state(rule: Rule, initial: tuple[Tensor, ...], k: Tensor) -> MemoryState:
    """The state before the first token: W and A as the retention begins from M_0 (``initial``, each
    ``[heads, rows, columns]``), S_0 = 0.

    ``k`` ``[batch, heads, time, dim]`` gives batch, dim, dtype and device.
    """
    batch, heads, _, dim = k.shape
    past = k.new_zeros(batch, heads, rule.window.size - 1, dim)
    by_key = rule.features.endless
    keys = past if by_key else past[..., :0, :]

    def spread(matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        copies = tuple(m.to(k).repeat(batch, 1, 1, 1) for m in matrices)  # M_0 may be trained meanwhile
        if not by_key:
            return copies
        lifted = zip(copies, rule.network.lifted, strict=False)
        return tuple(m.new_zeros(*m.shape[:3], keys.shape[2]) if is_lifted else m for m, is_lifted in lifted)

    weights, dual = map(spread, rule.retention.begin(initial))
    return MemoryState(
        frozen=weights,
        weights=weights,
        momentum=tuple(map(torch.zeros_like, weights * rule.accumulators)),
        dual=dual,
        k=past,
        v=k.new_zeros(batch, heads, rule.window.size - 1, dim + rule.bias.has_delta),
        keys=keys,
        seen=torch.zeros(batch, dtype=torch.int64, device=k.device),
    )
