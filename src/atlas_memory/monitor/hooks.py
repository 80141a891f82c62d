"""Hooks that record the inputs of a model's memories, and models with their writes off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers.blocks import MemoryBlock
from ..layers.hope import MEMORIES, SelfModifyingMemory
from ..layers.neural_memory import LayerState, NeuralMemory
from ..layers.omega_memory import OmegaMemory
from ..layers.tnt import HierarchicalMemory, split_gates
from ..memory import Gates, MemoryState, Params, Rule, retrieve
from ..ops.chunkwise import chunkwise

LAYERS = NeuralMemory | SelfModifyingMemory


@dataclass
class Call:
    """One call of a layer: its input ``[batch, time, dim]``, the state before it, its output and the state after."""

    x: Tensor
    state: Any
    y: Tensor
    after: Any


@dataclass
class MemoryLayer:
    """A layer with memories, its block (None: it stands alone), and what was recorded: inputs of the block
    ``[batch, time, dim]``, calls of the block's mixer, and calls of the layer."""

    name: str
    block: MemoryBlock | None
    layer: LAYERS
    residual: list[Tensor] = field(default_factory=list)
    mixed: list[Call] = field(default_factory=list)
    reads: list[Call] = field(default_factory=list)


def memory_layers(model: nn.Module) -> list[MemoryLayer]:
    """Every layer with memories of a model, in the order of its modules."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, MemoryBlock)}
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, LAYERS):
            around = [b for b in blocks if not b or name.startswith(b + ".")]
            found.append(MemoryLayer(name, blocks[max(around, key=len)] if around else None, layer))
    return found


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards every module is as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def memory_writes(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Inside, every memory of `model` writes or stays at its learned M_0; restored afterwards."""
    before = [(found.layer, found.layer.writes) for found in memory_layers(model)]
    try:
        for layer, _ in before:
            layer.writes = enabled
        yield
    finally:
        for layer, value in before:
            layer.writes = value


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[MemoryLayer]]:
    """Inside, every call of a layer with memories is recorded."""
    found, hooks = memory_layers(model), []
    try:
        for memory in found:
            hooks.append(memory.layer.register_forward_hook(_record(memory.reads), with_kwargs=True))
            if memory.block is not None:
                hooks.append(memory.block.mixer.register_forward_hook(_record(memory.mixed), with_kwargs=True))
                hooks.append(memory.block.register_forward_pre_hook(_record_input(memory.residual), with_kwargs=True))
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _record(calls: list[Call]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> None:
        given = dict(zip(("x", "state", "mask"), args, strict=False)) | kwargs
        x, y = given["x"], output[0]
        if given.get("mask") is not None:  # of MAC, the same in all rows
            real = given["mask"][0].bool()
            x, y = x[:, real], y[:, real]
        if x.shape[1]:
            calls.append(Call(x, given.get("state"), y, output[1]))

    return hook


def _record_input(inputs: list[Tensor]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["x"])

    return hook


@dataclass(frozen=True)
class WriteInputs:
    """What a layer writes to one memory: k and v ``[batch, heads, time, dim]``, the gates of each token, and the state
    before them."""

    rule: Rule
    params: Params
    k: Tensor
    v: Tensor
    gates: Gates
    state: MemoryState

    def readouts(self, *queries: Tensor) -> tuple[Tensor, ...]:
        """M_t(q_t) after the write of each token, for each of some queries ``[batch, heads, time, dim]``."""
        rule = self.rule.vary(window={"read": "after"})

        def again(t: Tensor) -> Tensor:
            return torch.cat([t] * len(queries))

        gates, state = self.gates.map(again), self.state.map(again)
        y = chunkwise(rule, self.params, torch.cat(queries), again(self.k), again(self.v), gates, state)[0]
        return y.chunk(len(queries))

    def readouts_before_and_after(self, *queries: Tensor) -> tuple[Tensor, ...]:
        """M_{t-1}(k_t), the answer to each key before its write; and ``readouts``."""
        first = retrieve(self.rule, self.params, self.k[:, :, :1], self.state)
        shifted = torch.cat([self.k[:, :, 1:], self.k[:, :, -1:]], 2)
        following, *after = self.readouts(shifted, *queries)  # M_t(k_{t+1})
        return torch.cat([first, following[:, :, :-1]], 2), *after


def memory_names(layer: LAYERS) -> tuple[str, ...]:
    """The names of a layer's memories; "" if there is one."""
    if isinstance(layer, NeuralMemory) and isinstance(layer.memory, HierarchicalMemory):
        return ("global", *(f"local {i}" for i in range(len(layer.memory.memories) - 1)))
    return MEMORIES if isinstance(layer, SelfModifyingMemory) else ("",)


def memory_states(layer: LAYERS, state: LayerState) -> list[MemoryState]:
    """The states of a layer's memories, by ``memory_names``."""
    if isinstance(layer, SelfModifyingMemory):
        return [state.memory.map(lambda t, of=of: t[:, of] if t.dim() > 1 else t) for of in _groups(layer)]
    return list(state.memory.memories) if isinstance(layer.memory, HierarchicalMemory) else [state.memory]


def split_by_memory(layer: LAYERS, found: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Measurements ``[batch, heads, ...]`` of each of a layer's ``write_inputs``, as one for each memory."""
    if not isinstance(layer, SelfModifyingMemory):
        return found
    (whole,) = found
    return [{name: x[:, heads] for name, x in whole.items()} for heads in _groups(layer)]


def write_inputs(layer: LAYERS, x: Tensor, state: LayerState) -> Iterator[list[WriteInputs]]:
    """What a layer writes to its memories while it reads x ``[batch, time, dim]`` on from ``state``: for each part of x
    in which keys and values do not depend on what is read, one for each memory, but for a self-modifying layer a single
    one with the heads of all (see ``split_by_memory``). All rows are at the same place of a chunk.
    """
    parts = list(_parts(layer, x, state))
    for n, part in enumerate(parts):
        k, v, gates = layer.write_inputs(part, state)
        memory = layer.memory
        if isinstance(memory, HierarchicalMemory):
            members = cast(list[OmegaMemory], list(memory.memories))
            each = zip(members, split_gates(gates, len(members)), state.memory.memories, strict=True)
            yield [WriteInputs(member.rule, member.params, k, v, own, before) for member, own, before in each]
        else:
            yield [WriteInputs(layer.rule, cast(OmegaMemory, memory).params, k, v, gates, state.memory)]
        if n + 1 < len(parts):
            _, state = layer(part, state)


def _parts(layer: LAYERS, x: Tensor, state: LayerState) -> Iterator[Tensor]:
    """x cut where a self-modifying memory makes new keys, or a local memory is reset."""
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


def _groups(layer: SelfModifyingMemory) -> list[slice]:
    return [slice(i * layer.heads, (i + 1) * layer.heads) for i in range(len(MEMORIES))]
