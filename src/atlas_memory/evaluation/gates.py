"""What the gates of each memory layer do while a model reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from atlas_memory.layers.memory import NeuralMemory

NAMES = ("alpha", "eta", "theta", "gamma", "delta")


class GateLog:
    """The gates of every layer, in the order of the layers: a list of dictionaries from a gate's name to
    float32 `[batch, heads, time]` (gamma `[batch, heads, time, c]`; channel-wise gates count as dim heads); a gate
    that the rule does not use is left out."""

    def __init__(self, layers: int) -> None:
        self._parts: list[dict[str, list[torch.Tensor]]] = [{} for _ in range(layers)]

    def add(self, layer: int, gates: Any) -> None:
        for name in NAMES:
            value = getattr(gates, name, None)
            if value is not None:
                if value.dim() == 4 and name != "gamma":
                    value = value.transpose(2, 3).flatten(1, 2)
                self._parts[layer].setdefault(name, []).append(value.detach().float().cpu())

    @property
    def layers(self) -> list[dict[str, torch.Tensor]]:
        return [{name: torch.cat(parts, dim=2) for name, parts in layer.items()} for layer in self._parts]

    def summary(self) -> list[dict[str, dict[str, float]]]:
        """For each layer and gate: mean, standard deviation, smallest, largest and three quantiles over
        everything read, and `over_time`: the standard deviation over positions alone, averaged over heads (0:
        collapsed)."""
        return [{name: _summary(value) for name, value in layer.items()} for layer in self.layers]


def _summary(value: torch.Tensor) -> dict[str, float]:
    flat = value.flatten().double().numpy()
    low, middle, high = (float(q) for q in np.quantile(flat, [0.05, 0.5, 0.95]))
    return {
        "mean": float(flat.mean()),
        "std": float(flat.std()),
        "min": float(flat.min()),
        "max": float(flat.max()),
        "q05": low,
        "q50": middle,
        "q95": high,
        "over_time": float(value.double().std(dim=2, correction=0).mean()),
    }


@contextmanager
def watch_gates(model: nn.Module) -> Iterator[GateLog]:
    """Record the gates of every `NeuralMemory` in `model` during the forward passes inside."""
    memories = [module for module in model.modules() if isinstance(module, NeuralMemory)]
    log = GateLog(len(memories))
    hooks = [
        memory.gates.register_forward_hook(lambda _module, _inputs, gates, layer=layer: log.add(layer, gates))
        for layer, memory in enumerate(memories)
    ]
    try:
        yield log
    finally:
        for hook in hooks:
            hook.remove()
