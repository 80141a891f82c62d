"""On a GPU every rule computes what its definition computes on a CPU: outputs, state and every gradient."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from atlas_memory.memory import RULES, MemoryState, chunkwise, fused_recurrent, recurrent

from ..ops.problems import Problem, everything, random_problem, resized, worst

FORMS = {"chunkwise": chunkwise, "recomputed": partial(chunkwise, recompute=1), "incremental": fused_recurrent}


def on_gpu(problem: Problem) -> Problem:
    """The same problem, with leaves of its own, on the GPU."""

    def move(x: Tensor) -> Tensor:
        return x.detach().cuda().requires_grad_()

    q, k, v = (move(x) for x in (problem.q, problem.k, problem.v))
    return replace(problem, params=problem.params.map(move), q=q, k=k, v=v, gates=problem.gates.map(move))


def from_gpu(form, problem: Problem) -> dict[str, Tensor]:
    """As ``everything``, computed on the GPU; the functional's random numbers are those of the CPU."""

    def moved(*arguments) -> tuple[Tensor, MemoryState]:
        y, end = form(*arguments)
        return y.cpu(), end.map(lambda x: x.cpu())

    return {name: x.cpu() for name, x in everything(moved, problem).items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RULES)
def test_equals_the_definition_on_a_cpu(name, form):
    problem = random_problem(resized(RULES[name], 3, 4), 0, time=11)
    gap, where = worst(from_gpu(FORMS[form], on_gpu(problem)), everything(recurrent, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("name", RULES)
def test_in_float32_at_the_size_of_a_head(name):
    rule = resized(RULES[name], 4, 16)
    exact = random_problem(rule, 1, batch=1, heads=2, time=40, dim=16)
    problem = random_problem(rule, 1, batch=1, heads=2, time=40, dim=16, dtype=torch.float32)
    oracle = everything(chunkwise, exact)
    gap, where = worst(from_gpu(chunkwise, on_gpu(problem)), oracle)
    allowed, _ = worst(everything(chunkwise, problem), oracle)
    assert gap < max(1e-5, 8 * allowed) < math.inf, (where, allowed)


@pytest.mark.parametrize("name", RULES)
def test_training_and_reading_never_wait_for_the_gpu(name):
    """A wait in the loop over chunks would leave the GPU idle while Python catches up."""
    problem = on_gpu(random_problem(resized(RULES[name], 3, 4), 2, time=12, dtype=torch.float32))
    everything_once(problem)
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything_once(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def everything_once(problem: Problem) -> None:
    y, state = chunkwise(*problem.arguments())
    y.sum().backward()
    with torch.no_grad():
        fused_recurrent(*problem.between(0, 2).arguments(), state)
