"""A trace in few numbers, as a log keeps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .trace import GATES, MemoryTrace, Trace


def summarise(trace: Trace) -> dict[str, Any]:
    """``lags`` and ``memories``, for each of which: ``name``; a mean and a standard deviation over tokens for each
    gate; ``half_life`` in tokens, None where nothing is forgotten by a gate; means of ``surprise``, ``written``,
    ``turn`` and, for each lag, ``error``; ``norm``, ``moved``, ``rank`` and, if there is one, ``momentum`` and
    ``momentum_rank`` at the end; each a list of heads. And ``share`` and ``branch``, numbers. A mean of what the text
    was too short for is None.
    """
    return {"lags": list(trace.lags), "memories": [_of(memory) for memory in trace.memories]}


def _of(memory: MemoryTrace) -> dict[str, Any]:
    found: dict[str, Any] = {"name": memory.name, "share": _number(memory.share.mean())}
    found["branch"] = _number(memory.branch.mean())
    for name in GATES:
        gate = getattr(memory, name)
        if gate is not None:
            found[name] = {"mean": _heads(gate), "std": [_number(x) for x in gate.std((0, 2), correction=0)]}
    life = memory.half_life
    found["half_life"] = None if life is None else _heads(life[..., None])
    found["surprise"], found["written"] = _heads(memory.surprise), _heads(memory.written)
    found["turn"] = _heads(memory.turn)
    found["error"] = [_heads(error) for error in memory.error.unbind(2)]
    for name in ("norm", "moved", "momentum", "momentum_rank", "rank"):
        value = getattr(memory, name)
        if value is not None:
            found[name] = _heads(value[..., -1:])
    return found


def _heads(x: Tensor) -> list[float | None]:
    """Means of ``[batch, heads, time]`` over rows and tokens, NaN left out."""
    return [_number(value) for value in x.nanmean((0, 2))]


def _number(x: Tensor) -> float | None:
    return float(f"{float(x):.5g}") if torch.isfinite(x) else None
