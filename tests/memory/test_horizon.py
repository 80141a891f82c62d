"""Muon's horizon, and Newton-Schulz in the space of the tokens that it makes possible."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from atlas_memory.forms import muon_steps
from atlas_memory.forms.muon_steps import takes_token_space
from atlas_memory.forms.spaces import Spaces
from atlas_memory.memory import (
    RULES,
    DotProduct,
    Gates,
    Linear,
    Polynomial,
    chunkwise,
    gram_polynomial,
    incremental,
    newton_schulz,
    recurrent,
)

from .problems import Problem, error, everything, random_problem, worst

HORIZON = {"horizon": "chunk"}
WIDE = RULES["atlas"].vary(optimiser=HORIZON, network={"expansion": 6}, features={"degree": 3})
CASES = {
    "mlp": WIDE.vary(window={"size": 3, "chunk": 4}),
    "no-window": WIDE.vary(window={"size": 1, "chunk": 3}),
    "chunks-of-one": WIDE.vary(window={"size": 3, "chunk": 1}),
    "every-third": WIDE.vary(window={"size": 3, "chunk": 4}, optimiser={"every": 3}),
    "gated": RULES["atlas++"].vary(
        optimiser=HORIZON, features={"degree": 3}, retention={"to_start": True}, window={"size": 2, "chunk": 3}
    ),
    "three-layers": WIDE.vary(window={"size": 2, "chunk": 2, "read": "before"}, network={"depth": 3}),
    "row-norm": WIDE.vary(window={"size": 3, "chunk": 4}, retention={"kind": "RowNorm"}),
    "long": WIDE.vary(window={"size": 2, "chunk": 12}, features={"degree": 4}, network={"expansion": 8}),
    "small": RULES["atlas"].vary(optimiser=HORIZON, network={"expansion": 1}, window={"size": 4, "chunk": 5}),
}


def spaces(rule, dim: int) -> list[bool]:
    """Which of a rule's matrices are stepped in token space."""
    return [takes_token_space(rule, *shape, Spaces()) for shape in rule.shapes(dim)]


def test_the_cases_reach_every_combination():
    taken = {name: spaces(rule, 4) for name, rule in CASES.items()}
    assert all(any(matrices) for name, matrices in taken.items() if name != "small")
    assert not any(taken["small"]) and taken["mlp"] == [True, False] and all(taken["three-layers"][:2])
    assert not any(spaces(WIDE.vary(optimiser={"horizon": None}), 4))


@pytest.mark.parametrize("name", CASES)
def test_forms_agree(name):
    problem = random_problem(CASES[name], 0, time=27)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, incremental):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, f"{form.__name__}: {where} is off by {gap:.1e}"


@pytest.mark.parametrize("name", ["mlp", "every-third", "long"])
def test_float32_holds_within_a_call_in_float64(name):
    problem = random_problem(CASES[name], 1, time=27, dtype=torch.float32)
    gap, where = worst(everything(chunkwise, problem), everything(recurrent, problem))
    assert gap < 1e-5, where


