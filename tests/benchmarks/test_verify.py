"""What is wrong is not timed; what is said of others is true."""

import sys
from dataclasses import replace
from functools import partial
from time import sleep

import pytest
import torch

from atlas_memory.memory import RULES, chunkwise
from benchmarks import measure
from benchmarks.operations import bare_memory, sdpa, titans_pytorch
from benchmarks.registry import Benchmark, Candidate, Missing, Operation, Shape, as_it_is
from benchmarks.run import Settings, run
from benchmarks.verify import Unverified, Verdict, demand, of_kernel, verify

RULE = RULES["atlas-linear"].vary(window={"size": 2, "chunk": 8})
SHAPE = Shape(batch=1, heads=2, dim=4, time=16)
QUIETLY = Settings(repeats=2, memory=False, compile_limit=0.0)


def subtly_wrong(*arguments):
    y, state = chunkwise(*arguments)
    return y * (1.0 + 1e-4), state


def wrong_gradient(*arguments):
    y, state = chunkwise(*arguments)
    return y.detach() + (y - y.detach()) * 1.001, state


GOOD = bare_memory("good", RULE, baseline=True)
WRONG = bare_memory("wrong", RULE, subtly_wrong)


def benchmark(*candidates: Candidate) -> Benchmark:
    return Benchmark("tiny", "A test.", (SHAPE,), (SHAPE,), candidates, ("candidate", "ms", "times baseline", "check"))


def test_equal_to_the_definition() -> None:
    assert verify(GOOD, SHAPE).passed


@pytest.mark.parametrize("form", [subtly_wrong, wrong_gradient])
def test_a_wrong_candidate_is_refused(form) -> None:
    verdict = verify(bare_memory("wrong", RULE, form), SHAPE)
    assert not verdict.passed and verdict.text.startswith("refused: ") and "from the definition" in verdict.text


def test_a_candidate_with_infinities_is_refused() -> None:
    def infinite(*arguments):
        y, state = chunkwise(*arguments)
        return y / 0.0, state

    assert not verify(bare_memory("wrong", RULE, infinite), SHAPE).passed


def state_wrong(*arguments):
    y, state = chunkwise(*arguments)
    return y, state.map(lambda x: x * 1.01 if x.is_floating_point() else x)


def test_the_memory_that_is_left_is_verified_too() -> None:
    verdict = verify(bare_memory("wrong", RULE, state_wrong), SHAPE)
    assert not verdict.passed and verdict.text.startswith("refused: result ")


@pytest.mark.parametrize("off,passes", [(5e-5, True), (1e-3, False)])
def test_a_kernel_has_a_tolerance_of_its_own_and_is_not_asked_for_float64(off, passes) -> None:
    def kernel(rule, params, q, *others):
        assert q.dtype == torch.float32
        y, state = chunkwise(rule, params, q, *others)
        return y * (1.0 + off), state

    verdict = verify(bare_memory("kernel", RULE, kernel, kernel=True), SHAPE)
    assert verdict.passed is passes and verdict.text.startswith("off by " if passes else "refused: ")
    assert ("allowed a kernel: 1e-04 or 4 times that" in verdict.text) is passes


def test_a_kernel_may_be_four_times_as_far_as_the_definition_in_float32() -> None:
    truth, own = {"y": torch.ones(4)}, {"y": torch.ones(4) * 1.001}
    for off, passes in ((1.0035, True), (1.0045, False)):
        assert of_kernel({"y": torch.ones(4) * off}, own, truth).passed is passes
    small = {"y": torch.ones(4), "gradient": torch.ones(4)}  # each tensor for itself
    found = {"y": torch.ones(4), "gradient": torch.ones(4) * 1.003}
    assert not of_kernel(found, small | {"y": torch.ones(4) * 1.01}, small).passed


def test_nothing_of_ours_is_timed_unverified() -> None:
    for verdict in (None, Verdict(False, "refused: because")):
        with pytest.raises(Unverified, match="refused"):
            demand(GOOD, verdict)
        with pytest.raises(Unverified, match="refused"):
            measure.ready(GOOD, SHAPE, verdict)
    assert measure.ready(GOOD, SHAPE, Verdict(True, "")).first > 0


