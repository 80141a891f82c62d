"""Exact Muon at every token: the form that the library chooses against the one that makes every momentum."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from atlas_memory.memory import (
    MLP,
    Linear,
    MemoryState,
    Network,
    Rule,
    Window,
    chunkwise,
)
from atlas_memory.ops.muon_space import MuonSpace
from benchmarks.cost import memory
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Candidate, Cost, Shape

NARROW, WIDE = (Shape(batch=1, heads=256 // dim, dim=dim, time=64) for dim in (32, 64))
QUICK = Shape(batch=1, heads=1, dim=8, time=16)
NETWORKS: dict[str, Network] = {"linear": Linear(), "MLP, expansion 1": MLP(expansion=1)}


FEATURES = MuonSpace("features", together=sys.maxsize)
"""Every momentum of a chunk is made, all at once, and orthogonalised as it is."""

PRODUCTS = MuonSpace(eigenvalues=False)
"""As more threads than a few would have it."""


def in_feature_space(*arguments: Any) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` with every momentum made."""
    return chunkwise(*arguments, muon_space=FEATURES)


def materialised(rule: Rule, shape: Shape) -> Cost:
    """The written model of ``in_feature_space``."""
    return memory(rule, shape, muon_space=FEATURES)


def by_products(*arguments: Any) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` without eigenvalues."""
    return chunkwise(*arguments, muon_space=PRODUCTS)


def _candidates(name: str, network: Network) -> tuple[Candidate, ...]:
    """Verified into the second chunk."""
    rule = Rule(network=network, window=Window(size=8, chunk=64))
    forms: list[tuple[str, Callable[..., tuple[Tensor, MemoryState]]]]
    forms = [("feature space", in_feature_space), ("as chosen", chunkwise), ("by products", by_products)]
    options: dict[str, Any] = {"verified": 72, "group": name}
    made, *others = (bare_memory(f"{name}, {title}", rule, form, **options) for title, form in forms)
    return replace(made, cost=partial(materialised, rule), baseline=True), *others


MUON = Benchmark(
    name="muon",
    shows="What it saves not to make the momentum of each token: exact per-token Muon, 64 tokens, degree-2 features.",
    shapes=(NARROW, WIDE),
    quick=(QUICK,),
    candidates=tuple(candidate for name, network in NETWORKS.items() for candidate in _candidates(name, network)),
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
