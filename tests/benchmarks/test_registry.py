"""The benchmarks are well formed, and their written model counts what PyTorch counts."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from atlas_memory.memory import RULES
from atlas_memory.ops.flops import flop_counter
from benchmarks import cost
from benchmarks.operations import inputs, memory_layer, sdpa, seeded
from benchmarks.registry import Benchmark, Candidate, Shape
from benchmarks.results import COLUMNS
from benchmarks.suites import BENCHMARKS
from benchmarks.suites.mixers import GATED, LACT, OMEGANET


@pytest.mark.extended
@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda b: b.name)
def test_well_formed(benchmark: Benchmark) -> None:
    assert benchmark.shows.endswith(".") and "\n" not in benchmark.shows
    assert set(benchmark.columns) <= set(COLUMNS)
    groups = {c.group for c in benchmark.candidates}
    assert {c.group for c in benchmark.candidates if c.baseline} == groups
    for shape in (*benchmark.shapes, *benchmark.quick):
        taken = [c for c in benchmark.candidates if c.takes(shape)]
        assert taken
        for candidate in taken:
            small = candidate.reduce(shape)
            assert (small.dim, small.batch) == (shape.dim, 1) and small.time <= shape.time
            if candidate.cost is not None:
                assert min(candidate.cost(shape)) > 0
    assert all(shape.tokens <= 512 and shape.width <= 32 for shape in benchmark.quick)


def test_every_candidate_of_ours_has_a_definition() -> None:
    """Only attention and the peers are checked without one."""
    for benchmark in BENCHMARKS.values():
        others = {c.name for c in benchmark.candidates if c.oracle is None}
        assert all(name.startswith(("softmax attention", "titans-pytorch", "gated-deltanet of fla")) for name in others)


def test_shapes_are_on_the_device_of_their_benchmark_and_quick_ones_on_the_cpu() -> None:
    for benchmark in BENCHMARKS.values():
        assert benchmark.device == ("cuda" if benchmark.name.startswith("gpu-") else "cpu")
        assert {shape.device for shape in benchmark.at(quick=False)} == {benchmark.device}
        assert benchmark.at(quick=True) == benchmark.quick
        assert {shape.device for shape in benchmark.quick} == {"cpu"}


def test_names_and_baselines_are_unique() -> None:
    benchmark = BENCHMARKS["oracle"]
    candidates = benchmark.candidates
    with pytest.raises(ValueError, match="two candidates called 'chunkwise'"):
        replace(benchmark, candidates=(*candidates, candidates[0]))
    with pytest.raises(ValueError, match="two baselines"):
        replace(benchmark, candidates=tuple(replace(c, baseline=True) for c in candidates))
    with pytest.raises(ValueError, match="no candidate 'x'; it has chunkwise, recurrent"):
        benchmark.candidate("x")


OF_LAYERS = {
    "omeganet": OMEGANET,
    "omeganet, degree 2": RULES["omeganet"],
    "titans": RULES["titans"],
    "gated": GATED,
    "lact": LACT,
    "ttt-linear": RULES["ttt-linear"],
}
LAYERS = {name: memory_layer("a", rule, chunk=8) for name, rule in OF_LAYERS.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_model_counts_the_operations_of_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more chunks of a call: the model leaves out nothing but spare places and counts nothing twice, to 2 %."""
    assert counted(LAYERS[name], time=32) == pytest.approx(2.0, rel=0.02)


def counted(candidate: Candidate, time: int) -> float:
    """PyTorch's count of a forward call, less that of half the tokens, in model counts of the half."""
    counts = []
    for length in (time // 2, time):
        operation = candidate.operation(Shape(batch=1, heads=2, dim=16, time=length))
        with torch.no_grad(), flop_counter() as counter:
            operation.function(operation.x)
        counts.append(counter.get_total_flops())
    assert candidate.cost is not None
    half = candidate.cost(Shape(batch=1, heads=2, dim=16, time=time // 2)).flops
    return 2.0 * (counts[1] - counts[0]) / half


def test_model_counts_the_operations_of_attention() -> None:
    """PyTorch counts all scores, the model the causal half."""
    shape = Shape(batch=2, heads=2, dim=8, time=64)
    operation = sdpa().operation(shape)
    # Of its attention kernels, PyTorch counts what the plain one is made of.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), flop_counter() as counter:
        operation.function(operation.x)
    all_scores = 4.0 * shape.batch * shape.time**2 * shape.width
    causal = 4.0 * shape.batch * (shape.time * (shape.time + 1) / 2) * shape.width
    assert counter.get_total_flops() == cost.attention(shape).flops - causal + all_scores


def test_backward_counts_twice() -> None:
    """To 10 %, convolutions apart: PyTorch counts the backward pass of a depthwise one as if it were full."""
    operation = LAYERS["omeganet"].operation(Shape(batch=1, heads=2, dim=16, time=32))
    counts = []
    for backward in (False, True):
        with flop_counter() as counter:
            y = operation.function(operation.x)
            if backward:
                y.sum().backward()
        found = counter.get_flop_counts()["Global"]
        counts.append(sum(n for name, n in found.items() if "convolution" not in str(name)))
    assert counts[1] / counts[0] == pytest.approx(1.0 + cost.BACKWARD, rel=0.1)


def test_numbers_do_not_depend_on_what_was_made_before() -> None:
    shape = Shape(batch=1, heads=2, dim=8, time=4)
    first, second = (seeded(lambda: torch.nn.Linear(3, 3), torch.float64) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(inputs(shape, torch.float32), inputs(shape, torch.float64).float())
    assert RULES["omeganet"].features != OMEGANET.features