def test_a_run_goes_on_without_what_it_refused() -> None:
    said: list[str] = []
    result = run(benchmark(GOOD, WRONG), QUIETLY, "command", said.append)
    good, wrong = result["rows"]
    assert good["median"] > 0 and good["ratio"] == 1.0 and good["check"].startswith("off by ")
    assert "median" not in wrong and wrong["check"].startswith("refused: ")
    assert 0 < good["of_sgemm"] < 1 and good["rounds"] == 2
    assert any("wrong" in line and "refused" in line for line in said)


def peer(function) -> Candidate:
    def build(shape: Shape, dtype: torch.dtype, wrap) -> Operation:
        return Operation(function, torch.randn(shape.batch, shape.time, shape.width))

    return Candidate("softmax peer", build)


def test_others_are_checked_for_what_can_be_checked() -> None:
    assert verify(sdpa(), SHAPE) == Verdict(True, "causal, finite")
    looks_ahead = verify(peer(lambda x: x + x.flip(1)), SHAPE)
    assert looks_ahead.passed and looks_ahead.text.startswith("not causal: token ")
    assert verify(peer(lambda x: x.log()), SHAPE).text == "outputs that are not finite"
    assert verify(peer(lambda x: x[:, :3]), SHAPE).text == "outputs [1, 3, 8] for inputs [1, 16, 8]"


def test_what_is_missing_is_stated() -> None:
    def build(shape: Shape, dtype: torch.dtype, wrap) -> Operation:
        raise Missing("such-a-peer is not installed")

    result = run(benchmark(GOOD, Candidate("peer", build)), QUIETLY, "command", lambda line: None)
    assert result["rows"][1]["check"] == "not timed: such-a-peer is not installed"


def test_a_peer_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "titans_pytorch", None)
    with pytest.raises(Missing, match="pip install titans-pytorch"):
        verify(titans_pytorch("titans-pytorch", 8, {}), SHAPE)


def test_compiled_candidates_are_left_out_on_request() -> None:
    twice = replace(GOOD, name="compiled", compile=True, baseline=False)
    result = run(benchmark(GOOD, twice), QUIETLY, "command", lambda line: None)
    assert "--compile-limit 0" in result["rows"][1]["check"]
    assert as_it_is(len) is len


def test_a_call_too_long_is_given_up() -> None:
    with pytest.raises(measure.TooLong, match="not compiled within 0 s"), measure.deadline(0.01):
        while True:
            pass
    with measure.deadline(5.0):
        pass


def test_what_is_done_with_the_gradients_is_part_of_a_call() -> None:
    tokens, weight, seen = torch.tensor([1, 2]), torch.ones(3, requires_grad=True), []
    operation = Operation(lambda x: weight[x], tokens, (weight,), update=seen.append)
    assert operation.leaves == (weight,)  # tokens have no gradient
    measure.step(operation, backward=True)()
    assert [g.tolist() for g in seen[0]] == [[0.0, 1.0, 1.0]]


def test_a_call_without_memory_beside_the_others_is_left_out() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("the GPU is full")

    found = measure.rounds({"a": partial(sleep, 0.02), "full": full}, 2, 10.0)
    assert list(found.seconds) == ["a"] and str(found.failed["full"]) == "the GPU is full"


def test_a_machine_that_fails_does_not_take_with_it_what_was_found() -> None:
    def breaks(*arguments):
        calls.append(1)
        if len(calls) > 2:  # verified and built, and then
            raise RuntimeError("the GPU is lost")
        return chunkwise(*arguments)

    calls: list[int] = []
    result = run(benchmark(GOOD, bare_memory("breaks", RULE, breaks)), QUIETLY, "command", lambda line: None)
    good, broken = result["rows"]
    assert "the GPU is lost" in broken["check"] and broken["check"].startswith("off by ")
    assert good["check"].startswith("off by ")


def test_turns_and_ratios() -> None:
    calls = dict.fromkeys(("a", "b", "slow"), partial(sleep, 0.02))
    found = measure.rounds(calls, 5, 10.0, frozenset({"slow"}))
    assert [len(found.seconds[name]) for name in calls] == [5, 5, 1]
    rounds = measure.Rounds({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 2.0]}, 1.0)
    assert rounds.ratio("a", "b").median == 1.0
    assert rounds.spread("a") == measure.Spread(2.0, 1.0, pytest.approx(1.4), pytest.approx(3.2))
