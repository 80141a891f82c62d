"""How near to the machine a layer comes, and on what its time goes."""

from benchmarks.operations import in_both, memory_layer, sdpa
from benchmarks.registry import Benchmark, Shape
from benchmarks.suites.mixers import OMEGANET

UTILISATION = Benchmark(
    name="utilisation",
    shows="The share of the machine's matrix product rate that a layer reaches, and the kinds of work in the rest.",
    shapes=(Shape(batch=2, heads=4, dim=64, time=1024),),
    quick=(Shape(batch=2, heads=2, dim=8, time=128),),
    candidates=(
        sdpa("softmax attention", baseline=True),
        *in_both(memory_layer, "omeganet, window 8, chunk 64", OMEGANET, chunk=64),
    ),
    columns=(
        "candidate",
        "ms",
        "ms, 20 to 80 %",
        "GFLOP",
        "of sgemm",
        "of batched",
        "products",
        "element-wise",
        "copies",
        "reductions",
        "fused",
        "bookkeeping",
        "overhead",
        "check",
    ),
    profiled=True,
)
