"""Exact Muon at every token: the form that the library chooses against the one that makes every momentum."""

from __future__ import annotations

import sys
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
    muon_steps,
)
from atlas_memory.memory.newton_schulz import COEFFICIENTS
from benchmarks.cost import memory
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Candidate, Cost, Shape

NARROW, WIDE = (Shape(batch=1, heads=256 // dim, dim=dim, time=64) for dim in (32, 64))
ALONE = replace(WIDE, heads=1)  # to make the momenta of four heads of 64 with expansion 4 would take 20 GB
QUICK = Shape(batch=1, heads=1, dim=8, time=16)
RULES: dict[str, tuple[Network, str | None]] = {
    "linear": (Linear(), None),
    "linear, horizon": (Linear(), "chunk"),
    "MLP, expansion 1": (MLP(expansion=1), None),
    "MLP, expansion 1, horizon": (MLP(expansion=1), "chunk"),
    "MLP, expansion 4, horizon": (MLP(), "chunk"),
}


@contextmanager
def forced(space: str) -> Iterator[None]:
    """Newton-Schulz in one space of every matrix, "features", "outputs" or "tokens", whatever is cheaper, and of all
    steps of a chunk at once; in the cost model too. The one place that knows how the space is chosen."""
    modules = muon_steps, cost, chunk
    before = muon_steps.cheapest_space, muon_steps.newton_schulz, muon_steps.TOGETHER

    def always(*sizes: int, **options: bool) -> str:
        return space

    for module in modules:
        module.cheapest_space = always  # type: ignore[attr-defined]
    muon_steps.newton_schulz = literal_newton_schulz  # type: ignore[assignment]
    muon_steps.TOGETHER = sys.maxsize
    try:
        yield
    finally:
        for module in modules:
            module.cheapest_space = before[0]  # type: ignore[attr-defined]
        muon_steps.newton_schulz, muon_steps.TOGETHER = before[1:]


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
    """Chunks of 64; of 16 with a horizon, since there Newton-Schulz is on as many tokens as two chunks have. Verified
    into the second chunk."""
    size = 16 if horizon else 64
    rule = Rule(network=network, optimiser=Muon(horizon=horizon), window=Window(size=8, chunk=size))
    shapes = (NARROW, ALONE if network == MLP() else WIDE, QUICK)
    pair = (f"{name}, feature space", in_feature_space), (f"{name}, as chosen", chunkwise)
    options: dict[str, Any] = {"verified": size + 8, "group": name, "takes": shapes.__contains__}
    made, chosen = (bare_memory(title, rule, form, **options) for title, form in pair)
    return replace(made, cost=partial(materialised, rule), baseline=True), chosen


MUON = Benchmark(
    name="muon",
    shows="What it saves not to make the momentum of each token: exact per-token Muon, 64 tokens, degree-2 features.",
    shapes=(NARROW, WIDE, ALONE),
    quick=(QUICK,),
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
