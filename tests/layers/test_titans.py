"""MAG, MAL and MAC against the equations of Titans, token by token, for one sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from atlas_memory import RULES, NeuralMemory
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.titans import MemoryAsContext, MemoryAsGate, MemoryAsLayer, WithPersistentTokens

from . import naive_attention
from .mixers import ATTENTION_WINDOW, DIM, HEADS, build


def steps(memory: NeuralMemory, x: Tensor) -> Tensor:
    """The outputs of the memory, written and read one token at a time."""
    state, out = None, []
    for token in x:
        y, state = memory(token[None, None], state)
        out.append(y[0, 0])
    return torch.stack(out)


def rms(norm: torch.nn.RMSNorm, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight


def gate(layer: MemoryAsGate | MemoryAsContext, attention: Tensor, memory: Tensor) -> Tensor:
    of = layer.gate
    return (rms(of.attention_norm, attention) + of.bias) * F.silu(rms(of.memory_norm, memory))


def mag(layer: MemoryAsGate, x: Tensor) -> Tensor:
    """o = SW-Attn*(x~) (x) M(x~), x~ = [p || x] (Eqs. 26-28), with the norms of Sec. 4.4 and b."""
    if isinstance(layer.memory, WithPersistentTokens):
        p, memory = layer.memory.tokens.weight, layer.memory.mixer
    else:
        p, memory = x[:0], layer.memory
    read = steps(memory, torch.cat([p, x]))[len(p) :]
    return gate(layer, naive_attention.causal_attention(layer.attention, x, ATTENTION_WINDOW, p), read)


def mal(layer: MemoryAsLayer | WithPersistentTokens, x: Tensor) -> Tensor:
    """m = M([p || x]), o = m + SW-Attn(norm([p || x] + m)) (Eqs. 29-31, with the residuals of Sec. 4.4)."""
    p = x[:0]
    if isinstance(layer, WithPersistentTokens):
        p, layer = layer.tokens.weight, layer.mixer
    both = torch.cat([p, x])
    m = steps(layer.memory, both)
    return (m + naive_attention.causal_attention(layer.attention, rms(layer.norm, both + m), ATTENTION_WINDOW))[
        len(p) :
    ]


def ask(memory: NeuralMemory, weights: list[Tensor], x: Tensor) -> Tensor:
    """M*(x W_Q) of one token `[dim]`, each head's M(q) = q + W_2 gelu(W_1 phi(q)) at fixed weights."""
    q = F.silu(memory.qkv.weight[:DIM] @ x).reshape(HEADS, -1)
    read = []
    for head, query in enumerate(q):
        query = query / query.norm()
        feature_mapped = memory.rule.features.expand(query, memory.memory.sqrt_a)
        answer = query + weights[1][head] @ F.gelu(weights[0][head] @ feature_mapped)
        read.append(rms(memory.norm, answer))
    return memory.out(torch.cat(read) * F.silu(memory.gate(x)))


def mac(layer: MemoryAsContext, x: Tensor) -> Tensor:
    """h = M_{t-1}(S W_Q), y = S + Attn([p || h || S]), M_t = M_{t-1}(y), o = y (x) M_t(y) (Eqs. 21-25), with the
    residual and the norms of Sec. 4.4 and b."""
    size, state, out = ATTENTION_WINDOW, None, []
    p = x[:0] if layer.persistent is None else layer.persistent.weight
    first_h, first_x = len(p), len(p) + size

    def heads(z: Tensor) -> Tensor:
        return z.reshape(len(z), HEADS, -1)

    for segment in x.split(size):
        weights = list(layer.memory.memory.params.initial)
        if state is not None:
            weights = [w[0] for w in state.memory.readout_weights(layer.memory.rule)]
        h = torch.stack([ask(layer.memory, weights, token) for token in segment])
        for i in range(len(segment)):
            seen = torch.cat([p, h[: i + 1], segment[: i + 1]])
            order = torch.arange(i + 1)
            position = torch.cat([torch.arange(len(p)), first_h + order, first_x + order])
            k, v = layer.kv(seen).chunk(2, -1)
            q = naive_attention.rotate(heads(layer.q(segment[i : i + 1])), torch.tensor([first_x + i]))[0]
            y = segment[i] + layer.out(
                naive_attention.attend(naive_attention.scores(q, naive_attention.rotate(heads(k), position)), heads(v))
            )
            read, state = layer.memory(y[None, None], state)
            out.append(gate(layer, y, read[0, 0]))
    return torch.stack(out)


@pytest.mark.parametrize(
    ("equations", "name"),
    [
        (mag, "mag"),
        (mag, "mag-persistent"),
        (mal, "mal"),
        (mal, "mal-persistent"),
        (mac, "mac"),
        (mac, "mac-titans"),
        (mac, "mac-persistent"),
    ],
)
@pytest.mark.parametrize("time", [3, 5, 17])
def test_equals_the_equations(equations, name, time):
    mixer = build(name, torch.float64)
    x = torch.randn(2, time, DIM, dtype=torch.float64)
    y, _ = mixer(x)
    for row in range(2):
        torch.testing.assert_close(y[row], equations(mixer, x[row]), rtol=0, atol=1e-8)


