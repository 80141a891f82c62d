"""Calls recorded as CUDA graphs compute what they compute without, in whatever order they come."""

import copy
import warnings

import pytest
import torch
from torch.testing import assert_close

from atlas_memory import NeuralMemory, OmegaMemory, set_execution
from atlas_memory.memory import RULES
from atlas_memory.ops.cuda_graphs import CALLS

from ..models.conftest import MODELS
from .test_models import learned, tokens


@pytest.fixture(autouse=True)
def _no_warning():
    """Such as one that says that a memory could not be recorded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "graphed")
        yield


def layer(rule: str) -> tuple[NeuralMemory, NeuralMemory]:
    """A layer, and the same with its calls recorded."""
    torch.manual_seed(0)
    size = min(3, RULES[rule].window.size)
    plain = NeuralMemory(32, 2, rule, window=size, chunk_size=4).double().cuda()
    graphed = copy.deepcopy(plain)
    set_execution(graphed, graphed=True)
    return plain, graphed


def both(layers, x: torch.Tensor, state=None) -> list[torch.Tensor]:
    """Outputs, states and gradients of the two layers, one pair after the other."""
    found = []
    for each in layers:
        each.zero_grad()
        given = x.clone().requires_grad_()
        y, after = each(given, state)
        (y.square().sum() + sum(t.square().sum() for t in after.tensors() if t.requires_grad)).backward()
        found.append([y, *after.tensors(), given.grad, *(p.grad for p in each.parameters())])
    return list(zip(*found, strict=True))


def recordings(module) -> int:
    return sum(
        r is not None for m in module.modules() if getattr(m, "graphs", None) for r in m.graphs.recordings.values()
    )


@pytest.mark.parametrize("rule", [name for name in RULES if not RULES[name].features.infinite])
def test_equals_the_same_layer_without(rule):
    layers = layer(rule)
    for seed in range(CALLS + 3):
        x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()
        for a, b in both(layers, x):
            assert_close(b, a, rtol=1e-9, atol=1e-11)
    assert recordings(layers[1]) == 1


def test_states_are_carried():
    """From a recorded call to the next, in blocks and token by token; earlier states and outputs stay as they were."""
    layers = layer("atlas")
    for seed in range(CALLS + 2):
        x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()
        ends = []
        for each in layers:
            state, kept = None, []
            with torch.no_grad():
                for part in x.split([8, 8, 1, 1, 1, 1, 2, 2], 1):
                    y, state = each(part, state)
                    kept += [y, *state.tensors()]
            ends.append(kept)
        for a, b in zip(*ends, strict=True):
            assert_close(b, a, rtol=1e-9, atol=1e-11)
    assert recordings(layers[1]) == 4  # a fresh one, a state read on, a token, two tokens


def test_two_calls_before_a_backward_pass():
    plain, graphed = layer("titans")
    x = torch.randn(2, 11, 32, dtype=torch.float64).cuda()
    for _ in range(CALLS + 1):
        both((plain, graphed), x)
    for each in (plain, graphed):
        each.zero_grad()
        first, second = each(x)[0], each(2 * x)[0]
        (first.square().sum() * 3).backward()
        second.square().sum().backward()
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-11)


def test_gradients_add_up_over_calls():
    plain, graphed = layer("omeganet")
    for each in (plain, graphed):
        for seed in range(CALLS + 4):
            x = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()
            each(x)[0].square().sum().backward()
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-11)


def test_a_call_without_its_backward_pass_keeps_nothing_up():
    _, graphed = layer("titans")
    x = torch.randn(2, 11, 32, dtype=torch.float64).cuda()
    for _ in range(CALLS + 2):
        graphed(x)
    (recording,) = graphed.memory.graphs.recordings.values()
    assert recording.calls == 2 and not recording.pending


def test_a_second_backward_pass_is_refused():
    _, graphed = layer("titans")
    x = torch.randn(2, 11, 32, dtype=torch.float64).cuda()
    for _ in range(CALLS + 1):
        loss = graphed(x)[0].sum()
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through one call"):
        loss.backward()


def test_under_checkpointing(make):
    model = make("lmm").double().cuda().train()
    graphed = copy.deepcopy(model)
    set_execution(graphed, graphed=True)
    graphed.gradient_checkpointing_enable()
    for seed in range(CALLS + 2):
        ids = (tokens() + seed).remainder(29).cuda()
        for a, b in zip(learned(graphed, ids), learned(model, ids), strict=True):
            assert (a - b).norm() <= 1e-8 * max(1.0, b.norm())
    assert not recordings(graphed)


@pytest.mark.parametrize("options", [{}, {"recompute": 1}, {"compiled": True}])
@pytest.mark.parametrize("name", ["lmm", "mag", "mac-persistent", "hierarchy"])
def test_models(make, name, options):
    model = make(**MODELS[name]).double().cuda()
    graphed = copy.deepcopy(model)
    set_execution(graphed, graphed=True, **options)
    for seed in range(CALLS + 3):
        ids = (tokens() + seed).remainder(29).cuda()
        for a, b in zip(learned(graphed, ids), learned(model, ids), strict=True):
            assert (a - b).norm() <= 1e-8 * max(1.0, b.norm())
    assert recordings(graphed)
    told = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(graphed.generate(tokens().cuda(), **told), model.generate(tokens().cuda(), **told))


def test_the_backward_pass_is_not_recorded_under_autocast():
    """A memory computes in float32 under autocast, and so does its backward pass, which runs outside of autocast."""
    torch.manual_seed(0)
    plain = OmegaMemory(32, 2, "titans", chunk_size=16).cuda()
    graphed = copy.deepcopy(plain)
    set_execution(graphed, graphed=True)
    for seed in range(CALLS + 2):
        draw = torch.Generator().manual_seed(seed)
        qkv = [torch.randn(2, 2, 40, 32, generator=draw).cuda() for _ in "qkv"]
        found = []
        for memory in (plain, graphed):
            given = [x.clone().requires_grad_() for x in qkv]
            with torch.autocast("cuda", torch.bfloat16):
                y, _ = memory(*given)
            y.square().sum().backward()
            found.append([x.grad for x in given])
        for a, b in zip(*found, strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()
    assert recordings(graphed)


def test_training_in_bfloat16(make):
    model = make("lmm", initializer_range=0.05).cuda().train()
    losses = []
    for each in (model, copy.deepcopy(model)):
        set_execution(each, graphed=each is not model)
        optimiser, found = torch.optim.AdamW(each.parameters(), lr=3e-3, fused=True), []
        for step in range(30):
            ids = (tokens(4, 32) + step % 3).remainder(29).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = each(ids, labels=ids).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert_close(losses[0], losses[1], rtol=0.02, atol=0.02)
