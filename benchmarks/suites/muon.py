"""Exact Muon at every token: the form that the library chooses against the one that makes every momentum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from atlas_memory.memory import MLP, Linear, MemoryState, Network, Rule, Window, chunkwise, cost, fast_weight
from benchmarks.cost import memory
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Candidate, Cost, Shape

NETWORKS: dict[str, Network] = {"linear": Linear(), "MLP, expansion 1": MLP(expansion=1), "MLP, expansion 4": MLP()}
CHUNK = 64


@contextmanager
def forced(space: str) -> Iterator[None]:
    """Newton-Schulz in the "feature" or the "output" space of every matrix, whatever is cheaper; in the cost model too.

    The one place that knows how ``fast_weight.muon_steps`` chooses.
    """
    before = fast_weight.prefers_output_space, cost.prefers_output_space

    def always(*sizes: int) -> bool:
        return space == "output"

    fast_weight.prefers_output_space = cost.prefers_output_space = always  # type: ignore[assignment]
    try:
        yield
    finally:
        fast_weight.prefers_output_space, cost.prefers_output_space = before


def in_feature_space(*arguments: Any) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` with every momentum made, and orthogonalised as it is."""
    with forced("feature"):
        return chunkwise(*arguments)


def materialised(rule: Rule, shape: Shape) -> Cost:
    """The written model of ``in_feature_space``."""
    with forced("feature"):
        return memory(rule, shape)


def _pair(name: str, network: Network) -> tuple[Candidate, Candidate]:
    rule = Rule(network=network, window=Window(size=8, chunk=CHUNK))
    made = bare_memory(f"{name}, feature space", rule, in_feature_space, verified=16, group=name, baseline=True)
    made = replace(made, cost=partial(materialised, rule))
    return made, bare_memory(f"{name}, as chosen", rule, verified=16, group=name)


MUON = Benchmark(
    name="muon",
    shows="What it saves not to make the momentum of each token: exact per-token Muon, one chunk, degree-2 features.",
    shapes=tuple(Shape(batch=1, heads=1, dim=dim, time=CHUNK) for dim in (32, 64)),
    quick=(Shape(batch=1, heads=1, dim=8, time=16),),
    candidates=tuple(candidate for name, network in NETWORKS.items() for candidate in _pair(name, network)),
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
