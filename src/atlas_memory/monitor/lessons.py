"""What a layer teaches each of its memories, so that a memory can be asked about it without the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..layers.hope import MEMORIES, SelfModifyingMemory
from ..layers.neural_memory import LayerState, NeuralMemory
from ..layers.omega_memory import OmegaMemory
from ..layers.tnt import HierarchicalMemory, split_heads
from ..memory import Gates, MemoryState, Params, Rule, retrieve
from ..ops.chunkwise import chunkwise

LAYERS = NeuralMemory | SelfModifyingMemory
"""The layers that have memories."""


@dataclass(frozen=True)
class Lesson:
    """Tokens that one memory is taught.

    Attributes:
        rule, params: of the memory.
        k, v: ``[batch, heads, time, dim]``.
        gates: of each token.
        state: of the memory before them.
    """

    rule: Rule
    params: Params
    k: Tensor
    v: Tensor
    gates: Gates
    state: MemoryState

    def answers(self, *queries: Tensor) -> tuple[Tensor, ...]:
        """M_t(q_t): what the memory answers to each of some queries, ``[batch, heads, time, dim]``, right after the
        write of each token, whenever the layer itself reads; an answer of the same shape for each. One reading answers
        all, with as many times the rows."""
        rule = self.rule.vary(window={"read": "after"})

        def again(t: Tensor) -> Tensor:
            return torch.cat([t] * len(queries))

        gates, state = self.gates.map(again), self.state.map(again)
        y = chunkwise(rule, self.params, torch.cat(queries), again(self.k), again(self.v), gates, state)[0]
        return y.chunk(len(queries))

    def answers_before_and_after(self, *queries: Tensor) -> tuple[Tensor, ...]:
        """M_{t-1}(k_t), what the memory answers to each key before the token is written; and ``answers``."""
        first = retrieve(self.rule, self.params, self.k[:, :, :1], self.state)
        shifted = torch.cat([self.k[:, :, 1:], self.k[:, :, -1:]], 2)  # the last token's query is of no use
        following, *after = self.answers(shifted, *queries)  # M_t(k_{t+1})
        return torch.cat([first, following[:, :, :-1]], 2), *after


def names(layer: LAYERS) -> tuple[str, ...]:
    """What the memories of a layer are called; one that has no name of its own is the layer's only one."""
    if isinstance(layer, NeuralMemory) and isinstance(layer.memory, HierarchicalMemory):
        return ("global", *(f"local {i}" for i in range(len(layer.memory.members) - 1)))
    return MEMORIES if isinstance(layer, SelfModifyingMemory) else ("",)


def states(layer: LAYERS, state: LayerState) -> list[MemoryState]:
    """The states of a layer's memories, by ``names``."""
    if isinstance(layer, SelfModifyingMemory):
        return [state.memory.map(_of_heads(heads)) for heads in _groups(layer)]
    return list(state.memory.memories) if isinstance(layer.memory, HierarchicalMemory) else [state.memory]


def by_memory(layer: LAYERS, found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """What was found of a layer's lessons, ``[batch, heads, ...]``, as one for each of ``names``."""
    if not isinstance(layer, SelfModifyingMemory):
        return found
    (whole,) = found
    return [{name: x[:, heads] for name, x in whole.items()} for heads in _groups(layer)]


def lessons(layer: LAYERS, x: Tensor, state: LayerState) -> Iterator[list[Lesson]]:
    """What a layer teaches its memories while it reads x ``[batch, time, dim]`` on from ``state``, part after part of
    x, as long as what is taught can be said without reading: a lesson for each of ``names``, but for a self-modifying
    layer one of all, with the heads of one memory after those of the other (``by_memory`` tells them apart).

    All rows stand at the same place of a chunk, as rows do that were read together.
    """
    parts = list(_parts(layer, x, state))
    for n, part in enumerate(parts):
        yield _of_part(layer, part, state)
        if n + 1 < len(parts):
            _, state = layer(part, state)


def _parts(layer: LAYERS, x: Tensor, state: LayerState) -> Iterator[Tensor]:
    """x cut where a self-modifying memory makes new keys, or where a local memory begins anew."""
    if isinstance(layer, SelfModifyingMemory):
        period = layer.rule.window.chunk
    elif isinstance(layer.memory, HierarchicalMemory):
        period = layer.memory.hierarchy.shard
    else:
        yield x
        return
    start, end = 0, period - int(state.memory.seen[0]) % period
    while start < x.shape[1]:
        yield x[:, start:end]
        start, end = end, end + period


def _of_part(layer: LAYERS, x: Tensor, state: LayerState) -> list[Lesson]:
    k, v, gates = layer.lesson(x, state)
    memory = layer.memory
    if isinstance(memory, HierarchicalMemory):
        members = cast(list[OmegaMemory], list(memory.members))
        each = zip(members, split_heads(gates, len(members)), state.memory.memories, strict=True)
        return [Lesson(member.rule, member.params, k, v, own, held) for member, own, held in each]
    return [Lesson(layer.rule, cast(OmegaMemory, memory).params, k, v, gates, state.memory)]


def _groups(layer: SelfModifyingMemory) -> list[slice]:
    """Which heads each of the layer's memories has."""
    return [slice(i * layer.heads, (i + 1) * layer.heads) for i in range(len(MEMORIES))]


def _of_heads(heads: slice) -> Callable[[Tensor], Tensor]:
    """What takes some heads of ``[batch, heads, ...]``, and leaves what has none."""
    return lambda t: t[:, heads] if t.dim() > 1 else t
