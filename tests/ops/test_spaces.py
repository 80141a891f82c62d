"""Newton-Schulz in the spaces of the fast form: which is taken, in groups of steps, and how often it runs."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from atlas_memory.memory import RULES, DotProduct, Gates, Linear, Polynomial, chunkwise, fused_recurrent, recurrent
from atlas_memory.ops import muon_steps
from atlas_memory.ops.muon_space import MuonSpace
from atlas_memory.rules.state import initial_state

from .problems import Problem, error, everything, random_problem, worst

CASES = {
    "wide": RULES["atlas"].vary(network={"expansion": 6}, features={"degree": 3}, window={"size": 3, "chunk": 4}),
    "gated": RULES["atlas++"].vary(features={"degree": 3}, window={"size": 2, "chunk": 3}),
    "small": RULES["atlas"].vary(network={"expansion": 1}, window={"size": 4, "chunk": 5}),
}


@pytest.mark.parametrize(
    "dim,degree,expansion,expected",
    [(2, 1, None, {"features"}), (8, 2, None, {"outputs"}), (8, 1, 2, {"features", "outputs"}), (8, 2, 4, {"outputs"})],
)
def test_every_space_is_taken_where_it_is_cheapest(dim, degree, expansion, expected, monkeypatch):
    rule = replace(RULES["atlas-linear"], features=Polynomial(degree)).vary(window={"size": 2, "chunk": 4})
    if expansion is not None:
        rule = rule.vary(network={"kind": "MLP", "expansion": expansion})
    taken, make = set(), muon_steps.MuonSteps.__init__

    def noted(self, *args):
        make(self, *args)
        taken.add("features" if self.in_features else "outputs")

    monkeypatch.setattr(muon_steps.MuonSteps, "__init__", noted)
    problem = random_problem(rule, 1, time=11, dim=dim)
    found = everything(chunkwise, problem)
    assert taken == expected
    gap, where = worst(found, everything(recurrent, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("every", [1, 4])
def test_more_steps_than_are_taken_together(every, read):
    """Every group sees as many tokens, and is read by as many queries, as it has to."""
    window = {"size": 3, "chunk": 20, "read": read}
    rule = RULES["atlas"].vary(window=window, optimiser={"every": every}, network={"expansion": 2})
    problem = random_problem(rule, 2, time=47, dim=3)
    oracle = everything(recurrent, problem)
    for space in ("features", "outputs"):
        form = partial(chunkwise, muon_space=MuonSpace(space, together=4))
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, (where, space)


@pytest.mark.parametrize(
    "name,every", [("wide", 1), ("wide", 2), ("wide", 4), ("small", 1), ("small", 5), ("gated", 3)]
)
def test_newton_schulz_runs_as_often_as_the_rule_says(name, every, monkeypatch):
    """Once a matrix, head and sequence after every so many tokens, in chunks and token by token; where rows stand at
    different places, for all of them when one is due."""
    rule = CASES[name].vary(optimiser={"every": every})
    time = 3 * rule.window.chunk
    counts = {"saturated": 0, "gram_polynomial": 0}
    for module in (muon_steps, sys.modules["atlas_memory.ops.fused_recurrent"]):
        for face in counts:
            if (function := getattr(module, face, None)) is not None:

                def counted(matrix, steps, face=face, function=function, **options):
                    counts[face] += matrix.shape[:-2].numel()
                    return function(matrix, steps, **options)

                monkeypatch.setattr(module, face, counted)
    problem: Problem = random_problem(rule, 0, time=time)
    for form in (chunkwise, fused_recurrent):
        counts.update(dict.fromkeys(counts, 0))
        form(*problem.arguments())
        assert sum(counts.values()) == 2 * 2 * len(problem.params.initial) * (time // every)
    apart = replace(initial_state(rule, problem.params.initial, problem.k), seen=torch.tensor([0, 1]))
    due = sum((t + 1) % every == 0 or (t + 2) % every == 0 for t in range(time))
    counts.update(dict.fromkeys(counts, 0))
    fused_recurrent(*problem.arguments(), apart)
    assert sum(counts.values()) == 2 * 2 * len(problem.params.initial) * due


@pytest.mark.parametrize("normalised", [True, False])
def test_no_gradient_no_step(normalised):
    """Printed, no outer gradient either; a bounded step has a slope of one where S is zero."""
    rule = replace(CASES["wide"], network=Linear(), bias=DotProduct()).vary(window={"size": 1, "chunk": 1})
    problem = random_problem(rule.vary(optimiser={"normalised": normalised}), 0, time=7)
    v = torch.zeros_like(problem.v).requires_grad_()
    for space in ("features", "outputs"):
        form = partial(chunkwise, muon_space=MuonSpace(space))
        y, _ = form(*replace(problem, v=v, gates=Gates(problem.gates.eta)).arguments())
        assert error(y, form(*replace(problem, gates=Gates(0 * problem.gates.eta)).arguments())[0]) < 1e-12
        (grad,) = torch.autograd.grad(y.square().sum(), v)
        assert grad.isfinite().all() and bool(grad.count_nonzero()) is normalised


def test_a_state_with_other_sums_is_refused():
    problem = random_problem(CASES["small"], 0)
    _, state = chunkwise(*problem.arguments())
    assert all(len(m.sums) == 2 for m in state.matrices)
    problem.rule = problem.rule.vary(optimiser={"online": False})
    with pytest.raises(ValueError, match=r"state keeps 2 sums a matrix, where Muon.* keeps 1: it is of another rule"):
        chunkwise(*problem.arguments(), state)


@pytest.mark.parametrize("every", [3, 8])
def test_steps_that_do_not_divide_the_chunk_are_refused(every):
    with pytest.raises(ValueError, match=f"Muon every={every} does not divide the chunk of 4 tokens: take a divisor"):
        RULES["atlas"].vary(window={"chunk": 4}, optimiser={"every": every})
