"""M3: against Algorithm 1 written out, group by group, through checkpoints, and on a small language model."""

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atlas_memory import RULES, AtlasConfig, AtlasForCausalLM
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.layers.short_conv import ShortConvolution
from atlas_memory.memory import newton_schulz
from atlas_memory.train import M3, m3_groups


def literal(w: Tensor, gradients: list[Tensor], printed: bool, lr: float, alpha: float, f: int, eps: float) -> Tensor:
    """The docstring's equations with the gradients kept and summed; weight decay 0.1."""
    b1, b2, b3 = 0.9, 0.8, 0.7
    m1, m2, v, o2 = (torch.zeros_like(w) for _ in range(4))
    for t, g in enumerate(gradients, 1):
        if t > 1 and (t - 1) % f == 0:
            total = torch.stack(gradients[t - 1 - f : t - 1]).sum(0)
            m2 = m2 + b3 * total if printed else b3 * m2 + total
            o2 = newton_schulz(m2)
        if printed:
            m1, v = m1 + b1 * g, v + b2 * g**2
            d = (newton_schulz(m1) + alpha * o2) / (v.sqrt() + eps)
        else:
            m1, v = b1 * m1 + g, b2 * v + (1 - b2) * g**2
            o = newton_schulz(m1) + alpha * o2
            d = o / ((v / v.mean((-2, -1), keepdim=True)).sqrt() + eps)
            norms = [x.square().sum((-2, -1), keepdim=True).sqrt() for x in (o, d)]
            d = d * norms[0] / norms[1] * 0.2 * math.sqrt(max(w.shape[-2:]))
        w = (1 - 0.1 * lr) * w - lr * d
    return w


def run(parameter: nn.Parameter, gradients: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (2, 3, 5, 4), (1, 6)])
@pytest.mark.parametrize("every", [1, 3, 20])
def test_it_is_the_algorithm(shape: tuple[int, ...], every: int, printed: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=torch.float64)
    gradients = list(torch.randn(11, *shape, dtype=torch.float64))
    parameter = nn.Parameter(w.clone())
    options: dict[str, Any] = {"lr": 0.1, "alpha": 0.6, "eps": 0.3, "printed": printed}
    run(parameter, gradients, M3([parameter], betas=(0.9, 0.8, 0.7), every=every, weight_decay=0.1, **options))
    expected = literal(w, gradients, f=every, **options)
    torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-10)


def test_the_step_has_the_size_of_adamws_and_ignores_the_losss_scale() -> None:
    torch.manual_seed(0)
    for shape in ((64, 16), (16, 64), (3, 32, 32)):
        gradients = list(torch.randn(3, *shape))
        ends = []
        for scale in (1.0, 2.0**-40, 2.0**40):
            parameter = nn.Parameter(torch.zeros(shape))
            run(parameter, [scale * g for g in gradients[:1]], M3([parameter], lr=0.5))
            assert parameter.square().mean().sqrt().item() == pytest.approx(0.1, rel=0.2)
            parameter = nn.Parameter(torch.zeros(shape))
            run(parameter, [scale * g for g in gradients], M3([parameter], lr=0.5, every=2))
            ends.append(parameter.detach())
        assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_batch_of_matrices_is_each_of_them() -> None:
    torch.manual_seed(0)
    gradients = list(torch.randn(5, 3, 4, 6, dtype=torch.float64))
    whole = nn.Parameter(torch.zeros(3, 4, 6, dtype=torch.float64))
    run(whole, gradients, M3([whole], every=2))
    for i in range(3):
        one = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
        run(one, [g[i] for g in gradients], M3([one], every=2))
        torch.testing.assert_close(whole[i], one, rtol=0, atol=1e-14)


def test_what_is_no_matrix_takes_adamw_bitwise() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3, 2))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (
        M3([{"params": ours, "m3": False}], lr=0.1, weight_decay=0.3),
        torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), weight_decay=0.3),
    )
    for _ in range(5):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("printed", [False, True])
def test_gradients_that_are_zero_or_missing(printed: bool) -> None:
    moved, still, absent = (nn.Parameter(torch.ones(3, 4)) for _ in range(3))
    vector = nn.Parameter(torch.ones(3))
    both = [{"params": [moved, still, absent], "weight_decay": 0.0}, {"params": [vector], "m3": False}]
    optimizer = M3(both, lr=0.1, every=2, weight_decay=0.1, printed=printed)
    for _ in range(5):
        moved.grad, still.grad = torch.randn(3, 4), torch.zeros(3, 4)
        moved.grad[1] = 0.0
        optimizer.step()
    assert torch.isfinite(moved).all() and not torch.equal(moved[0], torch.ones(4))
    assert all(torch.equal(p, torch.ones_like(p)) for p in (still, absent, vector, moved[1]))
    assert absent not in optimizer.state and vector not in optimizer.state


