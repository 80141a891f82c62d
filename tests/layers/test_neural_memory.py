"""What the memory layer promises beyond the contract of every mixer (test_mixers.py), for every rule."""

import time
from functools import partial

import pytest
import torch

from atlas_memory import RULES, NeuralMemory, OmegaMemory
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.memory import L2, DotProduct, Exponential, Gates, l2_normalise

DIM, HEADS, WINDOW, CHUNK = 12, 2, 3, 4


def layer(rule: str, seed: int = 0) -> NeuralMemory:
    torch.manual_seed(seed)
    return NeuralMemory(DIM, HEADS, rule, window=None if RULES[rule].window.size == 1 else WINDOW, chunk_size=CHUNK)


def growing(rule: str) -> bool:
    """Whether the state grows with the tokens read: only under the exact exponential kernel."""
    return RULES[rule].features == Exponential()


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
def test_the_memory_learns_in_every_mode(rule):
    memory = layer(rule)
    x = torch.randn(2, 15, DIM)
    for mode in (memory.train, memory.eval):
        for inference in (False, True):
            with torch.inference_mode(inference):
                _, state = mode()(x)
            started = [memory.rule.retention.begin(m)[0] for m in memory.memory.params.initial]
            learned = zip(state.memory.weights, started, strict=True)
            assert any(not torch.equal(w[0], m) for w, m in learned)


def test_atlas_in_float32_on_extreme_inputs():
    memory = NeuralMemory(DIM, HEADS, RULES["atlas"].vary(optimiser={"precise": False}))
    for x in (torch.ones(1, 36, DIM), *(size * torch.randn(1, 36, DIM) for size in (0.0, 1e8, 1e-20))):
        y, state = memory(x.requires_grad_())
        y.square().mean().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()
        assert all(t.isfinite().all() for t in state.memory.tensors())
        assert all(p.grad is None or p.grad.isfinite().all() for p in memory.parameters())


@pytest.mark.extended
@pytest.mark.parametrize("rule", [rule for rule in RULES if not growing(rule)])
def test_finite_and_of_constant_size_over_64k_tokens(rule):
    torch.manual_seed(0)
    options = {"network": {"expansion": 1}} if hasattr(RULES[rule].network, "expansion") else {}
    if rule != "atlas":  # the others in larger chunks, to save time
        long = not RULES[rule].optimiser.mixes_rows and rule not in ("omeganet", "titans")
        options["window"] = {"chunk": 128 if long else 64}
    memory = NeuralMemory(8, 1, RULES[rule].vary(**options))
    state, sizes = None, []
    with torch.inference_mode():
        for _ in range(8):
            y, state = memory(torch.randn(1, 8192, 8), state)
            sizes.append(state.nbytes)
            assert y.isfinite().all() and all(t.isfinite().all() for t in state.memory.tensors())
    assert state.memory.seen.item() == 65536 and len(set(sizes)) == 1


@pytest.mark.extended
def test_a_step_costs_the_same_after_100k_tokens():
    torch.manual_seed(0)
    once_a_chunk = {"network": {"expansion": 1}, "optimiser": {"every": None}, "window": {"chunk": 128}}
    memory = NeuralMemory(8, 1, RULES["atlas"].vary(**once_a_chunk))

    def step_time(state) -> float:
        times = []
        for _ in range(100):
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


