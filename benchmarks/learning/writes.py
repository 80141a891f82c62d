"""What one write does, at the gates with which a layer starts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from atlas_memory import OmegaMemory
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.memory import RULES, Gates, MemoryState, l2_normalise

from .study import CHUNK, Study, laptop

BATCH, HEADS, OLDER = 64, 2, 100


def measure(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``WRITES``."""
    torch.manual_seed(seed)
    rule = laptop(case)
    memory = OmegaMemory(dim, HEADS, rule, gates=False).eval()
    projection = GateProjection(dim * HEADS, HEADS, rule)
    with torch.no_grad():
        projection.weight.zero_()  # the gates' starting values, whatever the token
    k, v = l2_normalise(torch.randn(BATCH, HEADS, OLDER, dim)), torch.randn(BATCH, HEADS, OLDER, dim)

    def written(k: Tensor, v: Tensor, scale: float, state: MemoryState | None) -> MemoryState:
        gates = projection(k.new_zeros(BATCH, k.shape[2], dim * HEADS))
        return memory(k, k, v, replace(gates, eta=scale * gates.eta), state)[1]

    def rest(state: MemoryState) -> MemoryState:
        """To the end of the chunk, writing nothing: what steps once a chunk has stepped then."""
        left = CHUNK - int(state.seen[0]) % CHUNK
        nothing = k.new_zeros(BATCH, HEADS, left, dim)
        closed = Gates(k.new_zeros(BATCH, HEADS, left), k.new_ones(BATCH, HEADS, left), k.new_ones(BATCH, HEADS, left))
        window = k.new_zeros(BATCH, HEADS, left, rule.window.size)
        return memory(nothing, nothing, nothing, replace(closed, gamma=window), state)[1]

    def answer(k: Tensor, state: MemoryState | None) -> Tensor:
        return memory.retrieve(k, state)

    with torch.no_grad():
        first_k, first_v = k[:, :, :1], v[:, :, :1]
        before = answer(first_k, None)
        found = {}
        for name, scale in (("full", 1.0), ("hundredth", 0.01)):
            state = written(first_k, first_v, scale, None)
            state = rest(state) if rule.every > 1 else state
            found[name] = answer(first_k, state)
        change, little = (found[name] - before for name in ("full", "hundredth"))
        older = written(k, v, 1.0, None)
        after = answer(first_k, rest(older) if rule.every > 1 else older)
    start = (before - first_v).square().sum()
    return {
        "own": float((found["full"] - first_v).square().sum() / start),
        "older": float((after - first_v).square().sum() / start),
        "small eta": float(little.norm() / change.norm()),
    }


WRITES = Study(
    name="writes",
    shows="One random pair is written into a fresh memory at the gates' starting values: the squared error at its key "
    "afterwards, as a share of that before; the same after 99 more pairs; and how much of the change is left with a "
    "hundredth of eta.",
    cases=tuple(RULES),
    widths=(16, 32, 64),
    measure=measure,
    columns=(
        "candidate",
        "head",
        "own error after a write",
        "after 99 more",
        "effect at eta / 100",
        "seeds",
        "revision",
    ),
)
