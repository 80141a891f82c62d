"""What a layer teaches each of its memories, so that a memory can be asked about it without the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..forms.chunkwise import chunkwise
from ..layers.hierarchy import HierarchicalMemory, split_heads
from ..layers.memory import LayerState, NeuralMemory
from ..layers.omega import OmegaMemory
from ..layers.self_modifying import MEMORIES, SelfModifyingMemory
from ..memory import Gates, MemoryState, Params, Rule, retrieve

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

    def answers(self, q: Tensor) -> Tensor:
        """M_t(q_t): what the memory answers to q ``[batch, heads, time, dim]`` right after the write of each token,
        whenever the layer itself reads."""
        rule = self.rule.vary(window={"read": "after"})
        return chunkwise(rule, self.params, q, self.k, self.v, self.gates, self.state)[0]

    def answers_before(self) -> Tensor:
        """M_{t-1}(k_t): what it answers to each key before the token is written, ``[batch, heads, time, dim]``."""
        first = retrieve(self.rule, self.params, self.k[:, :, :1], self.state)
        if self.k.shape[2] == 1:
            return first
        # M_t(k_{t+1}); the last token's query is of no use.
        shifted = torch.cat([self.k[:, :, 1:], self.k[:, :, -1:]], 2)
        return torch.cat([first, self.answers(shifted)[:, :, :-1]], 2)


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


def lessons(layer: LAYERS, x: Tensor, state: LayerState) -> Iterator[list[Lesson]]:
    """What a layer teaches its memories while it reads x ``[batch, time, dim]`` on from ``state``: a lesson for each of
    ``names``, part after part of x, as long as what is taught can be said without reading.

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
    if isinstance(layer, SelfModifyingMemory):
        whole = Lesson(layer.rule, layer.memory.params, k, v, gates, state.memory)
        return [_heads(whole, heads) for heads in _groups(layer)]
    if isinstance(layer.memory, HierarchicalMemory):
        members = cast(list[OmegaMemory], list(layer.memory.members))
        each = zip(members, split_heads(gates, len(members)), state.memory.memories, strict=True)
        return [Lesson(member.rule, member.params, k, v, own, held) for member, own, held in each]
    return [Lesson(layer.rule, layer.memory.params, k, v, gates, state.memory)]


def _groups(layer: SelfModifyingMemory) -> list[slice]:
    """Which heads each of the layer's memories has."""
    return [slice(i * layer.heads, (i + 1) * layer.heads) for i in range(len(MEMORIES))]


def _of_heads(heads: slice) -> Callable[[Tensor], Tensor]:
    """What takes some heads of ``[batch, heads, ...]``, and leaves what has none."""
    return lambda t: t[:, heads] if t.dim() > 1 else t


def _heads(lesson: Lesson, heads: slice) -> Lesson:
    """The lesson of some heads of all."""

    take, params = _of_heads(heads), lesson.params
    norm = None if params.norm is None else (params.norm[0][heads], params.norm[1][heads])
    params = replace(params, initial=tuple(m[heads] for m in params.initial), norm=norm)
    k, v = take(lesson.k), take(lesson.v)
    return Lesson(lesson.rule, params, k, v, lesson.gates.map(take), lesson.state.map(take))