@pytest.mark.parametrize("rule", ["atlas", "titans"])
def test_bfloat16_inputs_keep_a_float32_memory(rule):
    memory = layer(rule).to(torch.bfloat16)
    y, state = memory(torch.randn(1, 9, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and state.past.dtype == torch.bfloat16
    assert all(w.dtype == torch.float32 for m in state.memory.matrices for w in m.tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(rule)(torch.randn(1, 9, DIM))
    assert all(w.dtype == torch.float32 for w in state.memory.weights) and y.isfinite().all()


def test_autocast_is_no_remedy_for_float64():
    memory = layer("titans").float()
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    for autocast in (False, True):
        with torch.autocast("cpu", enabled=autocast), pytest.raises(ValueError, match=r"or layer.to\(...\)$"):
            memory(x)
    with pytest.raises(ValueError, match=r"or call it under torch\.autocast"):
        memory(x.bfloat16())


@pytest.mark.parametrize("rule", ["tnt", "ttt-mlp", "memora", "yaad"])
def test_alike_gains_of_a_layer_norm_share_the_gradient_of_the_largest(rule):
    """All begin at 1, and the largest bounds the step. Where all move alike, or one up and one down by as much, the
    loss has a derivative; both are the gradient's only if alike gains have equal shares. (Not to the last digit: the
    gradient of a spectral norm takes the direction as given.)"""
    torch.manual_seed(0)
    memory = NeuralMemory(16, 1, rule=rule).double()
    x = torch.randn(2, 48, 16, dtype=torch.float64)
    gain = memory.memory.norm_gain

    def loss() -> torch.Tensor:
        return memory(x)[0].square().sum()

    (gradient,) = torch.autograd.grad(loss(), gain)
    ones, size = torch.ones_like(gain), 1e-6
    unit = torch.eye(16, dtype=torch.float64)
    for along in (ones, unit[:1] - unit[1:2], unit[9:10] - unit[4:5], unit[15:] - unit[:1]):
        with torch.no_grad():
            gain.add_(size * along)
            more = loss()
            gain.sub_(2.0 * size * along)
            difference = (more - loss()) / (2.0 * size)
            gain.add_(size * along)
        expected = pytest.approx(float(difference), abs=1e-3 * float(gradient.norm()))
        assert float((gradient * along).sum()) == expected


@pytest.mark.parametrize("rule", RULES)
def test_gradients_within_autocast(rule):
    memory, x, found = layer(rule), torch.randn(2, 9, DIM), []
    for within in (False, True):
        memory.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = memory(x)[0].square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in memory.parameters()]))
    assert (found[1] - found[0]).norm() < 0.05 * found[0].norm()


