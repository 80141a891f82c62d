"""A layer of each memory against softmax attention, and against another library's."""

from __future__ import annotations

from dataclasses import replace

from atlas_memory.memory import RULES, GatedMLP, GradientDescent, Identity, Rule, Window
from benchmarks.operations import in_both, memory_layer, sdpa, titans_pytorch
from benchmarks.registry import Benchmark, Candidate, Shape

OMEGANET = replace(RULES["omeganet"], features=Identity())
"""OmegaNet on the keys themselves: window 8, an MLP memory of expansion 4."""
GATED = Rule(Identity(), GatedMLP(expansion=1), optimiser=GradientDescent(), window=Window(size=1, chunk=64))
LACT = RULES["lact"]

OURS: tuple[Candidate, ...] = (
    *in_both(memory_layer, "omeganet, window 8, chunk 64", OMEGANET, chunk=64),
    *in_both(memory_layer, "omeganet, window 8, chunk 64, groups of 4", OMEGANET, chunk=64, recompute=4),
    *in_both(memory_layer, "omeganet, window 1, chunk 64", OMEGANET, window=1, chunk=64),
    *in_both(memory_layer, "titans, chunk 64", "titans", chunk=64),
    *in_both(memory_layer, "gated memory of width d, chunk 64", GATED),
    *in_both(memory_layer, "lact, float32, chunk 64", LACT, chunk=64),
    *in_both(memory_layer, "lact, float32, chunk 256", LACT, chunk=256),
    *in_both(memory_layer, "ttt-mlp, chunk 64", "ttt-mlp", chunk=64),
    *in_both(memory_layer, "ttt-linear, chunk 16", "ttt-linear", chunk=16),
    *in_both(memory_layer, "gated-deltanet, chunk 64", "gated-deltanet", chunk=64),
    *in_both(memory_layer, "omeganet, degree 2, window 8, chunk 64", "omeganet", chunk=64),
)
PEERS: tuple[Candidate, ...] = (
    titans_pytorch("titans-pytorch, chunk 64", 64, {}),
    titans_pytorch("titans-pytorch, chunk 64, new gradients each chunk", 64, {"batch_size": 64}),
    titans_pytorch("titans-pytorch, chunk 64, Newton-Schulz", 64, {"spectral_norm_surprises": True}),
)

MIXERS = Benchmark(
    name="mixers",
    shows="What a training step of one layer costs, forward and backward, in times of softmax attention's.",
    shapes=(Shape(batch=2, heads=4, dim=64, time=1024),),
    quick=(Shape(batch=2, heads=2, dim=8, time=128),),
    candidates=(*in_both(sdpa, "softmax attention", baseline=True), *OURS, *PEERS),
    columns=(
        "candidate",
        "ms",
        "least ms",
        "ms, 20 to 80 %",
        "times baseline",
        "times, 20 to 80 %",
        "GFLOP",
        "MB moved",
        "of sgemm",
        "of batched",
        "of copy",
        "peak MB",
        "compile s",
        "check",
    ),
)
