"""The delta rule, its gated form and TTT-Linear against public code: flash-linear-attention's plain PyTorch files.

Skipped where that package is not installed (with einops, which its files import): it is not a dependency. Its files are
run one by one, without its package, which needs a GPU's compiler. They work in float32, which is the accuracy here.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from atlas_memory.memory import RULES, Gates, Params, chunkwise, recurrent

from .problems import error, random_problem

BATCH, HEADS, TIME, DIM = 2, 2, 32, 6


def naive(operator):
    """The module ``fla/ops/<operator>/naive.py``."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    pytest.importorskip("einops")
    file = Path(package.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operator}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def matrix_problem(name, chunk):
    """(problem, beta, W_0 ``[batch, heads, in, out]``), float64; the window's gate is 1."""
    problem = random_problem(RULES[name].vary(window={"chunk": chunk}), 0, BATCH, HEADS, TIME, DIM)
    beta = problem.gates.eta
    problem.gates = Gates(beta, problem.gates.alpha)
    initial = problem.params.initial[0].mT.expand(BATCH, -1, -1, -1)
    return problem, beta, initial


def output_and_gradients(y, problem, others=()):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = [problem.q, problem.k, problem.v, problem.gates.eta, *others]
    return [y.detach(), *torch.autograd.grad((y.double() * weight).sum(), leaves)]


@pytest.mark.parametrize("form", [recurrent, chunkwise])
@pytest.mark.parametrize("chunk", [1, 8])
def test_deltanet(form, chunk):
    theirs = naive("delta_rule").delta_rule_recurrence
    problem, beta, initial = matrix_problem("deltanet", chunk)
    expected, end = theirs(problem.q * DIM**0.5, problem.k, problem.v, beta, initial.float())
    y, state = form(*problem.arguments())
    ours, theirs = (output_and_gradients(out, problem) for out in (y, expected))
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    assert error(state.weights[0], end.mT) < 1e-5


@pytest.mark.parametrize("theirs", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
@pytest.mark.parametrize("form", [recurrent, chunkwise])
def test_gated_deltanet(form, theirs):
    theirs = getattr(naive("gated_delta_rule"), theirs)
    problem, beta, initial = matrix_problem("gated-deltanet", 8)
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    rates = {"beta": beta.transpose(1, 2), "g": problem.gates.alpha.log().transpose(1, 2)}
    expected, end = theirs(q, k, v, **rates, scale=1.0, initial_state=initial, output_final_state=True)
    y, state = form(*problem.arguments())
    alpha = [problem.gates.alpha]
    ours, theirs = (output_and_gradients(out, problem, alpha) for out in (y, expected.transpose(1, 2)))
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    assert error(state.weights[0], end.mT) < 1e-5


@pytest.mark.parametrize("form", [recurrent, chunkwise])
def test_ttt_linear(form):
    """Their mini-batch is our chunk. There LN(W k + b) learns v - k, here k + LN(W k + b) learns v: the same step.
    Their writes of a mini-batch all have the rate of the token that reads, so rates are constant in each here."""
    theirs = naive("ttt").chunk_ttt_linear_ref
    rule = RULES["ttt-linear"].vary(window={"chunk": 8}, optimiser={"normalised": False})
    problem = random_problem(rule, 0, BATCH, HEADS, TIME, DIM)
    problem.params = Params(problem.params.initial, None, problem.params.norm)
    eta = 0.05 * problem.gates.eta.detach()[..., ::8].repeat_interleave(8, -1)
    problem.gates = Gates(eta)
    w = problem.params.initial[0].detach().float()
    q, k, v, eta = (x.detach().float().transpose(1, 2) for x in (problem.q, problem.k, problem.v, eta[..., None]))
    expected, end, end_bias = theirs(
        q.clone(),  # they scale it in place
        k,
        v,
        *(n.detach() for n in problem.params.norm),
        eta,
        scale=1.0,
        mini_batch_size=8,
        initial_state=w[..., 1:].mT.expand(BATCH, -1, -1, -1),
        initial_state_bias=w[:, None, :, 0].expand(BATCH, -1, -1, -1),
        output_final_state=True,
    )
    y, state = form(*problem.arguments())
    assert error(state.weights[0][..., 1:], end.mT) < 1e-5
    assert error(state.weights[0][..., 0], end_bias[:, :, 0]) < 1e-5
    # TTT and ours read q + LN(W q + b); their file reads W q + b + LN(W q + b).
    state, bodies = None, []
    for t in range(TIME):
        _, state = form(*problem.between(t, t + 1).arguments(), state)
        w = state.weights[0]
        bodies.append(w[..., 1:] @ problem.q[:, :, t, :, None] + w[..., :1])
    pre_norm = torch.cat(bodies, -1).mT
    assert error(y - problem.q + pre_norm, expected.transpose(1, 2)) < 1e-5
