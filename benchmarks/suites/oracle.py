"""The fast form against the definition, both forward and backward."""

from atlas_memory.memory import RULES, recurrent
from benchmarks.operations import bare_memory
from benchmarks.registry import Benchmark, Shape

ORACLE = Benchmark(
    name="oracle",
    shows="How much faster chunks are than the definition, for `atlas`: small heads, so that the loop ends in minutes.",
    shapes=(Shape(batch=1, heads=2, dim=16, time=1024),),
    quick=(Shape(batch=1, heads=1, dim=8, time=64),),
    candidates=(
        bare_memory("chunkwise", RULES["atlas"], baseline=True),
        bare_memory("recurrent", RULES["atlas"], recurrent, once=True),
    ),
    columns=("candidate", "ms", "ms, 20 to 80 %", "times baseline", "µs a token", "check"),
)