def test_a_memory_as_context_that_shows_what_waits_for_a_step():
    torch.manual_seed(0)
    rule = RULES["atlas"].vary(network={"expansion": 1}, optimiser={"every": None, "read_pending": True})
    options = {"attention_window": ATTENTION_WINDOW, "rule": rule, "chunk_size": 8, "eps": 1e-6}
    mixer = BLOCKS["mac"].make(DIM, HEADS, **options).double()
    x = torch.randn(1, 17, DIM, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0][0], mac(mixer, x[0]), rtol=0, atol=1e-8)


def test_retrieving_writes_nothing_and_is_what_the_layer_reads_without_convolution():
    torch.manual_seed(0)
    memory = NeuralMemory(DIM, HEADS, "atlas", window=3, chunk_size=4).double()
    with torch.no_grad():
        memory.convolution.weight.zero_()[:, -1] = 1.0
    memory.writes = False
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    y, state = memory(x)
    torch.testing.assert_close(memory.retrieve(x, state.memory), y, rtol=0, atol=1e-12)


def test_half_precision():
    for name in ("mac-persistent", "mag-persistent", "mal-persistent", "lmm-titans-persistent"):
        x = torch.randn(2, 7, DIM)
        y, state = build(name, torch.bfloat16)(x.bfloat16())
        assert y.dtype == torch.bfloat16 and y.isfinite().all()
        near, _ = build(name)(x)
        assert (y.float() - near).abs().max() < 0.2 * near.abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixer = build(name)
            y, state = mixer(x)
            y, _ = mixer(x[:, :1], state)
        assert y.isfinite().all()


def test_bad_arguments():
    with pytest.raises(ValueError, match="the length of a segment, must be an integer >= 1, got 0"):
        MemoryAsContext(8, 2, attention_window=0, eps=1e-6)
    with pytest.raises(ValueError, match="dim=6 with heads=2: rotary attention needs dim to be a multiple of 4"):
        MemoryAsContext(6, 2, attention_window=4, eps=1e-6)
    with pytest.raises(ValueError, match="persistent_tokens must be a whole number, 0 for none; got -1"):
        MemoryAsContext(8, 2, attention_window=4, persistent_tokens=-1, eps=1e-6)


def test_context_without_writes_reads_on_from_anywhere():
    layer = MemoryAsContext(DIM, HEADS, attention_window=5, persistent_tokens=2, rule="titans").double()
    layer.memory.writes = False
    x = torch.randn(2, 23, DIM, dtype=torch.float64)
    whole, state = layer(x)[0], None
    parts = []
    for part in x.split([7, 1, 9, 6], 1):
        y, state = layer(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_context_that_writes_again_goes_on_from_what_was_written():
    """What is read without writing is not in the window of the memory, nor counted by it; segments count it."""
    layer = build("mac", torch.float64)
    first, between, last = torch.randn(2, 21, DIM, dtype=torch.float64).split([6, 8, 7], 1)
    with torch.no_grad():
        _, before = layer(first)
        layer.memory.writes = False
        _, after = layer(between, before)
        layer.memory.writes = True
        assert after.seen.tolist() == [14, 14] and before.memory.memory.seen.tolist() == [6, 6]
        for a, b in zip(after.memory.memory.tensors(), before.memory.memory.tensors(), strict=True):
            assert torch.equal(a, b)
        y, end = layer(last, after)
        parts, state = [], after
        for token in last.split(1, 1):
            part, state = layer(token, state)
            parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, rtol=0, atol=1e-10)
    assert end.memory.memory.seen.tolist() == [13, 13] and end.seen.tolist() == [21, 21]


@pytest.mark.parametrize("kind", [MemoryAsGate, MemoryAsLayer, MemoryAsContext])
def test_what_a_fresh_memory_answers_passes(kind):
    """Twelve words read twice: what the mixer gives the second time says more of the word after than of any other, the
    one that it is asked with aside. The memory alone does so for most words (``test_neural_memory``)."""
    torch.manual_seed(0)
    words, right = F.rms_norm(torch.randn(50, 64), (64,)), []
    for _ in range(8):
        mixer = kind(64, 4, attention_window=16, rule="titans", key_lag=1, chunk_size=4)
        mixer.memory.gate.register_forward_hook(lambda _, x, y: torch.ones_like(y))
        ids = torch.randperm(50)[:12].repeat(2)
        scores = (mixer(words[ids][None])[0][0] @ words.mT).scatter(1, ids[:, None], -torch.inf)
        right.append((scores[12:23].argmax(-1) == ids[13:]).double().mean())
    assert sum(right) / len(right) > 0.4  # of 50 words
