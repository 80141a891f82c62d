"""What the memories of a model hold when reading stops: how far they are from M_0, and how long they keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layers.omega_memory import OmegaMemory
from ..rules.gates import half_life
from ..rules.state import State


@dataclass(frozen=True)
class LayerFacts:
    """One memory of one layer when reading stopped.

    Attributes:
        name: Of the memory, from its layer on.
        norm: |M|, over all its matrices.
        written: |M - M_0| / |M|, the share of M that reading has made.
        half_life: Tokens after which its retention gates alpha leave half of a write, by their mean over the last
            piece that was read: the shortest and the longest of its heads. None where the rule has no such gate.
    """

    name: str
    norm: float
    written: float
    half_life: tuple[float, float] | None = None


def layer_facts(model: Any, states: Iterable[State | None], gates: dict[str, Tensor]) -> tuple[LayerFacts, ...]:
    """Of each memory of a model; `gates`: the retention alpha of the last tokens, by the memory's name."""
    found = []
    for i, (block, state) in enumerate(zip(model.model.layers, states, strict=True)):
        if state is None:
            continue
        with torch.no_grad():
            fresh = dict(block.mixer.initial_state().named_tensors())
        kept = [name for name in gates if name.startswith(f"{i}.")]
        now, names = dict(state.named_tensors()), [name for name in fresh if name.endswith(".weights")]
        memories = list(dict.fromkeys(name.partition("matrices.")[0] for name in names))
        for n, memory in enumerate(memories):
            own = [name for name in names if name.startswith(f"{memory}matrices.")]
            norm, written = (
                math.sqrt(sum(float(t.double().square().sum()) for t in parts))
                for parts in (
                    [now[name] for name in own],
                    [now[name][..., : fresh[name].shape[-1]] - fresh[name] for name in own],
                )
            )
            alpha = gates[kept[n]] if len(kept) == len(memories) else None
            half = None if alpha is None else _half_lives(alpha)
            found.append(LayerFacts(f"{i}.{memory.rstrip('.')}", norm, written / max(norm, 1e-30), half))
    return tuple(found)


def _half_lives(alpha: Tensor) -> tuple[float, float]:
    """The shortest and the longest of the heads; alpha ``[1, heads, time, ...]``."""
    found = half_life(alpha[0].flatten(1))
    return float(found.min()), float(found.max())


@contextmanager
def retention_gates(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inside, the retention gates alpha of the last call of every memory of a model, by name."""
    alpha: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            gates = args[3] if len(args) > 3 else kwargs.get("gates")
            if gates is not None and gates.alpha is not None and gates.alpha.shape[2]:
                alpha[name] = gates.alpha.detach()

        return hook

    hooks = []
    try:
        for i, block in enumerate(model.model.layers):
            for name, module in block.mixer.named_modules():
                if isinstance(module, OmegaMemory):
                    hooks.append(module.register_forward_pre_hook(record(f"{i}.{name}"), with_kwargs=True))
        yield alpha
    finally:
        for hook in hooks:
            hook.remove()
