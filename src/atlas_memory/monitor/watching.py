"""What the layers of a model were given while it read, by hooks that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..layers.blocks import MemoryBlock
from ..layers.hope import SelfModifyingMemory
from ..layers.neural_memory import NeuralMemory
from .lessons import LAYERS


@dataclass
class Call:
    """One call of a layer: its input ``[batch, time, dim]``, the state before it, its output and the state after."""

    x: Tensor
    state: Any
    y: Tensor
    after: Any


@dataclass
class Watched:
    """A block of a model, or a layer that stands alone, and what was seen of it.

    Attributes:
        name: of the module in the model.
        block: the block; None: the layer stands alone.
        layer: the layer with the memories.
        residual: inputs of the block, ``[batch, time, dim]`` each.
        mixed: calls of the block's mixer, which has the layer in it or is it.
        reads: calls of the layer.
    """

    name: str
    block: MemoryBlock | None
    layer: LAYERS
    residual: list[Tensor] = field(default_factory=list)
    mixed: list[Call] = field(default_factory=list)
    reads: list[Call] = field(default_factory=list)


def memories(model: nn.Module) -> list[Watched]:
    """Every layer with memories of a model, in the order of its modules."""
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, MemoryBlock)}
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, NeuralMemory | SelfModifyingMemory):
            around = [b for b in blocks if not b or name.startswith(b + ".")]
            found.append(Watched(name, blocks[max(around, key=len)] if around else None, layer))
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards every module in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def watch(model: nn.Module) -> Iterator[list[Watched]]:
    """Inside, every call of a layer with memories in ``model`` is kept."""
    found, hooks = memories(model), []
    try:
        for seen in found:
            hooks.append(seen.layer.register_forward_hook(_keep(seen.reads), with_kwargs=True))
            if seen.block is not None:
                hooks.append(seen.block.mixer.register_forward_hook(_keep(seen.mixed), with_kwargs=True))
                hooks.append(seen.block.register_forward_pre_hook(_keep_input(seen.residual), with_kwargs=True))
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _keep(calls: list[Call]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> None:
        x, state, mask = (_argument(args, kwargs, i, name) for i, name in enumerate(("x", "state", "mask")))
        y = output[0]
        if mask is not None:  # as memory as context cuts what it reads; the rows are alike
            real = mask[0].bool()
            x, y = x[:, real], y[:, real]
        if x.shape[1]:
            calls.append(Call(x, state, y, output[1]))

    return hook


def _keep_input(inputs: list[Tensor]) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(_argument(args, kwargs, 0, "x"))

    return hook


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)