def small_model(rule: str = "omeganet", **more: Any) -> AtlasForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AtlasForCausalLM(AtlasConfig(**sizes, intermediate_size=24, rule=rule, window=1, chunk_size=8, **more))


@pytest.mark.parametrize("rule", RULES)
def test_groups_put_each_parameter_where_it_belongs(rule: str) -> None:
    for tied in (True, False):
        model = small_model(rule, tie_word_embeddings=tied)
        model.model.norm.weight.requires_grad_(False)
        groups = m3_groups(model, weight_decay=0.3)
        place = {p: (group["m3"], group["weight_decay"]) for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(place)
        assert place.keys() == set(model.parameters()) - {model.model.norm.weight}
        memory, block = model.model.layers[0].mixer, model.model.layers[0]
        assert all(place[p] == (True, 0.0) and p.dim() == 3 for p in memory.memory.initial)
        linear = (memory.qkv, memory.gate, memory.out, block.mlp.gate, block.mlp.up, block.mlp.down)
        assert all(place[m.weight] == (True, 0.3) for m in linear)
        assert place[model.model.embed_tokens.weight] == (False, 0.0)
        assert place[model.lm_head.weight] == (False, 0.0 if tied else 0.3)
        others = [m for m in model.modules() if isinstance(m, GateProjection | ShortConvolution | nn.RMSNorm)]
        assert all(place.get(p) == (False, 0.0) or not p.requires_grad for m in others for p in m.parameters())


def test_groups_of_a_plain_module() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    assert [len(g["params"]) for g in m3_groups(net)] == [2, 3]
    groups = m3_groups(net, adamw_modules=[net[2]])
    assert [(g["m3"], len(g["params"])) for g in groups] == [(True, 1), (False, 1), (False, 3)]
    assert groups[0]["params"][0] is net[1].weight


def losses(model: AtlasForCausalLM, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    out = []
    for step in range(start, start + steps):
        half = torch.randint(16, (8, 8), generator=torch.Generator().manual_seed(step)) // 2
        tokens = torch.cat([half, half], 1)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("rule", ["omeganet", "titans"])
def test_it_trains_a_language_model(rule: str) -> None:
    model = small_model(rule)
    found = losses(model, M3(m3_groups(model), lr=1e-2), 30)
    assert sum(found[-5:]) / 5 < math.log(8) + 0.05 < found[0]  # eight tokens are in use of sixteen
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_resumed_run_is_the_same_run(stop: int) -> None:
    model = small_model()
    whole = losses(model, M3(m3_groups(model), every=4), 10)
    model = small_model()
    optimizer = M3(m3_groups(model), every=4)
    first = losses(model, optimizer, stop)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model = small_model()
    model.load_state_dict(weights)
    optimizer = M3(m3_groups(model), every=3, lr=1.0)  # the saved values are taken
    optimizer.load_state_dict(state)
    assert first + losses(model, optimizer, 10 - stop, stop) == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "M3 lr=-1.0 is out"),
        ({"alpha": math.nan}, "M3 alpha=nan is out"),
        ({"weight_decay": -0.1}, "M3 weight_decay=-0.1 is out"),
        ({"eps": 0.0}, "M3 eps=0.0 is out"),
        ({"adamw_eps": 0.0}, "M3 adamw_eps=0.0 is out"),
        ({"betas": (0.9, 0.9)}, r"M3 betas=\(0.9, 0.9\) must be 3 numbers from 0 to below 1"),
        ({"adamw_betas": (0.9, 1.0)}, r"M3 adamw_betas=\(0.9, 1.0\) must be 2 numbers from 0 to below 1"),
        ({"every": 0}, "M3 every must be an integer >= 1, got 0"),
        ({"steps": 2.5}, "M3 steps must be an integer >= 1, got 2.5"),
    ],
)
def test_bad_hyperparameters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        M3([nn.Parameter(torch.ones(2, 2))], **options)


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"M3 moves matrices, got the shape \[2\]: .* m3=False"):
        M3([nn.Parameter(torch.ones(2))])
    optimizer = M3([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match="M3 moves matrices"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
