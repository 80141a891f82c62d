"""Three forms, one function: chunkwise and incremental against the recurrence, forward, state and every gradient."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from atlas_memory.memory import (
    KINDS,
    L2,
    MLP,
    RULES,
    Decay,
    DeltaGradientDescent,
    DotProduct,
    ElasticNet,
    Exponential,
    GatedMLP,
    Gates,
    GradientDescent,
    Huber,
    Identity,
    Keep,
    Linear,
    Lp,
    Momentum,
    Muon,
    Polynomial,
    RobustL2,
    Rule,
    Softmax,
    Window,
    chunkwise,
    fused_recurrent,
    recurrent,
)
from atlas_memory.ops import fast_weight
from atlas_memory.ops import triangular as online
from atlas_memory.ops.muon_space import MuonSpace
from atlas_memory.rules.retention import LqNorm, RowNorm

from .problems import Problem, error, everything, nudged, random_problem, resized, worst

FORMS = {"chunkwise": chunkwise, "recomputed": partial(chunkwise, recompute=1), "incremental": fused_recurrent}
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}

endings = {"residual": st.booleans(), "norm": st.booleans()}
activations = st.sampled_from(["gelu", "silu"])
windows = {"chunk": st.integers(1, 8), "read": st.sampled_from(["after", "after", "before", "frozen"])}
axes = {
    "features": st.one_of(
        st.just(Identity()),
        st.builds(Polynomial, st.integers(1, 3)),
        st.builds(Exponential, st.one_of(st.none(), st.integers(1, 9))),
    ),
    "network": st.one_of(
        st.builds(Linear, **endings),
        st.builds(
            MLP,
            depth=st.integers(1, 3),
            expansion=st.integers(1, 3),
            bias=st.booleans(),
            activation=activations,
            **endings,
        ),
        st.builds(GatedMLP, expansion=st.integers(1, 2), activation=activations, **endings),
    ),
    "bias": st.one_of(
        st.sampled_from([L2(), L2(0.5), DotProduct(), RobustL2()]),
        st.builds(Lp, st.sampled_from([1.0, 1.5, 2.0, 3.0])),
        st.builds(Huber, st.sampled_from(["coordinates", "norm", "mixture"])),
        st.builds(Huber, st.just("mixture"), st.sampled_from([0.3, 1.0])),
    ),
    "retention": st.one_of(
        st.sampled_from([Decay(), Decay(to_initial=True), Keep()]),
        st.sampled_from([kind() for kind in KINDS["retention"]] + [Softmax(lag=False), ElasticNet(local=False)]),
    ),
    "optimiser": st.one_of(
        st.sampled_from([GradientDescent(), Momentum(), DeltaGradientDescent(), DeltaGradientDescent(True, True)]),
        st.builds(
            Muon,
            steps=st.integers(1, 5),
            limit=st.sampled_from([0.25, 1.0]),
            read_pending=st.booleans(),
        ),
    ),
    "window": st.one_of(
        st.builds(Window, size=st.just(1), **windows), st.builds(Window, size=st.integers(1, 9), **windows)
    ),
}


@st.composite
def rules(draw) -> Rule:
    """Any combination that ``Rule`` accepts; Muon steps after any number of tokens that divides the chunk."""
    parts = {name: draw(axis) for name, axis in axes.items()}
    if isinstance(parts["optimiser"], Muon):
        chunk = parts["window"].chunk
        every = draw(st.sampled_from([None, *(n for n in range(1, chunk + 1) if chunk % n == 0)]))
        parts["optimiser"] = replace(parts["optimiser"], every=every)
    try:
        return Rule(**parts)
    except ValueError:
        reject()


# Ill-conditioned, found in a long search: half a unit in the last place of q, k and v moves the definition by 4e-7, and
# by 4e-8.
@example(
    rule=Rule(
        features=Identity(),
        network=MLP(depth=1, expansion=3, activation="silu"),
        bias=Lp(1.5),
        retention=LqNorm(q=4.0),
        optimiser=Momentum(normalised=True, online=True),
        window=Window(size=9, chunk=1),
    ),
    **dict(seed=3258, batch=1, heads=2, time=15, dim=3, channels=True, eigenvalues=False, block=128, recompute=None),
)
@example(
    rule=Rule(
        features=Polynomial(degree=3),
        network=GatedMLP(norm=True, expansion=2, activation="gelu"),
        bias=Huber("mixture", 0.3),
        retention=Softmax(lag=False),
        optimiser=Muon(steps=1, every=1),
        window=Window(size=1, chunk=5),
    ),
    **dict(seed=1, batch=2, heads=2, time=16, dim=1, channels=False, eigenvalues=True, block=20, recompute=None),
)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    rule=rules(),
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    time=st.integers(0, 19),
    dim=st.integers(1, 5),
    channels=st.booleans(),
    eigenvalues=st.booleans(),
    block=st.sampled_from([1, 6, 20, online.BLOCK]),
    recompute=st.sampled_from([None, 1, 2]),
)
def test_forms_agree_on_any_rule(rule, seed, batch, heads, time, dim, channels, eigenvalues, block, recompute):
    channels = channels and not isinstance(rule.optimiser, Muon)
    # A layer norm of two numbers is their order, a row of one number under RowNorm and a matrix of one number under
    # Newton-Schulz their signs: gradients are zero, and what is computed of them rounding.
    signs = isinstance(rule.retention, RowNorm) or isinstance(rule.optimiser, Muon)
    dim = dim + 2 * rule.network.norm + signs
    problem = random_problem(rule, seed, batch, heads, time, dim, channels=channels)
    oracle = everything(recurrent, problem)
    chunks = partial(chunkwise, muon_space=MuonSpace(eigenvalues=eigenvalues), recompute=recompute)
    for name, form in {"chunkwise": chunks, "incremental": fused_recurrent}.items():
        with patch.object(online, "BLOCK", block):
            gap, where = worst(everything(form, problem), oracle)
        # A memory on phi* is zero at first, and a layer norm of zero is so steep that one ulp of k moves the definition
        # itself by 1e-9.
        allowed = 1e-6 if rule.network.norm and isinstance(rule.features, Exponential) else 1e-8
        if gap >= allowed:
            # Ill-conditioned problems are left out by this rule: the definition does not tell more of a result than how
            # far it moves itself, where q, k and v move by half a unit in their last place.
            moved = max(worst(everything(recurrent, nudged(problem, draw)), oracle)[0] for draw in range(8))
            assert moved < math.inf
            allowed = max(allowed, 3.0 * moved)
        assert gap < allowed, f"{name}: {where} is off by {gap:.1e}"


@pytest.mark.parametrize("every", [1, 2, None])
@pytest.mark.parametrize("name", ["atlas", "atlas++", "atlas-linear", "lact"])
def test_forms_agree_on_printed_muon(name, every):
    rule = RULES[name].vary(optimiser={"every": every, "normalised": False}, window={"chunk": 4})
    problem = random_problem(rule, 1, time=11)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, where


# Once each: "atlas-c1" with a window of the size of that of "atlas" is "atlas".
NAMES = [*{resized(rule, 3, 4): name for name, rule in reversed(RULES.items())}.values()][::-1]
SHAPES = [(1, 4, 3, 4), (3, 5, 6, 4), (17, 4, 2, 8), (18, 3, 9, 5), (6, 8, 1, 1)]  # time, dim, c, b


@pytest.mark.parametrize("name", NAMES)
def test_forms_agree_on_the_named_rules(name):
    """In float64 with the definition. In float32 too, but where a layer norm of a few small numbers is ill-conditioned:
    the definition itself is off by up to 7% in its smallest gradients there. It and the forms are held against float64
    then, and no form may be much worse than the definition. What is recomputed in float32 is held in
    tests/layers/test_execution.py."""
    for seed, (time, dim, size, chunk) in enumerate(SHAPES):
        rule, oracles = resized(RULES[name], size, chunk), {}
        for dtype, allowed in TOLERANCE.items():
            problem = random_problem(rule, seed, time=time, dim=dim, dtype=dtype)
            oracle = oracles[dtype] = everything(recurrent, problem)
            if rule.network.norm and dtype == torch.float32:
                oracle = oracles[torch.float64]
                allowed += 10 * worst(oracles[dtype], oracle)[0]
                assert allowed < math.inf
            for form, compute in FORMS.items():
                if (form, dtype) == ("recomputed", torch.float32):
                    continue
                gap, where = worst(everything(compute, problem), oracle)
                at = f"{time=} {dim=} c={size} b={chunk} {dtype}"
                assert gap < allowed, f"{form}: {where} is off by {gap:.1e} at {at}"


def with_channels(names: list[str]) -> list[tuple[str, bool]]:
    """Each with gates of heads, and with gates of channels where its optimiser mixes no rows."""
    return [(name, many) for name in names for many in (False, True) if not (many and RULES[name].optimiser.mixes_rows)]


LIVE = [name for name in NAMES if RULES[name].online and RULES[name].window.size > 1]


@pytest.mark.parametrize("name,channels", with_channels(LIVE))
def test_errors_of_windows_in_blocks(monkeypatch, name, channels):
    """The last block of the chunk is a short one with 7 and 24 pairs a block (2 and 8 tokens)."""
    rule = resized(RULES[name], 3, 13)
    problem = random_problem(rule, 4, time=31, channels=channels)
    oracle = everything(recurrent, problem)
    for block in (1, 7, 24):
        monkeypatch.setattr(online, "BLOCK", block)
        gap, where = worst(everything(chunkwise, problem), oracle)
        assert gap < 1e-8, (where, block)


@pytest.mark.extended
@pytest.mark.parametrize("name,channels", with_channels(NAMES))
def test_large_memories(monkeypatch, name, channels):
    """As if the matrices were so large that gradients of our own pay, of products and of what fading leaves."""
    monkeypatch.setattr(fast_weight, "LARGE", 0)
    rule = resized(RULES[name], 2, 5)
    problem = random_problem(rule, 5, time=14, channels=channels)
    gap, where = worst(everything(chunkwise, problem), everything(recurrent, problem))
    assert gap < 1e-8, where


@pytest.mark.parametrize("every", [1, 2, 4, 8])
def test_muon_every_r_tokens(every):
    rule = RULES["atlas"].vary(optimiser={"every": every}, window={"size": 3, "chunk": 8})
    problem = random_problem(rule, 3, time=21)
    oracle = everything(recurrent, problem)
    for eigenvalues in (False, True):
        form = partial(chunkwise, muon_space=MuonSpace(eigenvalues=eigenvalues))
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, (where, eigenvalues)


@pytest.mark.parametrize("name", NAMES)
def test_any_split_into_calls_gives_the_whole(name):
    rule = resized(RULES[name], 4, 5)
    problem = random_problem(rule, 0, batch=1, time=16)
    with torch.no_grad():
        whole, end = recurrent(*problem.arguments())
    cuts = ([5], [1, 2, 10], [7], [0, 15, 16])  # at a chunk's end, within chunks, at both ends
    for form, at in [*product((chunkwise, fused_recurrent), cuts), (recurrent, [0, 1, 5, 7, 15, 16])]:
        state, pieces = None, []
        with torch.set_grad_enabled(form is not recurrent):
            for start, stop in pairwise([0, *at, 16]):
                y, state = form(*problem.between(start, stop).arguments(), state)
                pieces.append(y)
        assert error(torch.cat(pieces, 2), whole) < 1e-10
        assert max(error(a, b) for a, b in zip(state.tensors(), end.tensors(), strict=True)) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_a_carried_state(name):
    rule = resized(RULES[name], 3, 4)
    problem = random_problem(rule, 5, time=11)
    grads = []
    for form in (recurrent, chunkwise):
        _, state = form(*problem.between(0, 6).arguments())
        y, _ = form(*problem.between(6, 11).arguments(), state)
        grads.append(torch.autograd.grad(y.square().sum(), problem.leaves, allow_unused=True, materialize_grads=True))
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-8


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_different_length_and_phase(name):
    """A ragged batch, then a second ragged call from rows at different phases, equals every row alone."""
    rule = resized(RULES[name], 3, 4)
    first, second = random_problem(rule, 1, batch=3, time=9), random_problem(rule, 2, batch=3, time=7)
    lengths = torch.tensor([9, 3, 0]), torch.tensor([2, 7, 5])
    calls = [*zip((first, replace(second, params=first.params)), lengths, strict=True)]
    alone = [read_alone(calls, row) for row in range(3)]
    for form in (recurrent, chunkwise, fused_recurrent):
        state, outputs = None, []
        for problem, length in calls:
            gates = replace(problem.gates, length=length)
            y, state = form(*replace(problem, gates=gates).arguments(), state)
            outputs.append(y)
        for row, (answers, end) in enumerate(alone):
            for y, answer in zip(outputs, answers, strict=True):
                assert error(y[row : row + 1, :, : answer.shape[2]], answer) < 1e-10
            for a, b in zip(state.tensors(), end.tensors(), strict=True):
                a = a[row : row + 1]
                if isinstance(rule.features, Exponential):  # a column for each token of the longest row
                    a = latest_columns(a, b)
                assert error(a, b) < 1e-10


@torch.no_grad()
def read_alone(calls: list[tuple[Problem, torch.Tensor]], row: int):
    """What the definition answers to one row of each call, and the state it ends with."""
    answers, state = [], None
    for problem, length in calls:
        rule, params, *qkv, gates = problem.between(0, int(length[row])).arguments()
        qkv = [x[row : row + 1] for x in qkv]
        y, state = recurrent(rule, params, *qkv, gates.map(lambda g: g[row : row + 1]), state)
        answers.append(y)
    return answers, state


def latest_columns(a, b, dim=4):
    """As many keys of a as b has, or columns: those of M_0, and the latest of the others, the rest being zero."""
    if a.dim() == 1:
        return a
    a, more = a[:, :, a.shape[2] - b.shape[2] :], a.shape[-1] - b.shape[-1]
    assert not a[..., dim : dim + more].any()
    return torch.cat([a[..., :dim], a[..., dim + more :]], -1)


@pytest.mark.parametrize("form", [recurrent, chunkwise, fused_recurrent])
def test_inference_mode_gives_the_same_numbers(form):
    problem = random_problem(RULES["atlas"].vary(window={"size": 2, "chunk": 4}), 0, time=9)
    y, end = form(*problem.arguments())
    with torch.inference_mode():
        y2, end2 = form(*problem.arguments())
        y3, _ = form(*problem.between(0, 5).arguments(), end2)
    assert torch.equal(y, y2) and all(torch.equal(a, b) for a, b in zip(end.tensors(), end2.tensors(), strict=True))
    assert y3.isfinite().all()


@pytest.mark.parametrize("form", [recurrent, chunkwise, fused_recurrent])
def test_closed_gates_and_gates_left_out(form):
    """alpha = theta = 0 and hard gamma are exact, with gradients; gates that are None mean 1, 0 and 1."""
    rule = RULES["atlas"].vary(window={"size": 2, "chunk": 4})
    problem = random_problem(rule, 0, time=9)
    zero = torch.zeros_like(problem.gates.alpha).requires_grad_()
    hard = problem.gates.gamma.detach().round().requires_grad_()
    closed = replace(problem, gates=Gates(problem.gates.eta, zero, zero.clone(), hard))
    found = everything(form, closed)
    assert all(x.isfinite().all() for x in found.values())
    if form is not recurrent:
        gap, where = worst(found, everything(recurrent, closed))
        assert gap < 1e-8, where
    ones = torch.ones_like(zero)
    y, _ = form(*replace(problem, gates=Gates(problem.gates.eta)).arguments())
    y2, _ = form(*replace(problem, gates=Gates(problem.gates.eta, ones, zero, torch.ones_like(hard))).arguments())
    assert torch.equal(y, y2)


@pytest.mark.parametrize("form", [recurrent, chunkwise])
def test_gradcheck(form):
    rule = RULES["atlas"].vary(window={"size": 2, "chunk": 3}, network={"expansion": 1})
    problem = random_problem(rule, 0, batch=1, heads=1, time=4, dim=2)

    def outputs(q, k, v, eta, alpha, theta, gamma, *rest):
        y, end = form(
            rule,
            replace(problem.params, initial=rest[:-1], sqrt_a=rest[-1]),
            q,
            k,
            v,
            Gates(eta, alpha, theta, gamma),
        )
        return y, *end.weights

    assert torch.autograd.gradcheck(outputs, tuple(problem.leaves), atol=1e-5, rtol=1e-4)


def test_wrong_shapes_are_named():
    problem = random_problem(RULES["omeganet"], 0)
    rule, params, q, k, v, gates = problem.arguments()
    with pytest.raises(ValueError, match="k must have the shape of q"):
        chunkwise(rule, params, q, k[..., :2], v, gates)
    with pytest.raises(ValueError, match=r"q must be \[batch, heads, time, dim\]"):
        chunkwise(rule, params, q[0], k[0], v[0], gates)
    with pytest.raises(ValueError, match="v must have the dtype of q"):
        chunkwise(rule, params, q, k, v.float(), gates)
    with pytest.raises(ValueError, match="gate gamma must have shape"):
        chunkwise(rule.vary(window={"size": 3}), params, q, k, v, gates)
    with pytest.raises(ValueError, match="gate eta must have shape"):
        chunkwise(rule, params, q, k, v, replace(gates, eta=gates.eta[:, :1]))
    for name, value, message in (
        ("eta", -0.1, r"gate eta must be at least 0, got -0\.1 to -0\.1: torch\.sigmoid\(x\) makes it of any x"),
        ("alpha", 1.5, r"gate alpha must be from 0 to 1, got 1\.5 to 1\.5: torch\.sigmoid\(x\) makes it of any x"),
        ("theta", -0.1, "gate theta must be from 0 to 1"),
        ("delta", -1.0, "gate delta must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            chunkwise(rule, params, q, k, v, replace(gates, **{name: torch.full_like(gates.eta, value)}))
    with pytest.raises(ValueError, match=r"params\.initial must have shapes"):
        chunkwise(RULES["titans"], params, q, k, v, Gates(gates.eta))
    for form in (recurrent, chunkwise, fused_recurrent):
        with pytest.raises(ValueError, match="gate alpha must have shape"):
            form(rule, params, q, k, v, replace(gates, alpha=gates.eta.transpose(1, 2)))
        for length in ([-1, 5], [5, 99]):
            with pytest.raises(ValueError, match=r"gates\.length must be .* from 0 to time="):
                form(rule, params, q, k, v, replace(gates, length=torch.tensor(length)))
        for length in (torch.ones(2), [5, 5]):
            with pytest.raises(ValueError, match=r"gates\.length must be 2 int64 numbers from 0 to time="):
                form(rule, params, q, k, v, replace(gates, length=length))
        with pytest.raises(ValueError, match="state must be the MemoryState that an earlier call returned, got a list"):
            form(rule, params, q, k, v, gates, [])
        with pytest.raises(ValueError, match=r"k must be a tensor .*, got a float"):
            form(rule, params, q, 1.0, v, gates)
        for eta, got in ((0.5, "0.5"), (gates.eta > 0, "torch.bool")):
            with pytest.raises(ValueError, match=rf"gate eta must have shape \[2, .*got {got}"):
                form(rule, params, q, k, v, Gates(eta))
    _, state = chunkwise(rule, params, q, k, v, gates)
    with pytest.raises(ValueError, match="state carries 7 window tokens"):
        chunkwise(rule.vary(window={"size": 3}), params, q, k, v, replace(gates, gamma=None), state)
    with pytest.raises(ValueError, match="state keeps 0 sums a matrix, where Muon"):
        chunkwise(replace(rule, optimiser=Muon()), params, q, k, v, gates, state)
    with pytest.raises(ValueError, match="another rule, batch or width"):
        chunkwise(rule, params, q[:1], k[:1], v[:1], gates.map(lambda g: g[:1]), state)
