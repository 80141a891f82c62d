"""A choice that no form knows of is computed from its own methods in all of them: see CONTRIBUTING.md."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from atlas_memory.memory import RULES, Momentum, chunkwise, fused_recurrent, recurrent
from atlas_memory.rules.gates import rows
from atlas_memory.rules.retention import LinearRetention, NewMatrix, decayed
from atlas_memory.rules.step import InnerOptimiser

from .problems import error, everything, random_problem, resized, worst


@dataclass(frozen=True)
class SignMomentum(InnerOptimiser):
    """S_t = theta_t S_{t-1} + g_t;  W_t = alpha_t W_{t-1} - s_t sign(S_t)."""

    normalised: bool = True
    online: bool = True
    has_momentum = True

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g
        return (s,), rows(at.apply, s.sign())


def test_its_momentum_is_read():
    problem = random_problem(replace(RULES["titans"], optimiser=SignMomentum()), 0)
    others = replace(problem.gates, theta=0.5 * problem.gates.theta)
    y, _ = recurrent(*replace(problem, gates=others).arguments())
    assert 1e-3 < error(y, recurrent(*problem.arguments())[0]) < math.inf


@dataclass(frozen=True)
class Heavier(Momentum):
    """A kind that inherits from one the fast form knows, and does something else."""

    def step(self, sums, weights, g, at):
        sums, step = super().step(sums, weights, g, at)
        return sums, step + 0.5 * sums[0]


@dataclass(frozen=True)
class Rounded(LinearRetention):
    """alpha W - step, every other entry of it kept as it was."""

    gated = True

    def decay_target(self, initial):
        return None, None

    def keep(self, old, step, alpha, first, last):
        new = decayed(alpha, old.weights, None) - step
        kept = torch.where(torch.arange(new.shape[-1]) % 2 == 0, new, old.weights)
        return NewMatrix(kept, kept, None)


@pytest.mark.parametrize("part", [SignMomentum(), Heavier()], ids=lambda part: type(part).__name__)
@pytest.mark.parametrize("name", ["titans", "omeganet", "memora", "dot", "tnt", "atlas++"])
def test_an_optimiser_of_which_only_the_step_is_known(name, part):
    if name == "dot" and isinstance(part, SignMomentum):  # whose memory has no entries that could have a sign
        with pytest.raises(ValueError, match="SignMomentum reads the entries"):
            replace(RULES[name], optimiser=part)
        return
    rule = resized(replace(RULES[name], optimiser=part), 3, 4)
    problem = random_problem(rule, 0, time=13)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, where
    plain = random_problem(replace(rule, optimiser=Momentum()), 0, time=13)
    assert 1e-3 < error(recurrent(*plain.arguments())[0], oracle["y"]) < math.inf  # not silently something else


@dataclass(frozen=True)
class SumOfDirections(SignMomentum):
    """Orthogonalises every gradient on its way into S, also where no step is due."""

    every: int | None = 2

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + at.orthogonalise(g, 3)
        return (s,), rows(at.apply, s)


def test_directions_between_steps():
    problem = random_problem(resized(replace(RULES["titans"], optimiser=SumOfDirections()), 1, 4), 0, time=13)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, where


@pytest.mark.parametrize("recompute", [None, 1])
def test_a_retention_of_which_only_keep_is_known(recompute):
    rule = resized(replace(RULES["omeganet"], retention=Rounded()), 3, 4)
    problem = random_problem(rule, 0, time=13)
    oracle = everything(recurrent, problem)

    def form(*arguments):
        return chunkwise(*arguments, recompute=recompute)

    gap, where = worst(everything(form, problem), oracle)
    assert gap < 1e-8, where
    whole, state, pieces = oracle["y"], None, []
    for start, stop in ((0, 5), (5, 6), (6, 13)):  # a state carried from one form to the next
        y, state = (chunkwise, fused_recurrent, recurrent)[stop % 3](*problem.between(start, stop).arguments(), state)
        pieces.append(y)
    assert error(torch.cat(pieces, 2), whole) < 1e-10


@dataclass(frozen=True)
class Reset(SignMomentum):
    """Forgets its momentum at every chunk's end; that there is a ``end_chunk`` is known without being said."""

    def end_chunk(self, sums):
        return tuple(map(torch.zeros_like, sums))


def test_a_turn_is_made_by_every_form():
    assert Reset.ends_chunk and not SignMomentum.ends_chunk
    problem = random_problem(replace(RULES["titans"], optimiser=Reset()), 0, time=35)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, where
