"""Models on a GPU say what they say on a CPU: losses, gradients, decoding, padding, and training."""

import copy

import pytest
import torch

from atlas_memory import set_execution

from ..models.conftest import MODELS


def tokens(rows: int = 2, time: int = 13) -> torch.Tensor:
    return torch.randint(29, (rows, time), generator=torch.Generator().manual_seed(0))


def learned(model, ids: torch.Tensor, **options) -> list[torch.Tensor]:
    """Logits, a loss and every gradient, on the CPU."""
    model.zero_grad()
    logits = model(ids, **options).logits
    loss = logits[:, 5:].log_softmax(-1).gather(-1, ids[:, 5:, None]).mean()
    loss.backward()
    found = [logits[:, 5:], loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [x.detach().double().cpu() for x in found]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_the_same(make, name):
    model = make(**MODELS[name]).double()
    there = copy.deepcopy(model).cuda()
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    for options in ({}, {"attention_mask": mask}):
        here = learned(model, tokens(), **options)
        gpu = learned(there, tokens().cuda(), **{k: v.cuda() for k, v in options.items()})
        for a, b in zip(gpu, here, strict=True):
            assert (a - b).norm() <= 1e-7 * max(1.0, b.norm()), name


@pytest.mark.parametrize("name", MODELS)
def test_a_model_generates_the_same(make, name):
    model = make(**MODELS[name]).double()
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    here = model.generate(tokens(), **options)
    there = copy.deepcopy(model).cuda().generate(tokens().cuda(), **options)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_by_autocast(make, name):
    model = make(**MODELS[name], initializer_range=0.05).cuda()
    exact = learned(model, tokens().cuda())
    with torch.autocast("cuda", torch.bfloat16):
        rough = learned(model, tokens().cuda())
    assert all(x.isfinite().all() for x in rough)
    assert (rough[1] - exact[1]).abs() < 0.05 * exact[1].abs()


@pytest.mark.parametrize("name", ["lmm", "mag", "hope", "hierarchy"])
def test_compiled_is_the_same(make, name):
    model = make(**MODELS[name]).double().cuda()
    plain = learned(model, tokens().cuda())
    set_execution(model, compiled=True)
    for a, b in zip(learned(model, tokens().cuda()), plain, strict=True):
        assert (a - b).norm() <= 1e-7 * max(1.0, b.norm())


def test_a_model_compiled_whole(make):
    """By the user's ``torch.compile``, of a rule whose chunks are read at once."""
    model = make("lmm", rule="gated-deltanet").double().cuda()
    plain = learned(model, tokens(2, 40).cuda())
    for a, b in zip(learned(torch.compile(model, dynamic=False), tokens(2, 40).cuda()), plain, strict=True):
        assert (a - b).norm() <= 1e-7 * max(1.0, b.norm())


@pytest.mark.parametrize("name", ["lmm", "mac", "hope"])
def test_a_prompt_in_two_parts(make, name):
    model = make(**MODELS[name]).double()
    there, ids = copy.deepcopy(model).cuda(), tokens(1, 20)
    whole = model(ids).logits
    cache = there(ids[:, :11].cuda(), use_cache=True).past_key_values
    rest = there(ids[:, 11:].cuda(), past_key_values=cache, use_cache=True).logits
    assert (rest.cpu() - whole[:, 11:]).norm() <= 1e-7 * whole.norm()


def test_steps_of_adamw_lower_the_loss(make):
    model = make("lmm", initializer_range=0.05).cuda().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    ids, losses = tokens(4, 32).cuda(), []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
