"""Exact Muon at every token: the form that the library chooses against the one that makes every momentum."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
    gram_eigenvalues,
    muon_steps,
)
from atlas_memory.memory.orthogonal import COEFFICIENTS
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


def by_products(*arguments: Any) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` without eigenvalues, as more threads than a few would have it."""
    before, gram_eigenvalues.MOST_THREADS = gram_eigenvalues.MOST_THREADS, 0
    try:
        return chunkwise(*arguments)
    finally:
        gram_eigenvalues.MOST_THREADS = before


def _candidates(name: str, network: Network, horizon: str | None) -> tuple[Candidate, ...]:
    """Chunks of 64; of 16 with a horizon, since there Newton-Schulz is on as many tokens as two chunks have. Verified
    into the second chunk."""
    size = 16 if horizon else 64
    rule = Rule(network=network, optimiser=Muon(horizon=horizon), window=Window(size=8, chunk=size))
    shapes = (NARROW, ALONE if network == MLP() else WIDE, QUICK)
    forms: list[tuple[str, Callable[..., tuple[Tensor, MemoryState]]]]
    forms = [("feature space", in_feature_space), ("as chosen", chunkwise)]
    if horizon is None:
        forms.append(("by products", by_products))
    options: dict[str, Any] = {"verified": size + 8, "group": name, "takes": shapes.__contains__}
    made, *others = (bare_memory(f"{name}, {title}", rule, form, **options) for title, form in forms)
    return replace(made, cost=partial(materialised, rule), baseline=True), *others


MUON = Benchmark(
    name="muon",
    shows="What it saves not to make the momentum of each token: exact per-token Muon, 64 tokens, degree-2 features.",
    shapes=(NARROW, WIDE, ALONE),
    quick=(QUICK,),
    candidates=tuple(candidate for name, given in RULES.items() for candidate in _candidates(name, *given)),
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
