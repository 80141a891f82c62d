"""Throughput against chunk size: large chunks, and TNT's hierarchy, whose shards are read in parallel."""

from __future__ import annotations

from atlas_memory.layers.tnt import Hierarchy
from benchmarks.operations import memory_layer
from benchmarks.registry import Benchmark, Candidate, Shape
from benchmarks.suites.mixers import OMEGANET


def _large(chunk: int) -> Candidate:
    # A chunk of 1,024 is verified whole: all of what is timed lies in few chunks.
    return memory_layer(
        f"omeganet, chunk {chunk:,}", OMEGANET, chunk=chunk, verified=min(2 * chunk, 1024), baseline=chunk == 64
    )


def _hierarchy(global_chunk: int, local_chunk: int, shard: int) -> Candidate:
    name = f"tnt, global chunk {global_chunk:,}, local {local_chunk}, shards of {shard:,}"
    hierarchy = Hierarchy(global_chunk, (local_chunk,), shard)
    return memory_layer(name, "tnt", hierarchy=hierarchy, verified=shard + local_chunk)


TNT = Benchmark(
    name="tnt",
    shows="How many tokens a second a layer trains on, as its chunks grow and as local memories are read in parallel.",
    shapes=(Shape(batch=1, heads=4, dim=64, time=4096),),
    quick=(Shape(batch=1, heads=2, dim=8, time=128),),
    candidates=(
        *(_large(chunk) for chunk in (16, 64, 256, 1024)),
        *(_hierarchy(1024, local, shard) for local, shard in ((16, 256), (64, 256), (64, 1024))),
    ),
    columns=(
        "candidate",
        "tokens/s",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "GFLOP",
        "of sgemm",
        "of batched",
        "peak MB",
        "check",
    ),
)