@pytest.mark.parametrize("rule", RULES)
def test_writes_off_leaves_the_memory_as_learned(rule):
    memory = layer(rule)
    memory.writes = False
    _, state = memory(torch.randn(1, 9, DIM))
    started = [memory.rule.retention.begin(m)[0] for m in memory.memory.params.initial]
    for w, m in zip(state.memory.weights, started, strict=True):
        of_m0, of_keys = w[0].split([m.shape[-1], w.shape[-1] - m.shape[-1]], -1)  # there are keys on phi* only
        assert torch.equal(of_m0, m) and not of_keys.any()
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
    for eps in (0, -1.0, float("nan"), float("inf"), "1e-6", True):
        with pytest.raises(ValueError, match="eps must be a finite number above 0, got"):
            NeuralMemory(DIM, HEADS, eps=eps)
    with pytest.raises(ValueError, match="conv_size must be an integer >= 1"):
        NeuralMemory(8, 2, conv_size=0)
    for wrong in ({"dim": 8.0}, {"heads": True}, {"conv_size": 1.5}, {"key_lag": 1.0}, {"gate_rank": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be an integer >= [01],? .*got"):
            NeuralMemory(**{"dim": 8, "heads": 2, "rule": "titans", **wrong})
    with pytest.raises(ValueError, match=r"x must be \[batch, time, 12\], got a list"):
        layer("atlas")([[1.0]])
    with pytest.raises(ValueError, match=r"mask must be a tensor \[batch, time\], got a list"):
        layer("atlas")(torch.randn(1, 2, DIM), mask=[[1, 1]])
    with pytest.raises(ValueError, match=r"x must be \[batch, time, 12\], got \[2, 5, 11\]"):
        layer("atlas")(torch.randn(2, 5, 11))
    with pytest.raises(ValueError, match="mask"):
        layer("atlas")(torch.randn(2, 5, DIM), mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"x must be floating point, got torch.int64: embed tokens first"):
        layer("atlas")(torch.zeros(2, 5, DIM, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x is torch.float64 and this NeuralMemory is torch.float32: bring one"):
        layer("atlas")(torch.zeros(2, 5, DIM, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"state must be the LayerState .* got a tensor of shape \[2, 5\]"):
        layer("atlas")(torch.zeros(2, 5, DIM), torch.zeros(2, 5))
    q = torch.zeros(2, 5, 2, 8)
    with pytest.raises(ValueError, match=r"q must be \[batch, heads=2, time, dim=8\], got"):
        OmegaMemory(8, 2)(q, q, q)
    for wrong in (q, q[:, :, :1].transpose(1, 2)):
        with pytest.raises(ValueError, match=r"q must be \[batch, heads=2, time, dim=8\], got"):
            OmegaMemory(8, 2).retrieve(wrong)
    with pytest.raises(ValueError, match="is of another rule, batch"):
        OmegaMemory(8, 2).retrieve(q.transpose(1, 2), OmegaMemory(8, 2).initial_state(3))
    other = OmegaMemory(8, 2, "gated-deltanet").initial_state(2)
    with pytest.raises(ValueError, match=r"state must hold memories of shapes .* it is of another rule,"):
        OmegaMemory(8, 2, "atlas").retrieve(q.transpose(1, 2), other)
    with pytest.raises(ValueError, match="gate_rank=4 needs gates=True"):
        OmegaMemory(8, 2, "titans", gates=False, gate_rank=4)
    with pytest.raises(ValueError, match=r"x must be \[batch, time, 12\], got \[5, 12\]"):
        layer("atlas").retrieve(torch.zeros(5, DIM), None)
    _, state = layer("atlas")(torch.randn(2, 5, DIM))
    with pytest.raises(ValueError, match="another batch or layer"):
        layer("atlas")(torch.randn(3, 5, DIM), state)


def test_bare_memory_is_that_short():
    omega = OmegaMemory(dim=8, heads=2, rule="atlas")
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
    with pytest.raises(ValueError, match="heads must be an integer >= 1"):
        OmegaMemory(8, 0)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("rule", ["gated-deltanet", "titans", "omeganet", "atlas"])
def test_a_fresh_layer_answers_with_what_it_read(rule, lag):
    """Twelve words read twice, by untrained layers whose gates at the output are open: the second time each is answered
    with itself, or with the word that is ``key_lag`` behind it."""
    torch.manual_seed(0)
    words, right = torch.nn.functional.rms_norm(torch.randn(50, 64), (64,)), []
    for _ in range(8):
        memory = NeuralMemory(64, 4, rule, key_lag=lag, chunk_size=4)
        memory.gate.register_forward_hook(lambda _, x, y: torch.ones_like(y))
        ids = torch.randperm(50)[:12].repeat(2)
        said = (memory(words[ids][None])[0][0] @ words.mT).argmax(-1)
        right.append((said[12 : 24 - lag] == ids[12 + lag :]).double().mean())
    assert sum(right) / len(right) > 0.5  # of 50 words


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("rule", ["titans", "dla"])
def test_what_a_fresh_layer_answers_passes_its_gate(rule, dim):
    """At full size on average, and hardly anywhere with another sign; less of what Hebbian rules answer."""
    gate = torch.nn.functional.silu(NeuralMemory(dim, 2, rule).gate(torch.randn(1000, dim)))
    full, same_sign = (0.25, 0.6) if rule == "dla" else (1.0, 0.95)
    assert gate.mean().item() == pytest.approx(full, abs=0.15) and (gate > 0).float().mean() > same_sign


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_how_long_values_begin(std):
    """In memories that answer k + ..., as long whatever the weights of a model are; else as these are."""
    x = torch.randn(4, 50, 32)
    for rule, expected in (("titans", 3.0**-0.5), ("ttt-linear", 3.0**-0.5), ("gated-deltanet", std * 32**0.5)):
        memory = NeuralMemory(32, 2, rule)
        torch.nn.init.normal_(memory.qkv.weight, std=std)
        memory.reset_parameters()
        values = memory.qkv(x)[..., 64:]
        assert values.square().mean().sqrt().item() == pytest.approx(expected, rel=0.1)
        assert memory.out.weight.std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("heads", [1, 2, 10, 30])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_projections_begin_orthogonal(heads, lag, dtype):
    """As long as they were drawn; keys as queries, rotated by 45 degrees where they have no lag (but for the last
    coordinate of an odd number), and the output projection inverts that of values."""
    memory = NeuralMemory(30, heads, "gated-deltanet", key_lag=lag).to(dtype)
    torch.nn.init.normal_(memory.qkv.weight, std=0.02)
    drawn = memory.qkv.weight.unflatten(0, (3, -1)).double().norm(dim=(1, 2))
    memory.reset_parameters()
    w = memory.qkv.weight.unflatten(0, (3, -1)).double()
    unit = w * (30**0.5 / drawn[[0, 0, 2], None, None])
    out = memory.out.weight.double() * 30**0.5 / drawn[2]
    like_identity = partial(torch.testing.assert_close, expected=torch.eye(30, dtype=torch.float64), rtol=0.0)
    close = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for product in (*(unit @ unit.mT), out @ unit[2]):
        like_identity(product, atol=close)
    cosines = torch.full((heads, 30 // heads), 1.0 if lag else 0.5**0.5, dtype=torch.float64)
    if (30 // heads) % 2:
        cosines[:, -1] = 1.0
    torch.testing.assert_close((unit[0] * unit[1]).sum(1), cosines.flatten(), rtol=0.0, atol=close)


@pytest.mark.parametrize("rule,widths", [("titans", (16, 32, 64)), ("swla", (32, 64, 128)), ("lact", (32, 64, 128))])
def test_gates_of_narrow_layers_learn_as_fast(rule, widths):
    """The first step of AdamW moves a logit as far in each, and wider ones begin as they always did."""
    moved = []
    for width in (*widths, 2 * widths[-1]):
        gates = GateProjection(width, 2, RULES[rule])
        torch.nn.init.zeros_(gates.weight)
        x = torch.randn(1, 1, width).sign()
        before = torch.logit(gates(x).eta / gates.max_eta)
        optimiser = torch.optim.AdamW([gates.weight], lr=1e-3, weight_decay=0.0)
        gates(x).eta.sum().backward()
        optimiser.step()
        moved.append((torch.logit(gates(x).eta / gates.max_eta) - before).mean().item())
    assert moved == pytest.approx([moved[0]] * len(widths) + [2 * moved[0]], rel=1e-2)


@pytest.mark.parametrize(
    "rule,eta",
    [
        ("titans", 0.7),
        ("omeganet", 0.95),
        ("atlas", 0.95),
        ("gated-deltanet", 0.5),
        ("ttt-linear", 0.5),
        ("dla", 0.475),
        ("swdt", 0.475),
        ("lact", 0.35),
    ],
)
def test_where_eta_begins(rule, eta):
    """Lower in a matrix that corrects its answer, and where what is written does not depend on what is answered."""
    gates = GateProjection(16, 2, RULES[rule])
    assert torch.allclose(gates(torch.zeros(1, 1, 16)).eta, torch.tensor(eta))


def test_where_bare_steps_begin():
    """At that over the squared length of a lifted unit key, here 1 + 1 + 1/2, with a smaller constant 0.01 + 1 + 1/2;
    far from the largest if noise adds up."""
    for rule, eta in (("swla", 0.95 / 1.51), ("omeganet", 0.95 / 2.5), ("gated-deltanet", 0.5)):
        gates = GateProjection(16, 2, RULES[rule].vary(optimiser={"normalised": False}))
        assert torch.allclose(gates(torch.zeros(1, 1, 16)).eta, torch.tensor(eta))
        assert gates.max_eta == (4.0 if rule == "swla" else 1.0)


@pytest.mark.parametrize("name", RULES)
def test_a_first_write_takes_half_of_the_loss(name):
    """What one write at the gates' starting values leaves of the loss at its key, heads of 32: of the rule's own loss,
    and of the squared error where the rule has none that ends. docs/explanation/initialisation.md says why `lact`
    leaves more."""
    torch.manual_seed(0)
    changes = {"network": {"expansion": 1}} if hasattr(RULES[name].network, "expansion") else {}
    rule = RULES[name].vary(window={"size": min(4, RULES[name].window.size), "chunk": 1}, **changes)
    memory, gates = OmegaMemory(32, 2, rule, gates=False).eval(), GateProjection(64, 2, rule)
    k, v = l2_normalise(torch.randn(64, 2, 1, 32)), torch.randn(64, 2, 1, 32)
    loss = L2() if isinstance(rule.bias, DotProduct) else rule.bias
    with torch.no_grad():
        gates.weight.zero_()
        opened = gates(torch.zeros(64, 1, 64))
        _, state = memory(k, k, v, opened)
        target = v if opened.delta is None else torch.cat([v, opened.delta[..., None]], -1)
        before, after = (loss.value(memory.retrieve(k, at), target).sum() for at in (None, state))
    assert after / before <= {"lact": 0.7}.get(name, 0.5)


@pytest.mark.parametrize("rule,mode", [*((rule, torch.no_grad) for rule in RULES), ("titans", torch.inference_mode)])
def test_decoding_is_one_call(rule, mode):
    memory, x = layer(rule).double(), torch.randn(2, 3 * CHUNK + 1, DIM, dtype=torch.float64)
    with mode():
        whole, end = memory(x)
        state, outputs = memory(x[:, :1])[1], []
        for token in x[:, 1:].split(1, 1):
            y, state = memory(token, state)
            outputs.append(y)
    assert torch.allclose(torch.cat(outputs, 1), whole[:, 1:], rtol=0, atol=1e-8)
    for ours, theirs in zip(state.tensors(), end.tensors(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-8)


def test_a_frozen_matrix_that_is_changed_in_place_is_read_anew():
    memory, x = layer("titans"), torch.randn(2, 3, DIM)
    with torch.no_grad():
        state = memory(x[:, 1:2], memory(x[:, :1])[1])[1]
        for matrix in state.memory.matrices:
            matrix.frozen.mul_(3.0)
        remembered, fresh = memory(x[:, 2:], state), memory(x[:, 2:], state.map(torch.clone))
    assert all(map(torch.equal, remembered[1].tensors(), fresh[1].tensors()))
