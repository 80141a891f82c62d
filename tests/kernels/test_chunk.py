"""The chunk kernels against ``chunkwise``, and so against the definition: outputs, state and every gradient."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.kernels.chunk import chunk_recurrence
from atlas_memory.memory import (
    L2,
    MLP,
    Decay,
    DotProduct,
    Gates,
    GradientDescent,
    Identity,
    Keep,
    Linear,
    MemoryState,
    Rule,
    Window,
    chunkwise,
    initial_state,
    recurrent,
)

from ..memory.problems import error, everything, random_problem, worst

BARE = GradientDescent(bounded=False, live=False)
MLP_RULE = Rule(
    features=Identity(),
    network=MLP(expansion=2),
    bias=L2(),
    retention=Decay(),
    optimiser=BARE,
    window=Window(size=4, chunk=16),
)
RULES = {
    "mlp": MLP_RULE,
    "mlp-dot": replace(MLP_RULE, bias=DotProduct()),
    "mlp-silu": replace(MLP_RULE, network=MLP(expansion=1, activation="silu", residual=False), bias=L2(0.5)),
    "mlp-keep": replace(MLP_RULE, retention=Keep(), window=Window(size=1, chunk=16)),
    "linear": replace(MLP_RULE, network=Linear()),
    "linear-residual": replace(MLP_RULE, network=Linear(residual=True), retention=Keep()),
    "linear-dot": replace(MLP_RULE, network=Linear(), bias=DotProduct(), window=Window(1, 16)),
}


def kernel(rule, params, q, k, v, gates, state=None):
    state = initial_state(rule, params.initial, k) if state is None else state
    return chunk_recurrence(rule, q, k, v, gates.complete(q, rule.window.size), state)


@pytest.mark.parametrize("name", RULES)
def test_equals_chunkwise(name):
    problem = random_problem(RULES[name], 0, batch=1, heads=1, time=37, dim=16)
    gap, where = worst(everything(kernel, problem), everything(chunkwise, problem))
    assert gap < 1e-8, where


SHAPES = [  # time, dim, c, b: T < b, T = b, c = b + 1, wide heads, long chunks
    (5, 16, 3, 16),
    (32, 16, 1, 16),
    (20, 16, 17, 16),
    (40, 32, 2, 32),
    (70, 16, 8, 64),
]


@pytest.mark.parametrize("time,dim,size,chunk", SHAPES)
@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_shapes(name, time, dim, size, chunk):
    rule = RULES[name].vary(window={"size": size, "chunk": chunk})
    problem = random_problem(rule, 1, batch=1, heads=2, time=time, dim=dim)
    gap, where = worst(everything(kernel, problem), everything(chunkwise, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("dim,expansion", [(16, 3), (32, 3), (16, 5)])
def test_hidden_units_that_no_large_block_divides(dim, expansion):
    rule = RULES["mlp"].vary(network={"expansion": expansion})
    problem = random_problem(rule, 1, batch=1, heads=1, time=20, dim=dim)
    gap, where = worst(everything(kernel, problem), everything(chunkwise, problem))
    assert gap < 1e-8, where


def test_equals_the_definition_and_in_float32():
    rule = RULES["mlp"]
    oracle = everything(recurrent, random_problem(rule, 2, batch=1, heads=1, time=21, dim=16))
    for dtype, allowed in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        problem = random_problem(rule, 2, batch=1, heads=1, time=21, dim=16, dtype=dtype)
        gap, where = worst(everything(kernel, problem), oracle)
        assert gap < allowed, where


def test_goes_on_from_a_state_at_the_start_of_a_chunk():
    """Outputs, the end and gradients through the state, with window tokens from before it."""
    rule = RULES["mlp"]
    problem = random_problem(rule, 3, batch=1, heads=1, time=37, dim=16)
    results = []
    for form in (kernel, chunkwise):
        y, state = form(*problem.between(0, 32).arguments())
        y2, end = form(*problem.between(32, 37).arguments(), state)
        loss = y.square().sum() + y2.square().sum() + sum(w.square().sum() for w in (*end.weights, *end.frozen))
        results.append([y, y2, *end.tensors(), *torch.autograd.grad(loss, problem.leaves, allow_unused=True)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-8


def test_without_gradients_only_two_memories_are_kept(monkeypatch):
    problem = random_problem(RULES["mlp"], 4, batch=1, heads=1, time=50, dim=16)
    slots = []
    empty = torch.Tensor.new_empty

    def new_empty(self, *shape, **options):
        if len(shape) == 5:  # memories, [slots, batch, heads, rows, columns]
            slots.append(shape[0])
        return empty(self, *shape, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    y, end = kernel(*problem.arguments())
    with torch.no_grad():
        y2, end2 = kernel(*problem.arguments())
    assert slots == [5, 5, 2, 2]
    assert torch.equal(y, y2)
    assert all(torch.equal(a, b) for a, b in zip(end.tensors(), end2.tensors(), strict=True))


def test_closed_and_missing_gates():
    """alpha = 0 and hard gamma are exact with gradients; gates left out are 1."""
    problem = random_problem(RULES["mlp"], 5, batch=1, heads=1, time=20, dim=16)
    alpha = problem.gates.alpha.detach().round().requires_grad_()
    alpha.data[:, :, 7] = 0.0
    gamma = problem.gates.gamma.detach().round().requires_grad_()
    for gates in (Gates(problem.gates.eta, alpha, gamma=gamma), Gates(problem.gates.eta)):
        closed = replace(problem, gates=gates)
        gap, where = worst(everything(kernel, closed), everything(chunkwise, closed))
        assert gap < 1e-8, where


def test_bfloat16_inputs_meet_a_float32_memory():
    rule = RULES["mlp"]
    problem = random_problem(rule, 6, batch=1, heads=1, time=20, dim=16, dtype=torch.float32)
    rough = [x.detach().bfloat16().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    exact = [x.detach().float().requires_grad_() for x in rough]
    results = []
    for q, k, v in (rough, exact):
        state = initial_state(rule, problem.params.initial, problem.k)
        y, end = chunk_recurrence(rule, q, k, v, problem.gates.complete(problem.q, 4), state)
        grads = torch.autograd.grad(y.float().sum() + end.weights[0].sum(), (q, k, v, problem.gates.eta))
        assert y.dtype == q.dtype and [g.dtype for g in grads] == [q.dtype] * 3 + [torch.float32]
        results.append([y, *grads])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert error(a, b) < 0.01, i


def test_the_state_is_a_memory_state_that_chunkwise_continues():
    problem = random_problem(RULES["linear"], 7, batch=2, heads=2, time=37, dim=16)
    _, state = kernel(*problem.between(0, 20).arguments())
    assert isinstance(state, MemoryState)
    y, _ = chunkwise(*problem.between(20, 37).arguments(), state)
    whole, _ = recurrent(*problem.arguments())
    assert error(y, whole[:, :, 20:]) < 1e-10
