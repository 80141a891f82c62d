"""Which calls are recorded and what is done with a recording, without a GPU: graphs that are replayed by computing
everything again, into the same memory. With CUDA graphs: tests/gpu/test_graphed.py."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

from atlas_memory.memory import RULES, chunkwise, fused_recurrent
from atlas_memory.ops import cuda_graphs as graphed
from atlas_memory.ops.cuda_graphs import CALLS, KEPT, Graphs, Recording

from .problems import everything, random_problem, resized, worst


class OnCpu(Recording):
    """A recording whose graphs are Python functions."""

    def __init__(self, read, tensors, gradients):
        self.node, self.calls, self.gradients = graphed._gone, 0, []
        self.inputs = [x.detach().clone().requires_grad_(gradients and x.requires_grad) for x in tensors]

        def compute() -> None:
            with torch.set_grad_enabled(gradients):
                self._keep(*read(self.inputs))

        compute()
        outputs, pulled = [x.detach().clone() for x in self.outputs], self.pulled

        def forward() -> None:
            compute()
            for mine, now in zip(outputs, self.outputs, strict=True):
                mine.copy_(now.detach())
            self.outputs, self.pulled = outputs, pulled

        def backward() -> None:
            compute()
            self.pulled = pulled
            self.gradients = self._pull()
            self.outputs = outputs

        self.forward, self.backward = SimpleNamespace(replay=forward), SimpleNamespace(replay=backward)


@pytest.fixture
def graphs(monkeypatch) -> Graphs:
    monkeypatch.setattr(graphed, "_recordable", lambda tensors: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(graphed, "Recording", OnCpu)
    return Graphs()


def problem(name="atlas", seed=0, **sizes):
    return random_problem(resized(RULES[name], 3, 4), seed, **sizes)


@pytest.mark.parametrize("name", ["atlas", "titans", "memora", "swla", "lact"])
def test_equals_the_form(graphs, name):
    for seed in range(CALLS + 3):
        given = problem(name, seed, time=11)
        gap, where = worst(everything(lambda *a: graphs(chunkwise, *a), given), everything(chunkwise, given))
        assert gap < 1e-12, where
    (recording,) = graphs.recordings.values()
    assert recording.calls == 3


def test_a_call_is_recorded_when_its_shapes_come_for_the_third_time(graphs):
    for time in (8, 9, 8, 9, 8):
        graphs(chunkwise, *problem(time=time).arguments())
    assert len(graphs.recordings) == 1
    with torch.no_grad():  # without a backward pass it is another
        for _ in range(CALLS + 1):
            graphs(chunkwise, *problem(time=8).arguments())
    assert len(graphs.recordings) == 2


def test_forms_and_missing_gates_are_told_apart(graphs):
    given = problem(time=2)
    bare = given.gates.map(lambda g: g)
    bare = type(bare)(bare.eta, gamma=bare.gamma)
    for _ in range(CALLS + 1):
        for form in (chunkwise, fused_recurrent):
            for gates in (given.gates, bare):
                y, _ = graphs(form, given.rule, given.params, given.q, given.k, given.v, gates)
                expected, _ = form(given.rule, given.params, given.q, given.k, given.v, gates)
                assert torch.equal(y, expected)
                del y
    assert len(graphs.recordings) == 4


def test_only_so_many_are_kept(graphs):
    with torch.no_grad():
        for time in range(1, KEPT + 4):
            for _ in range(CALLS + 1):
                graphs(chunkwise, *problem(time=time).arguments())
    assert len(graphs.recordings) == KEPT


def test_results_stay_when_the_recording_is_used_again(graphs):
    with torch.no_grad():
        for seed in range(CALLS + 1):
            y, state = graphs(chunkwise, *problem(seed=seed, time=11).arguments())
        kept = [t.clone() for t in (y, *state.tensors())]
        graphs(chunkwise, *problem(seed=9, time=11).arguments())
    assert all(torch.equal(a, b) for a, b in zip(kept, (y, *state.tensors()), strict=True))


def test_a_second_call_before_the_backward_pass_is_computed(graphs):
    a, b = problem(seed=0, time=11), problem(seed=1, time=11)
    for _ in range(CALLS + 1):
        graphs(chunkwise, *a.arguments())
    (recording,) = graphs.recordings.values()
    assert not recording.pending  # what was called was given up
    first, second = (graphs(chunkwise, *p.arguments())[0].sum() for p in (a, b))
    assert recording.calls == 2 and recording.pending
    for loss, given in ((first, a), (second, b)):
        found = torch.autograd.grad(loss, given.q)
        expected = torch.autograd.grad(chunkwise(*given.arguments())[0].sum(), given.q)
        assert torch.allclose(found[0], expected[0], rtol=1e-12)
    assert not recording.pending


@pytest.mark.parametrize("called_again", [False, True])
def test_a_second_backward_pass_is_refused(graphs, called_again):
    given = problem(time=11)
    for _ in range(CALLS + 1):
        loss = graphs(chunkwise, *given.arguments())[0].sum()
    torch.autograd.grad(loss, given.q, retain_graph=True)
    if called_again:
        graphs(chunkwise, *given.arguments())
    with pytest.raises(RuntimeError, match=r"second backward pass through one call.*graphed=False"):
        torch.autograd.grad(loss, given.q)


def test_under_checkpointing_nothing_is_recorded_or_replayed(monkeypatch):
    """It would compute the call again in the backward pass, while the recording is pending."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, seen = torch.ones(2, requires_grad=True), []

    def ask(y):
        seen.append(graphed._recordable([y]))
        return y.square()

    ask(x)
    torch.utils.checkpoint.checkpoint(ask, x, use_reentrant=False).sum().backward()
    assert seen == [True, False, False]


