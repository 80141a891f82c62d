"""The fast form against the definition, both forward and backward."""

from __future__ import annotations

from atlas_memory.memory import RULES, recurrent
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Shape

PIECE = 128
"""Tokens of the definition's graph that fit in memory: 65 MB a token, for one head of 64."""
ATLAS = RULES["atlas"]

ORACLE = Benchmark(
    name="oracle",
    shows="How much faster chunks are than the definition, for `atlas`, forward and backward; the definition goes "
    f"{PIECE} tokens at a time, each from the state of the last, since the graph of all would take 65 GB.",
    shapes=(Shape(batch=1, heads=1, dim=64, time=1024),),
    quick=(Shape(batch=1, heads=1, dim=8, time=64),),
    candidates=(
        bare_memory("chunkwise", ATLAS, baseline=True, group="atlas"),
        bare_memory("recurrent", ATLAS, recurrent, pieces=PIECE, group="atlas", once=True),
    ),
    columns=("candidate", "ms", "ms, 20 to 80 %", "times baseline", "µs a token", "check"),
)
