"""The contract of every memory layer: causal, isolated, the same in every mode, at any split, under any padding."""

import time

import pytest
import torch

from atlas_memory import RULES, NeuralMemory, OmegaMemory
from atlas_memory.memory import Exponential, Gates, l2_normalise

DIM, HEADS, WINDOW, CHUNK = 12, 2, 3, 4


def layer(rule: str, seed: int = 0) -> NeuralMemory:
    torch.manual_seed(seed)
    return NeuralMemory(DIM, HEADS, rule, window=None if RULES[rule].window.size == 1 else WINDOW, chunk_size=CHUNK)


def growing(rule: str) -> bool:
    """Whether the state grows with the tokens read: only under the exact exponential kernel."""
    return RULES[rule].features == Exponential()


def state_gap(a, b) -> float:
    pairs = zip((*a.memory.tensors(), a.past), (*b.memory.tensors(), b.past), strict=True)
    return max((x - y).norm().item() / max(y.norm().item(), 1e-3) for x, y in pairs if x.is_floating_point())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("training", [True, False])
def test_causal_bitwise_and_rows_apart(rule, training):
    memory = layer(rule).train(training)
    x = torch.randn(3, 15, DIM)
    y, _ = memory(x)
    for t in (0, 5, 6, 7, 8, 14):
        changed = x.clone()
        changed[1, t:] += torch.randn(15 - t, DIM)
        y2, _ = memory(changed)
        assert torch.equal(y2[1, :t], y[1, :t]) and not torch.equal(y2[1, t], y[1, t])
        assert torch.equal(y2[[0, 2]], y[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("every", [1, 4])
def test_causal_bitwise_in_output_space_without_rounding_to_hide_it(every, dtype):
    """Wide enough for Newton-Schulz in output space, and worked in the dtype of the inputs."""
    rule = RULES["atlas"].vary(
        optimiser={"every": every, "precise": False}, network={"expansion": 1}, window={"size": 3}
    )
    torch.manual_seed(0)
    memory = NeuralMemory(32, 2, rule).to(dtype)
    x = torch.randn(2, 24, 32, dtype=dtype)
    y, _ = memory(x)
    for t in (5, 11, 20):
        changed = x.clone()
        changed[:, t:] = 100 * torch.randn(2, 24 - t, 32, dtype=dtype)
        assert torch.equal(memory(changed)[0][:, :t], y[:, :t])


@pytest.mark.parametrize("rule", RULES)
def test_modes_agree_and_the_memory_learns_in_all(rule):
    memory = layer(rule)
    x = torch.randn(2, 15, DIM)
    y, state = memory.train()(x)
    y_eval, _ = memory.eval()(x)
    with torch.inference_mode():
        y_inference, state_inference = memory(x)
        y_next, _ = memory(x[:, :1], state_inference)
    assert torch.equal(y, y_eval) and torch.equal(y, y_inference)
    started = memory.rule.retention.begin(tuple(memory.memory.initial))[0]
    assert any(not torch.equal(w[0], m) for w, m in zip(state.memory.weights, started, strict=True))
    assert torch.equal(y_next, memory(x[:, :1], state)[0])


@pytest.mark.parametrize("rule", RULES)
def test_any_split_into_calls(rule):
    memory = layer(rule)
    x = torch.randn(2, 19, DIM)
    y, end = memory(x)
    for pieces in ([19], [1] * 19, [8, 11], [5, 1, 6, 7], [0, 18, 1], [2, 2, 15]):
        state, out = None, []
        for piece in x.split(pieces, 1):
            o, state = memory(piece, state)
            out.append(o)
        assert (torch.cat(out, 1) - y).abs().max() < 1e-5 * y.abs().max()
        assert state_gap(state, end) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_padding_of_any_pattern_changes_nothing(rule):
    memory = layer(rule)
    x = torch.randn(4, 13, DIM)
    mask = torch.ones(4, 13, dtype=torch.bool)
    mask[0, :5] = False  # left
    mask[1, 9:] = False  # right
    mask[2] = torch.rand(13) > 0.4  # anywhere
    mask[3] = False  # everywhere
    junk = torch.where(mask[..., None], x, 1e3 * torch.randn_like(x))
    y, state = memory(junk, mask=mask)
    y_next, _ = memory(x, state, mask.flip(1))
    assert y[~mask].count_nonzero() == 0
    for row in range(4):
        alone, one = memory(x[row : row + 1][:, mask[row]])
        assert torch.allclose(y[row][mask[row]], alone[0], atol=1e-5 * y.abs().max().item())
        assert state_gap(state.map(lambda t, r=row: t[r : r + 1]), one) < 1e-5
        after, _ = memory(x[row : row + 1][:, mask.flip(1)[row]], one)
        assert torch.allclose(y_next[row][mask.flip(1)[row]], after[0], atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("rule", [*RULES, "atlas in float32"])
@pytest.mark.parametrize("case", ["zero", "constant", "huge", "tiny"])
def test_finite_on_extreme_inputs_with_gradients(rule, case):
    memory = (
        layer(rule) if rule in RULES else NeuralMemory(DIM, HEADS, RULES["atlas"].vary(optimiser={"precise": False}))
    )
    x = {
        "zero": torch.zeros(1, 60, DIM),
        "constant": torch.ones(1, 60, DIM),
        "huge": 1e8 * torch.randn(1, 60, DIM),
        "tiny": 1e-20 * torch.randn(1, 60, DIM),
    }[case].requires_grad_()
    y, state = memory(x)
    y.square().mean().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(t.isfinite().all() for t in state.memory.tensors())
    assert all(p.grad is None or p.grad.isfinite().all() for p in memory.parameters())


@pytest.mark.parametrize("rule", [rule for rule in RULES if not growing(rule)])
def test_finite_and_of_constant_size_over_64k_tokens(rule):
    torch.manual_seed(0)
    memory = NeuralMemory(
        8,
        1,
        RULES[rule].vary(network={"expansion": 1}) if hasattr(RULES[rule].network, "expansion") else rule,
    )
    state, sizes = None, []
    with torch.inference_mode():
        for _ in range(8):
            y, state = memory(torch.randn(1, 8192, 8), state)
            sizes.append(state.nbytes)
            assert y.isfinite().all() and all(t.isfinite().all() for t in state.memory.tensors())
    assert state.memory.seen.item() == 65536 and len(set(sizes)) == 1


def test_a_step_costs_the_same_after_100k_tokens():
    torch.manual_seed(0)
    memory = NeuralMemory(8, 1, RULES["atlas"].vary(network={"expansion": 1}, optimiser={"every": 16}))

    def step_time(state) -> float:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            _, state = memory(torch.randn(1, 1, 8), state)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 4]

    with torch.inference_mode():
        _, young = memory(torch.randn(1, 1000, 8))
        old = young
        for _ in range(11):
            _, old = memory(torch.randn(1, 9000, 8), old)
        ratios = [step_time(old) / step_time(young) for _ in range(5)]
    assert old.memory.seen.item() == 100_000 and old.nbytes == young.nbytes
    assert min(ratios) < 1.2


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_gets_a_gradient(rule):
    """Outer gradients reach q, k, v, every gate, M_0 and the a_i through the write."""
    memory = layer(rule)
    y, _ = memory(torch.randn(2, 13, DIM))
    y.square().sum().backward()
    for name, parameter in memory.named_parameters():
        if parameter.numel() == 0:  # M_0 on phi*
            continue
        assert parameter.grad is not None and parameter.grad.count_nonzero() > 0, name


@pytest.mark.parametrize("rule", ["atlas", "titans"])
def test_bfloat16_inputs_keep_a_float32_memory(rule):
    memory = layer(rule).to(torch.bfloat16)
    y, state = memory(torch.randn(1, 9, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and state.past.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for w in (*state.memory.weights, *state.memory.momentum))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(rule)(torch.randn(1, 9, DIM))
    assert all(w.dtype == torch.float32 for w in state.memory.weights) and y.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_writes_off_leaves_the_memory_as_learned(rule):
    memory = layer(rule)
    memory.writes = False
    _, state = memory(torch.randn(1, 9, DIM))
    started = memory.rule.retention.begin(tuple(memory.memory.initial))[0]
    for w, m in zip(state.memory.weights, started, strict=True):
        assert torch.equal(w[0], m) if m.numel() else not w.any()
    memory.writes = True
    _, state = memory(torch.randn(1, 9, DIM))
    memory.writes = False
    _, after = memory(torch.randn(1, 9, DIM), state)
    for a, b in zip(state.memory.weights, after.memory.weights, strict=True):
        assert torch.allclose(a, b[..., : a.shape[-1]])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="dim must be a positive multiple of heads, got dim=10 and heads=3"):
        NeuralMemory(10, 3)
    with pytest.raises(ValueError, match="unknown rule 'atlass'"):
        NeuralMemory(8, 2, "atlass")
    with pytest.raises(ValueError, match="Window size must be an integer >= 1, got 0"):
        NeuralMemory(8, 2, window=0)
    with pytest.raises(ValueError, match="conv_size must be >= 1"):
        NeuralMemory(8, 2, conv_size=0)
    with pytest.raises(ValueError, match=r"x must be \[batch, time, 12\], got \[2, 5, 11\]"):
        layer("atlas")(torch.randn(2, 5, 11))
    with pytest.raises(ValueError, match="mask"):
        layer("atlas")(torch.randn(2, 5, DIM), mask=torch.ones(2, 4))
    _, state = layer("atlas")(torch.randn(2, 5, DIM))
    with pytest.raises(ValueError, match="another batch or layer"):
        layer("atlas")(torch.randn(3, 5, DIM), state)


def test_bare_memory_is_that_short():
    omega = OmegaMemory(dim=8, heads=2)
    q, k, v = l2_normalise(torch.randn(3, 2, 2, 21, 8))
    y, _ = omega(q, k, v)
    _, state = omega(q[:, :, :10], k[:, :, :10], v[:, :, :10])
    again, _ = omega(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], state=state)
    assert y.shape == q.shape and torch.allclose(y[:, :, 10:], again, atol=1e-5)
    names = {name.split(".")[0] for name, _ in omega.named_parameters()}
    assert names == {"initial", "sqrt_a", "gates"}


def test_bare_memory_with_gates_of_ones_own():
    omega = OmegaMemory(dim=8, heads=2, rule="titans", gates=False)
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    assert {n.split(".")[0] for n, _ in omega.named_parameters()} == {"initial"}
    with pytest.raises(ValueError, match="gates=False: pass gates="):
        omega(q, k, v)
    y, _ = omega(q, k, v, gates=Gates(eta=torch.full((1, 2, 5), 0.1)))
    assert y.isfinite().all()
    with pytest.raises(ValueError, match="heads must be >= 1"):
        OmegaMemory(8, 0)


def test_layer_state_rows_can_be_reordered():
    memory = layer("atlas")
    x = torch.randn(3, 6, DIM)
    _, state = memory(x)
    order = torch.tensor([2, 0, 0])
    y, _ = memory(x[order], state.map(lambda t: t.index_select(0, order)))
    expected, _ = memory(x, state)
    assert torch.allclose(y, expected[order], atol=1e-6)