@pytest.mark.parametrize("name", CASES)
def test_any_split_any_phase_and_padding_give_the_whole(name):
    """Ragged calls: rows that end within any chunk, that stand at different phases, and that are not read at all."""
    rule = CASES[name]
    problem = random_problem(rule, 3, batch=3, time=20)
    lengths = torch.tensor([[9, 3, 0], [6, 12, 10], [0, 1, 6], [5, 4, 4]])
    for form in (recurrent, chunkwise, incremental):
        state, grads, outputs = None, [], [[], [], []]
        start = torch.zeros(3, dtype=torch.int64)
        for length in lengths:
            longest = int(length.max())
            at = (start[:, None] + torch.arange(longest)).clamp_max(19)[:, None, :, None]
            cut = [x.gather(2, at.expand(-1, 2, -1, x.shape[-1])) for x in (problem.q, problem.k, problem.v)]

            def gather(gate, at=at):
                wide = gate[..., None] if gate.dim() == 3 else gate
                picked = wide.gather(2, at.expand(-1, 2, -1, wide.shape[-1]))
                return picked[..., 0] if gate.dim() == 3 else picked

            gates = replace(problem.gates.map(gather), length=length)
            y, state = form(rule, problem.params, *cut, gates, state)
            for row, n in enumerate(length.tolist()):
                outputs[row].append(y[row, :, :n])
            start = start + length
        ys = [torch.cat(pieces, 1) for pieces in outputs]
        held = (x for m in state.matrices for x in (m.weights, *m.sums))
        total = sum(x.square().sum() for x in (*ys, *held))
        grads = torch.autograd.grad(total, problem.leaves, allow_unused=True, materialize_grads=True)
        if form is recurrent:
            expected = [*ys, *state.tensors(), *grads]
            for row in range(3):  # every row by itself, in one call
                piece = problem.between(0, 20)
                q, k, v = (x[row : row + 1] for x in (piece.q, piece.k, piece.v))
                alone, _ = recurrent(rule, piece.params, q, k, v, piece.gates.map(lambda g, r=row: g[r : r + 1]))
                assert error(ys[row], alone[0]) < 1e-10
        else:
            found = [*ys, *state.tensors(), *grads]
            assert max(error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-8


def test_what_is_older_than_the_previous_chunk_is_forgotten():
    """With theta = 1, S and so the step at a chunk's end do not depend on a value two chunks back; without, they do."""
    for horizon, depends in (("chunk", False), (None, True)):
        rule = RULES["atlas-linear"].vary(
            optimiser={"horizon": horizon, "bounded": False},
            bias={"kind": "DotProduct"},
            window={"size": 1, "chunk": 4},
        )
        problem = random_problem(rule, 0, batch=1, time=12)
        gates = replace(problem.gates, theta=torch.ones_like(problem.gates.theta))
        for form in (recurrent, chunkwise, incremental):
            _, before = form(*replace(problem, gates=gates).between(0, 11).arguments())
            _, after = form(*replace(problem, gates=gates).arguments())
            step = problem.gates.alpha[:, :, 11, None, None] * before.weights[0] - after.weights[0]
            (grad,) = torch.autograd.grad(step.square().sum() + step.sum(), problem.v)
            assert (grad[:, :, :4].abs().max() > 1e-9) == depends and grad[:, :, 4:].abs().amin() > 0


SIZES = [(256, 2145, 80), (256, 2145, 32), (64, 256, 48), (48, 300, 40)]


@pytest.mark.parametrize("dtype,allowed", [(torch.float64, 1e-8), (torch.float32, 1e-5)])
@pytest.mark.parametrize("m,f,n", SIZES)
def test_token_space_is_newton_schulz_of_the_matrix(m, f, n, dtype, allowed):
    g = torch.Generator().manual_seed(n)
    a, b = (torch.randn(rows, n, generator=g, dtype=torch.float64) for rows in (m, f))
    if f == 2145:  # real features: all of them have a part in common
        keys = torch.randn(n, 64, generator=g, dtype=torch.float64)
        b = Polynomial(2).expand(keys / keys.norm(dim=-1, keepdim=True)).mT
        a = a * torch.logspace(0, -4, n, dtype=torch.float64)  # as theta has it
    expected = newton_schulz(a @ b.mT)
    a, b = a.to(dtype), b.to(dtype)
    assert error(a @ gram_polynomial((b.mT @ b) @ (a.mT @ a)) @ b.mT, expected) < allowed


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_scale_invariance_in_float32(scale):
    rule = RULES["atlas-linear"].vary(
        optimiser=HORIZON | {"precise": False, "bounded": False},
        bias={"kind": "DotProduct"},
        window={"size": 2, "chunk": 3},
    )
    assert spaces(rule, 16) == [True]
    problem = random_problem(rule, 0, time=10, dim=16, dtype=torch.float32)
    y, end = chunkwise(*problem.arguments())
    scaled, scaled_end = chunkwise(*replace(problem, v=scale * problem.v).arguments())
    assert error(scaled, y) < 1e-5 and error(scaled_end.matrices[0].sums[0] / scale, end.matrices[0].sums[0]) < 1e-5


def test_no_gradient_no_step_and_no_outer_gradient():
    """Printed; a bounded step has a slope of one where S is zero."""
    rule = replace(CASES["mlp"], network=Linear(), bias=DotProduct()).vary(window={"size": 1, "chunk": 1})
    assert spaces(rule, 4) == [True]
    for bounded in (True, False):
        problem = random_problem(rule.vary(optimiser={"bounded": bounded}), 0, time=7)
        v = torch.zeros_like(problem.v).requires_grad_()
        y, _ = chunkwise(*replace(problem, v=v, gates=Gates(problem.gates.eta)).arguments())
        assert error(y, chunkwise(*replace(problem, gates=Gates(0 * problem.gates.eta)).arguments())[0]) < 1e-12
        (grad,) = torch.autograd.grad(y.square().sum(), v)
        assert grad.isfinite().all() and bool(grad.count_nonzero()) is bounded


@pytest.mark.parametrize(
    "dim,degree,expansion,horizon,expected",
    [
        (2, 1, None, None, {"features"}),
        (8, 2, None, None, {"outputs"}),
        (6, 3, None, "chunk", {"outputs"}),
        (8, 2, 4, "chunk", {"tokens", "outputs"}),
        (8, 2, 4, None, {"outputs"}),
    ],
)
def test_every_space_is_taken_where_it_is_cheapest(dim, degree, expansion, horizon, expected, monkeypatch):
    rule = replace(RULES["atlas-linear"], features=Polynomial(degree)).vary(
        optimiser={"horizon": horizon}, window={"size": 2, "chunk": 4}
    )
    if expansion is not None:
        rule = rule.vary(network={"kind": "MLP", "expansion": expansion})
    taken = set()

    def note(module, name, space):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (taken.add(space), function(*args))[1])

    note(muon_steps, "_feature_space", "features")
    note(muon_steps, "_output_space", "outputs")
    note(muon_steps, "_token_space", "tokens")
    problem = random_problem(rule, 1, time=11, dim=dim)
    found = everything(chunkwise, problem)
    assert taken == expected
    gap, where = worst(found, everything(recurrent, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("space", ["features", "outputs", "tokens"])
def test_more_steps_than_are_taken_together(space, every, read):
    """Every group sees as many tokens, and is read by as many queries, as it has to."""
    window, horizon = {"size": 3, "chunk": 20, "read": read}, "chunk" if space == "tokens" else None
    rule = RULES["atlas"].vary(window=window, optimiser={"every": every, "horizon": horizon}, network={"expansion": 2})
    problem = random_problem(rule, 2, time=47, dim=3)
    form = partial(chunkwise, spaces=Spaces(space, together=4))
    gap, where = worst(everything(form, problem), everything(recurrent, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("name,every", [("mlp", 1), ("mlp", 2), ("mlp", 4), ("small", 1), ("small", 5), ("long", 1)])
def test_newton_schulz_runs_as_often_as_the_rule_says(name, every, monkeypatch):
    """Once a matrix, head and sequence after every so many tokens where chunks are read; token by token at every token,
    since rows are at different phases."""
    rule = CASES[name].vary(optimiser={"every": every})
    time = 3 * rule.window.chunk
    counts = {"saturated": 0, "gram_polynomial": 0}
    for module in (muon_steps, sys.modules["atlas_memory.forms.incremental"]):
        for face in counts:
            if (function := getattr(module, face, None)) is not None:

                def counted(matrix, steps, face=face, function=function, **options):
                    counts[face] += matrix.shape[:-2].numel()
                    return function(matrix, steps, **options)

                monkeypatch.setattr(module, face, counted)
    problem: Problem = random_problem(rule, 0, time=time)
    for form in (chunkwise, incremental):
        counts.update(dict.fromkeys(counts, 0))
        form(*problem.arguments())
        times = time if form is incremental else time // every
        assert sum(counts.values()) == 2 * 2 * len(problem.params.initial) * times


@pytest.mark.parametrize("horizon", ["token", 2, True])
def test_other_horizons_are_refused(horizon):
    with pytest.raises(ValueError, match="Muon horizon must be None or 'chunk', got"):
        RULES["atlas"].vary(optimiser={"horizon": horizon})


def test_a_state_with_another_horizon_is_refused():
    problem = random_problem(CASES["small"], 0)
    _, state = chunkwise(*problem.arguments())
    assert all(len(m.sums) == 2 for m in state.matrices)
    problem.rule = problem.rule.vary(optimiser={"horizon": None, "live": False})
    with pytest.raises(ValueError, match="state is of a momentum with another horizon than that of Muon"):
        chunkwise(*problem.arguments(), state)
