"""Self-modifying Titans against the equations of Nested Learning, written out token by token for one sequence."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import RULES
from atlas_memory.eval import memory_writes
from atlas_memory.layers.gate_projection import START_GATE
from atlas_memory.layers.hope import MEMORIES, START_M_0, SelfModifyingMemory, compute_gates
from atlas_memory.models import AtlasConfig, AtlasForCausalLM

from ..ops.by_hand import spectral

DIM, HEADS, CHUNK = 8, 2, 4
WIDTH = DIM // HEADS
HOPE = RULES["hope"].vary(window={"chunk": CHUNK}, network={"expansion": 2})
# As printed, with plain steps; with a memory that fades to M_0; and Table 6's "w/o DGD".
VARIANTS = {
    "hope": HOPE,
    "every token": HOPE.vary(window={"chunk": 1}),
    "unbounded": HOPE.vary(optimiser={"normalised": False}),
    "to M_0": HOPE.vary(retention={"to_initial": True}),
    "frozen": HOPE.vary(optimiser={"online": False}),
    "without delta": HOPE.vary(optimiser={"kind": "GradientDescent"}),
}

Pair = tuple[Tensor, Tensor]  # the matrices W_1 and W_2 of one memory of one head


def build(rule=HOPE) -> SelfModifyingMemory:
    torch.manual_seed(0)
    layer = SelfModifyingMemory(DIM, HEADS, rule).double()
    with torch.no_grad():
        layer.gates.bias[0] = -1.5  # steps at which the bare equations do not explode
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def unit(x: Tensor) -> Tensor:
    return x / x.norm()


def read(memory: Pair, x: Tensor) -> Tensor:
    """M(x) = x + W_2 sigma(W_1 x) (Eq. 89)."""
    return x + memory[1] @ F.gelu(memory[0] @ x)


def steps(memory: Pair, k: Tensor, eta: Tensor, delta: bool) -> tuple[Tensor, Tensor]:
    """share_l eta / lambda_l, lambda_l = (2 (|d M(k) / d (W_l f_l)|^2 + 0.05) + delta) (|f_l|^2 + 0.05), shares 0.1
    and 0.9."""
    h = memory[0] @ k
    slope = torch.autograd.functional.jacobian(lambda z: F.gelu(z).sum(), h, create_graph=True)
    through = spectral(memory[1]) * slope.square().max()
    first = (2 * (through + 0.05) + delta) * (k.square().sum() + 0.05)
    last = (2.1 + delta) * (F.gelu(h).square().sum() + 0.05)
    return 0.1 * eta / first, 0.9 * eta / last


def equations(layer: SelfModifyingMemory, x: Tensor) -> tuple[Tensor, list[list[Pair]]]:
    """Outputs ``[time, dim]`` for x ``[time, dim]``, and the last memories, ``[memory][head]``."""
    rule = layer.rule
    chunk, delta = rule.window.chunk, rule.optimiser.erases
    past = F.pad(x, (0, 0, layer.convolution.size - 1, 0))
    mixed, for_keys = (
        sum(past[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
        for taps in (layer.convolution.weight, layer.key_convolution.weight)
    )
    asks, bias = layer.gates.weight * WIDTH**0.5 * 4, layer.gates.bias  # 4: of heads of 16 and less
    initial = [
        [tuple(m[b * HEADS + head] for m in layer.memory.params.initial) for head in range(HEADS)]
        for b in range(len(MEMORIES))
    ]
    now = frozen = initial
    out = []
    for t, token in enumerate(mixed):
        if t % chunk == 0:
            frozen = now  # the end of the previous chunk (Eq. 90)
        answers, new = [], [list(memories) for memories in now]
        for head in range(HEADS):
            channels = slice(head * WIDTH, (head + 1) * WIDTH)
            u, q = unit(token[channels]), unit((layer.q.weight @ token)[channels])
            m_k, m_v, m_eta, m_alpha = (frozen[MEMORIES.index(name)][head] for name in ("k", "v", "eta", "alpha"))
            k, v = unit(read(m_k, unit(for_keys[t, channels]))), unit(read(m_v, u))
            for_eta, for_alpha = read(m_eta, u), read(m_alpha, u)
            answers.append(read(now[0][head], q))
            for b in range(len(MEMORIES)):
                before, start = frozen[b][head], initial[b][head]
                eta = torch.sigmoid(asks[0, b, head] @ for_eta + bias[0, b, head])
                alpha = torch.sigmoid(asks[1, b, head] @ for_alpha + bias[1, b, head])
                target = read(before, v)
                # The gradient with respect to the matrices alone: the target is a number by then.
                at = tuple(w + torch.zeros_like(w) for w in before)
                loss = (read(at, k) - target).square().sum()
                hidden = F.gelu(before[0] @ k)
                if rule.optimiser.online:  # the error at what W_2 answers now
                    moved = 2 * (now[b][head][1] - before[1]) @ hidden
                    loss = loss + (moved * (at[1] @ F.gelu(at[0] @ k))).sum()
                gradients = torch.autograd.grad(loss, at, create_graph=True)
                sizes = steps(before, k, eta, delta) if rule.optimiser.normalised else (eta, eta)
                inputs = (k, hidden)
                updated = []
                for w, g, f, m_0, step in zip(now[b][head], gradients, inputs, start, sizes, strict=True):
                    keep = alpha * torch.eye(len(f)).to(f) - delta * step * torch.outer(f, f)
                    updated.append(w @ keep - step * g)
                    if rule.retention.to_initial:
                        updated[-1] = updated[-1] + (1 - alpha) * m_0
                new[b][head] = tuple(updated)
        now = new
        y = torch.cat([a * (a.square().mean() + layer.norm.eps).rsqrt() * layer.norm.weight for a in answers])
        out.append(layer.out.weight @ (y * F.silu(layer.gate(x_of(layer, past, t)))))
    return torch.stack(out), now


def x_of(layer: SelfModifyingMemory, past: Tensor, t: int) -> Tensor:
    """Token t as it came, before the convolution: what the output gate sees."""
    return past[t + layer.convolution.size - 1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("time", [3, 11])
def test_outputs_state_and_gradients_are_the_equations(variant, time):
    layer = build(VARIANTS[variant])
    x = torch.randn(2, time, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, time, DIM, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    y, state = layer(x)
    by_hand = [equations(layer, row) for row in x]
    expected = torch.stack([out for out, _ in by_hand])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-8)
    loss, expected_loss = (y * weight).sum(), (expected * weight).sum()
    for row, (_, memories) in enumerate(by_hand):
        for i, got in enumerate(state.memory.weights):
            held = torch.stack([pair[i] for memory in memories for pair in memory])
            torch.testing.assert_close(got[row], held, rtol=0, atol=1e-8)
            loss, expected_loss = loss + got[row].square().sum(), expected_loss + held.square().sum()
    gradients, expected_gradients = (torch.autograd.grad(z, leaves) for z in (loss, expected_loss))
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-8 * max(1.0, wanted.abs().max().item()))


def test_memory_starts_as_other_layers_do_and_the_others_slow_and_forgetful():
    layer = SelfModifyingMemory(64, 4)
    assert layer.memory.heads == 20
    zero = torch.zeros(1, 4, 1, 16)
    eta, alpha = compute_gates((layer.gates.weight, layer.gates.bias), zero, zero)
    half_lives = (math.log(0.5) / alpha.log()).flatten()
    expected = torch.cat([torch.logspace(5, 13, 4, base=2.0), torch.full((16,), 32.0)])
    torch.testing.assert_close(half_lives, expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(eta.flatten(), torch.tensor([0.5] * 4 + [0.02] * 16))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_fresh_layer_answers_with_what_it_read(lag):
    """As tests/layers/test_neural_memory.py has it of ``NeuralMemory``: twelve words read twice by untrained layers. A
    memory that half of a value is written to answers the other half with its query: with a lag, the word that was asked
    with does not count."""
    torch.manual_seed(0)
    words, right = F.rms_norm(torch.randn(50, 64), (64,)), []
    for _ in range(8):
        memory = SelfModifyingMemory(64, 4, chunk_size=4, key_lag=lag)
        memory.gate.register_forward_hook(lambda _, x, y: torch.ones_like(y))
        ids = torch.randperm(50)[:12].repeat(2)
        scores = memory(words[ids][None])[0][0] @ words.mT
        said = (scores.scatter(1, ids[:, None], -torch.inf) if lag else scores).argmax(-1)
        right.append((said[12 : 24 - lag] == ids[12 + lag :]).double().mean())
    assert sum(right) / len(right) > (0.3 if lag else 0.5)  # of 50 words


def test_a_fresh_model_asks_for_what_came_next():
    """In spite of what transformers does to linear layers."""
    (layer,) = (block.mixer for block in model(block="hope", rule="hope").model.layers)
    for w in (layer.q.weight, layer.out.weight):
        torch.testing.assert_close(w, torch.eye(16) * w[0, 0])
        assert w.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(layer.key_convolution.weight, layer.convolution.weight.roll(-1, 1))
    assert (layer.gate.bias == START_GATE).all()


def model(**changes) -> AtlasForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AtlasForCausalLM(AtlasConfig(**(sizes | {"intermediate_size": 32, "continuum_periods": [1, 4]} | changes)))


@pytest.mark.extended
def test_300_steps_on_random_tokens_stay_finite_and_learn_nothing():
    """A loss below ln V would mean that labels leak; the memories' own targets could feed on themselves. Fading as
    printed: fading to M_0 the same model is in test_training_contract.py, at a higher rate."""
    options = {"network": {"expansion": 1}, "retention": {"to_initial": False}}
    net = model(block="hope", rule="hope", chunk_size=8, rule_options=options)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(300):
        ids = torch.randint(16, (8, 24))
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)) and sum(losses[-50:]) / 50 > math.log(16) - 0.01
    assert all(p.isfinite().all() for p in net.parameters())


def test_eps_is_above_zero():
    with pytest.raises(ValueError, match="eps must be a finite number above 0, got 0"):
        SelfModifyingMemory(8, 2, eps=0)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["random", "constant", "periodic", "huge"])
def test_memories_that_hardly_forget_stay_bounded_over_8192_tokens(kind):
    layer = SelfModifyingMemory(16, 2, HOPE.vary(retention={"to_initial": True}, window={"chunk": 16}))
    torch.manual_seed(0)
    with torch.no_grad():
        layer.gates.bias[0], layer.gates.bias[1] = 4.0, 8.0
    x = torch.randn(1, 8192, 16)
    period = {"random": 8192, "constant": 1, "periodic": 7, "huge": 8192}[kind]
    x = x[:, torch.arange(8192) % period] * (1e15 if kind == "huge" else 1.0)
    with torch.inference_mode():
        y, state = layer(x)
    assert y.isfinite().all()
    assert all(w.abs().max() < 3.0 for w in state.memory.weights)


def test_as_printed_the_memories_fade_until_keys_are_values_and_to_start_keeps_them_apart():
    """The mean of four layers: one draw of M_0 differs from another by a tenth."""
    for to_initial in (False, True):
        apart = []
        for seed in range(4):
            torch.manual_seed(seed)
            layer = SelfModifyingMemory(32, 2, RULES["hope"].vary(retention={"to_initial": to_initial}))
            with torch.no_grad():  # an M_0 of full size, and one gate for all, as printed
                layer.memory.initial[-1].div_(START_M_0)
                layer.gates.bias[:] = layer.gates.bias[:, :1]
                layer.gates.bias[0] = -math.log(3.0)
            asked = F.normalize(torch.randn(1, 1, 50, 16), dim=-1).expand(1, 10, 50, 16)
            with torch.inference_mode():
                _, state = layer(torch.randn(1, 4096, 32))
                k, v = layer.memory.retrieve(asked, state.memory)[0, 2:6].split(2)
                apart.append((k - v).norm(dim=-1).mean())
        mean = sum(apart) / len(apart)
        assert mean > 0.3 if to_initial else max(apart) < 0.01, f"to_start={to_initial}: |k - v| = {apart}"


def test_writes_off_leaves_every_memory_as_it_is():
    net = model(block="hope", rule="hope").eval()
    layer, ids = net.model.layers[0].mixer, torch.randint(16, (2, 20))
    with memory_writes(net, False), torch.no_grad():
        state = net(ids, use_cache=True).past_key_values.layers[0].state
        for held, initial in zip(state.memory.weights, layer.memory.params.initial, strict=True):
            assert torch.equal(held, initial.expand_as(held))
        frozen = net(ids).logits
    assert layer.writes and not torch.allclose(net(ids).logits, frozen)
    torch.testing.assert_close(net(ids).logits[:, 0], frozen[:, 0])  # the first answer is M_0's (Eq. 88: M_{t-1})


def test_hope_attention_is_attention_with_a_continuum():
    net = model(block="attention")
    assert len(net.model.layers[0].mlp.levels) == 2
    ids = torch.randint(16, (2, 12))
    before = [p.clone() for p in net.parameters()]
    net(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert net.eval().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (2, 15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfModifyingMemory(8, 2, key_lag=4), "key_lag must be an integer >= 0 and below conv_size=4"),
        (lambda: SelfModifyingMemory(10, 3), "dim=10 and heads=3"),
        (lambda: SelfModifyingMemory(8, 2, "titans"), "the rule has .* take rule='hope'"),
        (lambda: SelfModifyingMemory(8, 2, "omeganet"), "the rule has .* take rule='hope'"),
        (lambda: SelfModifyingMemory(8, 2, "yaad"), "the rule has .* take rule='hope'"),
        (lambda: SelfModifyingMemory(8, 2, chunk_size=0), "chunk must be an integer >= 1"),
        (lambda: model(block="hope", rule="titans"), "take rule='hope'"),
        (lambda: model(block="hope", rule="hope", gate_rank=2), "gate_rank=2 has no use in block='hope'"),
        (lambda: build()(torch.zeros(1, 2, 7)), r"x must be \[batch, time, 8\]"),
        (lambda: build().float()(torch.zeros(1, 2, 8), SelfModifyingMemory(8, 2)(torch.zeros(2, 1, 8))[1]), "batch"),
        (
            lambda: build().float()(torch.zeros(1, 2, 8), SelfModifyingMemory(8, 4)(torch.zeros(1, 1, 8))[1]),
            "another rule",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
