"""The kernels of the delta rule against ``chunkwise``, and so against the definition: outputs, state and every
gradient."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory import AtlasConfig, AtlasForCausalLM, set_execution
from atlas_memory.memory import (
    RULES,
    Gates,
    Linear,
    MemoryState,
    Params,
    chunkwise,
    initial_state,
    l2_normalise,
    recurrent,
)
from atlas_memory.ops.triton import delta_rule as delta
from atlas_memory.ops.triton import kernel_support as dispatch
from atlas_memory.ops.triton.delta_rule import delta_recurrence

from ..ops.problems import everything, random_problem, worst

NAMES = ("deltanet", "gated-deltanet")
taken = partial(chunkwise, kernels=True)


def rule_of(name, chunk=16, **options):
    return RULES[name].vary(window={"chunk": chunk}, **options)


def kernel(rule, params, q, k, v, gates, state=None):
    """In float64, which ``chunkwise`` gives to no kernel."""
    state = initial_state(rule, params.initial, k) if state is None else state
    return delta_recurrence(rule, q, k, v, gates.complete(q, 1), state, lambda *_: ())


def equal(rule, bound=1e-8, spoil=None, **sizes):
    problem = random_problem(rule, 0, **{"batch": 1, "heads": 2, "time": 21, "dim": 16} | sizes)
    if spoil is not None:
        with torch.no_grad():
            spoil(problem)
    gap, where = worst(everything(kernel, problem), everything(chunkwise, problem))
    assert gap < bound, where


@pytest.mark.parametrize("network", [Linear(), Linear(residual=True)])
@pytest.mark.parametrize("name", NAMES)
def test_equals_chunkwise(name, network):
    equal(rule_of(name, network={"residual": network.residual}), batch=2)


@pytest.mark.parametrize("time,dim,chunk", [(5, 16, 16), (32, 16, 16), (40, 24, 16), (70, 32, 32), (69, 20, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, time, dim, chunk):
    """Fewer tokens than a chunk, whole chunks, widths that are padded, two and four blocks of 16."""
    equal(rule_of(name, chunk), time=time, dim=dim)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_definition(name):
    problem = random_problem(rule_of(name), 1, batch=1, heads=1, time=21, dim=16)
    gap, where = worst(everything(kernel, problem), everything(recurrent, problem))
    assert gap < 1e-8, where


def closed(problem):
    problem.gates.alpha[:, 0, 3] = 0.0
    problem.gates.alpha[:, 1, 17:20] = 1e-3
    problem.gates.eta[:, 0, 7] = 0.0
    problem.gates.gamma[:, 1, 9] = 0.0


def alike(problem):
    problem.k[:] = problem.k[:, :, :1]
    problem.gates.eta[:] = 0.9


@pytest.mark.parametrize("spoil", [closed, alike])
@pytest.mark.parametrize("name", NAMES)
def test_closed_gates_and_equal_keys(name, spoil):
    equal(rule_of(name, 32), spoil=spoil, time=40)


def test_equal_keys_in_float32():
    """Where the triangular system is as far from the identity as it gets."""
    found = []
    for dtype in (torch.float64, torch.float32):
        problem = random_problem(rule_of("gated-deltanet", 64), 0, batch=1, heads=1, time=64, dim=16, dtype=dtype)
        with torch.no_grad():
            alike(problem)
        found.append(everything(taken if dtype == torch.float32 else chunkwise, problem))
    gap, where = worst(found[1], found[0])
    assert gap < 1e-5, where


@pytest.mark.parametrize("name", NAMES)
def test_states_are_carried(name):
    """Into and out of chunks: a memory that the kernels leave is gone on from token by token, and theirs begins where
    another form ended."""
    problem = random_problem(rule_of(name), 2, batch=2, heads=1, time=53, dim=16)

    def in_parts(*arguments):
        whole = problem.between(0, 53)
        assert arguments[2] is problem.q
        state, outputs = None, []
        for form, start, stop in ((chunkwise, 0, 16), (kernel, 16, 43), (chunkwise, 43, 48), (kernel, 48, 53)):
            y, state = form(*whole.between(start, stop).arguments(), state)
            outputs.append(y)
        return torch.cat(outputs, 2), state

    gap, where = worst(everything(in_parts, problem), everything(chunkwise, problem))
    assert gap < 1e-8, where


def in_float32(**sizes):
    options = {"batch": 2, "heads": 2, "time": 37, "dim": 16} | sizes
    return random_problem(rule_of("gated-deltanet"), 3, dtype=torch.float32, **options)


def test_what_is_made_anew_is_what_was_kept():
    problem = in_float32(batch=1, time=20)
    kept, anew = everything(taken, problem), everything(partial(taken, recompute=2), problem)
    assert all(torch.equal(kept[name], anew[name]) for name in kept)


def test_causality_and_rows_are_bitwise():
    problem = in_float32()
    arguments = problem.arguments()
    y, _ = taken(*arguments)
    with torch.no_grad():
        for x in (problem.q, problem.v):
            x[:, :, 20:] = 1e3 * torch.randn_like(x[:, :, 20:])
        problem.k[:, :, 20:] = l2_normalise(torch.randn_like(problem.k[:, :, 20:]))
    assert torch.equal(taken(*arguments)[0][:, :, :20], y[:, :, :20])
    one, _ = taken(*(x if i < 2 else x[:1] for i, x in enumerate(arguments[:5])), problem.gates.map(lambda g: g[:1]))
    assert torch.equal(one, taken(*arguments)[0][:1])


def test_a_broken_token_ends_what_comes_after_it_only():
    problem = in_float32()
    arguments = problem.arguments()
    y, _ = taken(*arguments)
    with torch.no_grad():
        problem.v[0, 0, 20] = torch.nan
    after, state = taken(*arguments)
    assert torch.equal(after[0, 0, :20], y[0, 0, :20]) and torch.equal(after[1], y[1])
    assert after[0, 0, 20:].isnan().all() and state.weights[0][0, 0].isnan().all()


def test_any_strides():
    """Heads after time in memory, as projections make them, and a gradient that is neither."""
    problem = in_float32(batch=1, time=20)
    turned = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in problem.arguments()[2:5]
    ]
    gates, found = problem.gates, []
    weights = torch.randn(1, 20, 16, 2).permute(0, 3, 1, 2)
    for q, k, v in (problem.arguments()[2:5], turned, (turned[0], *problem.arguments()[3:5])):
        y, _ = taken(problem.rule, problem.params, q, k, v, gates)
        found.append([y, *torch.autograd.grad((y * weights).sum(), [q, k, v, gates.eta])])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant):
    problem, found = in_float32(batch=1, time=20), []
    for form in (taken, lambda *call: checkpoint(taken, *call, use_reentrant=reentrant)):
        y, _ = form(*problem.arguments())
        y.square().sum().backward()
        found.append([x.grad for x in (problem.q, problem.k, problem.v, problem.gates.eta)])
        for x in problem.leaves:
            x.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_groups_of_chunks():
    """Of which a long sequence is read one after the other where no gradient is wanted."""
    problem = in_float32(batch=1, time=85)
    y, state = taken(*problem.arguments())
    delta.GROUP, before = 2, delta.GROUP
    try:
        with torch.no_grad():
            parts, after = taken(*problem.arguments())
    finally:
        delta.GROUP = before
    torch.testing.assert_close(parts, y, rtol=1e-5, atol=1e-6)
    for a, b in zip(after.tensors(), state.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", ["all", "k", "turned"])
def test_gradients_of_gradients(wanted):
    """Are PyTorch's, also where the kernels copy what is not laid out as they want it."""
    problem = in_float32(time=20)
    if wanted == "turned":
        problem.k = problem.k.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    leaves = [problem.k] if wanted == "k" else [problem.q, problem.k, problem.v, problem.gates.eta, problem.gates.alpha]

    def second(**how) -> tuple[Tensor, ...]:
        y, state = chunkwise(*problem.arguments(), **how)
        loss = y.square().sum() + state.weights[0].square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for ours, plain in zip(second(kernels=True), second(kernels=False), strict=True):
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


