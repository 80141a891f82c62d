"""Exact Muon at every token: the form that the library chooses against the one that makes every momentum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from atlas_memory.memory import (
    MLP,
    Linear,
    MemoryState,
    Muon,
    Network,
    Rule,
    Window,
    chunk,
    chunkwise,
    cost,
    fast_weight,
)
from atlas_memory.memory.newton_schulz import COEFFICIENTS
from benchmarks.cost import memory
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Candidate, Cost, Shape

RULES: dict[str, tuple[Network, str | None]] = {
    "linear": (Linear(), None),
    "linear, horizon": (Linear(), "chunk"),
    "MLP, expansion 1": (MLP(expansion=1), None),
    "MLP, expansion 1, horizon": (MLP(expansion=1), "chunk"),
    "MLP, expansion 4, horizon": (MLP(), "chunk"),
}
CHUNK, TIME = 32, 64


@contextmanager
def forced(space: str) -> Iterator[None]:
    """Newton-Schulz in one space of every matrix, "features", "outputs" or "tokens", whatever is cheaper; in the cost
    model too. The one place that knows how the space is chosen."""
    modules = fast_weight, cost, chunk
    before = fast_weight.cheapest_space, fast_weight.newton_schulz

    def always(*sizes: int, **options: bool) -> str:
        return space

    for module in modules:
        module.cheapest_space = always  # type: ignore[attr-defined]
    fast_weight.newton_schulz = literal_newton_schulz  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            module.cheapest_space = before[0]  # type: ignore[attr-defined]
        fast_weight.newton_schulz = before[1]


def literal_newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The iteration as it is printed, on the matrices themselves (ours takes Gram matrices where they are long)."""
    a, b, c = COEFFICIENTS
    x = matrix / matrix.square().sum((-2, -1), keepdim=True).clamp_min(1e-30).sqrt()
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


def in_feature_space(*arguments: Any) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` with every momentum made, and orthogonalised as it is."""
    with forced("features"):
        return chunkwise(*arguments)


def materialised(rule: Rule, shape: Shape) -> Cost:
    """The written model of ``in_feature_space``."""
    with forced("features"):
        return memory(rule, shape)


def _pair(name: str, network: Network, horizon: str | None) -> tuple[Candidate, Candidate]:
    rule = Rule(network=network, optimiser=Muon(horizon=horizon), window=Window(size=8, chunk=CHUNK))
    made = bare_memory(f"{name}, feature space", rule, in_feature_space, verified=16, group=name, baseline=True)
    made = replace(made, cost=partial(materialised, rule))
    return made, bare_memory(f"{name}, as chosen", rule, verified=16, group=name)


MUON = Benchmark(
    name="muon",
    shows="What it saves not to make the momentum of each token: exact per-token Muon, two chunks, degree-2 features.",
    # Four heads of 64 would need 20 GB to make the momenta of expansion 4.
    shapes=(Shape(batch=1, heads=4, dim=32, time=TIME), Shape(batch=1, heads=1, dim=64, time=TIME)),
    quick=(Shape(batch=1, heads=1, dim=8, time=16),),
    candidates=tuple(candidate for name, given in RULES.items() for candidate in _pair(name, *given)),
    columns=(
        "shape",
        "candidate",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "times, 20 to 80 %",
        "GFLOP",
        "of sgemm",
        "peak MB",
        "check",
    ),
)
