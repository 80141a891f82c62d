"""The state of a memory between calls: everything the recurrence needs to go on.

Its size does not depend on what was read, but for ``Exponential`` features without a horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .rules import Rule


Tree = Any
"""A tensor, a state, or a tuple of trees."""


def _map(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return fn(tree)
    return tuple(_map(fn, part) for part in tree) if isinstance(tree, tuple) else tree.map(fn)


def _named(name: str, tree: Tree) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, tuple):
        for i, part in enumerate(tree):
            yield from _named(f"{name}.{i}", part)
    else:
        yield from ((f"{name}.{inner}", t) for inner, t in tree.named_tensors())


class State:
    """What states share: dataclasses of tensors, of other states, and of tuples of these, the batch first in each
    tensor, so that rows can be selected, repeated and reordered."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The state with ``fn`` applied to every tensor, e.g. ``state.map(lambda x: x.to("cuda"))``."""
        return replace(self, **{f.name: _map(fn, getattr(self, f.name)) for f in fields(self)})  # type: ignore[type-var,arg-type]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor and where it stands, such as ``memory.weights.0``."""
        for f in fields(self):  # type: ignore[arg-type]
            yield from _named(f.name, getattr(self, f.name))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor."""
        return (tensor for _, tensor in self.named_tensors())

    def detach(self) -> Self:
        """The state without the graph by which it was made: what training on from it should begin with."""
        return self.map(Tensor.detach)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def __repr__(self) -> str:
        parts = (f"{name}={list(t.shape)}" for name, t in self.named_tensors())
        return f"{type(self).__name__}({', '.join(parts)}: {self.nbytes:,} bytes)"


@dataclass(frozen=True, repr=False)
class MemoryState(State):
    """Every tensor has the batch as its first dimension, so that rows can be selected, repeated and reordered.

    Attributes:
        frozen: the matrices before the current chunk, where gradients are taken; ``[batch, heads, rows, columns]``.
        weights: the matrices now, W_t.
        momentum: S_t of each matrix; empty for an optimiser without momentum. Under Muon with live errors, first
            S_t of each matrix, then what plain steps of this chunk would have changed of each; with ``Muon.horizon``
            first S^old_t of each, then S^new_t.
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