def test_only_what_is_asked_for_has_a_gradient():
    problem = in_float32(time=20)
    params = Params(tuple(x.detach() for x in problem.params.initial))
    q, k, v = (x.detach() for x in problem.arguments()[2:5])
    eta = problem.gates.eta.detach().requires_grad_()
    y, state = taken(problem.rule, params, q, k, v, Gates(eta))
    assert isinstance(state, MemoryState)
    (grad,) = torch.autograd.grad(y.sum(), eta)
    (plain,) = torch.autograd.grad(chunkwise(problem.rule, params, q, k, v, Gates(eta))[0].sum(), eta)
    torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-5)


def test_a_model_learns_the_same(monkeypatch):
    """With the kernels of its memories and convolutions, as it is, under checkpointing and recomputation."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    model = AtlasForCausalLM(AtlasConfig(vocab_size=20, rule="gated-deltanet", **sizes)).train()
    ids, found = torch.randint(20, (1, 40)), []
    for switch, change in (
        ("0", lambda: None),
        ("1", lambda: None),
        ("1", model.gradient_checkpointing_enable),
        ("1", lambda: (model.gradient_checkpointing_disable(), set_execution(model, recompute=1))),
    ):
        monkeypatch.setenv(dispatch.SWITCH, switch)
        change()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for other in found[1:]:
        assert (other - found[0]).norm() <= 1e-5 * found[0].norm()