def test_another_rule_is_another_recording(graphs):
    given, other = problem("titans", time=11), RULES["titans"].vary(optimiser={"normalised": False})
    other = resized(other, 3, 4)
    for rule in (given.rule, other):
        for _ in range(CALLS + 1):
            y, _ = graphs(chunkwise, rule, given.params, given.q, given.k, given.v, given.gates)
        expected, _ = chunkwise(rule, given.params, given.q, given.k, given.v, given.gates)
        assert torch.equal(y, expected)


def test_ever_new_shapes_are_forgotten(graphs, monkeypatch):
    monkeypatch.setattr(graphed, "SHAPES", 5)
    with torch.no_grad():
        for time in range(1, 20):
            graphs(chunkwise, *problem(time=time).arguments())
            assert len(graphs.seen_shapes) <= 5


def test_what_cannot_be_recorded_is_computed_and_said_once(graphs, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("no memory\nat all")

    monkeypatch.setattr(graphed, "Recording", refuse)
    given = problem(time=11)
    expected, _ = chunkwise(*given.arguments())
    with pytest.warns(
        UserWarning, match="graphed: a memory is computed without a CUDA graph: no memory at all"
    ) as said:
        for _ in range(CALLS + 3):
            assert torch.equal(graphs(chunkwise, *given.arguments())[0], expected)
    assert len(said) == 1


def test_a_mistake_is_said_as_without(graphs):
    given = problem(time=11)
    for _ in range(CALLS + 2):
        with pytest.raises(ValueError, match="k must have the shape of q"):
            graphs(chunkwise, given.rule, given.params, given.q, given.k[:, :, 1:], given.v, given.gates)


def test_copies_begin_without_recordings(graphs):
    for _ in range(CALLS + 1):
        graphs(chunkwise, *problem(time=11).arguments())
    for copied in (copy.deepcopy(graphs), pickle.loads(pickle.dumps(graphs))):
        assert graphs.recordings and not copied.recordings and not copied.seen_shapes


def test_on_a_cpu_nothing_is_recorded():
    graphs = Graphs()
    for _ in range(CALLS + 2):
        graphs(chunkwise, *problem(time=11).arguments())
    assert not graphs.recordings and not graphs.seen_shapes
