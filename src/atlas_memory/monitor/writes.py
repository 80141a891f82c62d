"""A model as it is without what its memories have written, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..layers.hope import SelfModifyingMemory
from ..layers.neural_memory import NeuralMemory


@contextmanager
def memory_writes(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Inside, every memory layer of `model` writes or stays at its learned M_0; restored afterwards."""
    layers = [module for module in model.modules() if isinstance(module, NeuralMemory | SelfModifyingMemory)]
    before = [layer.writes for layer in layers]
    try:
        for layer in layers:
            layer.writes = enabled
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.writes = value
