"""What once broke memories: inputs of any size, tokens that are not finite, empty batches, float32 at any split; and
the transforms of torch.func, under which nobody may look at a number."""

from dataclasses import replace

import pytest
import torch

from atlas_memory import RULES, NeuralMemory, OmegaMemory
from atlas_memory.layers.hope import SelfModifyingMemory
from atlas_memory.layers.tnt import HierarchicalMemory
from atlas_memory.memory import l2_normalise

from .mixers import DIM, HIERARCHY, MIXERS, OWN, build


def layer(name: str, dim: int = 16, **options) -> NeuralMemory:
    torch.manual_seed(0)
    return NeuralMemory(dim, 2, name, window=min(2, RULES[name].window.size), **options)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in MIXERS if name not in OWN])
def test_whatever_is_finite_gives_finite_outputs(name, dtype):
    """And gradients; in float16, where they overflow first, those of inputs to 10."""
    mixer, largest = build(name, dtype), torch.finfo(dtype).max
    for size in (10.0, 1e4, 1e15, largest) if dtype == torch.float32 else (10.0, largest):
        x = (min(size, largest) * torch.randn(2, 13, DIM).double().clamp(-1, 1)).to(dtype).requires_grad_()
        y, state = mixer(x)
        assert y.isfinite().all() and all(t.isfinite().all() for t in state.tensors()), size
        if size == 10.0 or dtype != torch.float16:
            grads = torch.autograd.grad(y.float().sum(), [x, *mixer.parameters()], allow_unused=True)
            assert all(g.isfinite().all() for g in grads if g is not None), size


@pytest.mark.parametrize("name", ["lmm-titans", "mag-persistent", "mac-titans", "hope", "swa", "attention"])
def test_nonfinite_tokens_in_float16_do_not_reach_back(name):
    """Also where the projection of finite numbers overflows."""
    mixer, x = build(name, torch.float16), torch.randn(3, 13, DIM).half()
    broken = x.clone()
    broken[0, 7], broken[1, 7], broken[1, 9] = torch.nan, 6e4, -torch.inf
    (y, _), (moved, _) = mixer(x), mixer(broken)
    assert torch.equal(moved[:2, :7], y[:2, :7]) and torch.equal(moved[2], y[2])
    assert moved[0, 7].isnan().all() and moved[1, 7:9].isfinite().all() and moved[1, 9].isnan().all()
    if name in ("swa", "attention"):
        with torch.no_grad():
            mixer.qkv.weight.mul_(1e3)
        assert torch.equal(mixer(broken)[0][1, :7], mixer(x)[0][1, :7])


def test_a_bare_hierarchy_keeps_what_was_before():
    memory = HierarchicalMemory(8, 2, "tnt", HIERARCHY)
    q, k, v = l2_normalise(torch.randn(3, 2, 2, 13, 8))
    broken = k.clone()
    broken[0, :, 5] = torch.nan
    y, moved = memory(q, k, v)[0], memory(q, broken, v, memory.gates(k.transpose(1, 2).flatten(2)))[0]
    assert torch.equal(moved[0, :, :5], y[0, :, :5]) and torch.equal(moved[1], y[1]) and moved[0, :, 5:].isnan().all()


@pytest.mark.parametrize("name", RULES)
def test_what_is_behind_the_end_of_a_bare_memory_reaches_nothing(name):
    q = k = v = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    alone = OmegaMemory(8, 2, name, window=min(2, RULES[name].window.size), chunk_size=8).double()
    gates = replace(alone.gates(torch.randn(1, 12, 16, dtype=torch.float64)), length=torch.tensor([7]))
    wanted, kept = alone(q, k, v, gates)
    v = v.clone()
    v[:, :, 7:] = float("nan")
    found, state = alone(q, k, v, gates)
    torch.testing.assert_close(found[:, :, :7], wanted[:, :, :7], rtol=0, atol=1e-10)
    for one, other in zip(state.weights, kept.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layers_made_in_any_dtype_begin_alike(dtype):
    """In bfloat16 0.5 ** (1 / 8192) is 1, and the gate of such an alpha never learns."""
    before = torch.get_default_dtype()
    wanted = [m.state_dict() for m in (NeuralMemory(32, 4, "titans"), SelfModifyingMemory(32, 4))]
    try:
        torch.set_default_dtype(dtype)
        found = [m.state_dict() for m in (NeuralMemory(32, 4, "titans"), SelfModifyingMemory(32, 4))]
    finally:
        torch.set_default_dtype(before)
    for one, other in zip(found, wanted, strict=True):
        for name, tensor in one.items():
            assert tensor.isfinite().all(), name
            if name.endswith("gates.bias"):
                torch.testing.assert_close(tensor.float(), other[name].float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [1e4, 1e8, 1e19, 1e30])
@pytest.mark.parametrize("name", [name for name in RULES if name != "hope"])
def test_a_long_raw_key_does_not_reach_back(name, size):
    """Keys of a bare memory are used as they come, and degree-2 features square them. Where exp(k . k) is no number,
    the memory is lost from there on."""
    memory = OmegaMemory(8, 2, name, window=min(2, RULES[name].window.size), chunk_size=8)
    q, k, v = torch.randn(3, 2, 2, 16, 8)
    q, k = l2_normalise(q), l2_normalise(k)
    long = k.clone()
    long[0, :, 12] *= size
    with torch.no_grad():
        y, moved = memory(q, k, v)[0], memory(q, long, v)[0]
    assert torch.equal(moved[0, :, :12], y[0, :, :12]) and torch.equal(moved[1], y[1])
    if memory.rule.features.max_abs is None:
        assert moved[0, :, 12:].isnan().all()
    else:
        assert moved.isfinite().all()


@pytest.mark.parametrize("name", ["memora", "moneta"])
@pytest.mark.parametrize("dim", [32, 128])
def test_float32_at_any_split(name, dim):
    memory = layer(name, dim)
    x, state, parts = torch.randn(1, 1024, dim), None, []
    with torch.no_grad():
        whole, _ = memory(x)
        for part in x.split(67, 1):
            y, state = memory(part, state)
            parts.append(y)
    assert (torch.cat(parts, 1) - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in MIXERS if name not in OWN])
def test_tokens_that_are_zero_tiny_or_all_alike(name):
    """Finite outputs, states and gradients."""
    mixer = build(name)
    for x in (torch.ones(1, 36, DIM), *(size * torch.randn(1, 36, DIM) for size in (0.0, 1e-20, 1e-38, 1e-42))):
        x.requires_grad_()
        y, state = mixer(x)
        grads = torch.autograd.grad(y.square().mean() + y.sum(), [x, *mixer.parameters()], allow_unused=True)
        assert y.isfinite().all() and all(t.isfinite().all() for t in state.tensors())
        assert all(g.isfinite().all() for g in grads if g is not None)


def test_yaad_of_long_errors_at_any_split():
    """As printed, signs of small coordinates make it chaotic: gradients of 1e17 here, and 6 % off."""
    memory = NeuralMemory(32, 2, "yaad")
    x = (30.0 * torch.randn(1, 1500, 32)).requires_grad_()
    y, _ = memory(x)
    grads = torch.autograd.grad(y[:, -8:].sum(), [x, *memory.parameters()], allow_unused=True)
    assert all(g.abs().max() < 1e5 for g in grads if g is not None)
    with torch.no_grad():
        first, state = memory(x[:, :711])
        second, _ = memory(x[:, 711:], state)
    assert (torch.cat([first, second], 1) - y).norm() < 1e-5 * y.norm()


@pytest.mark.parametrize("name", ["omeganet", "atlas", "tnt"])
def test_an_empty_batch(name):
    assert layer(name)(torch.randn(0, 40, 16))[0].shape == (0, 40, 16)
    y, state = layer(name)(torch.randn(0, 5, 16))
    assert y.shape == (0, 5, 16) and state.memory.weights[0].shape[0] == 0


def test_an_empty_batch_of_self_modifying_memories():
    assert SelfModifyingMemory(16, 2)(torch.randn(0, 5, 16))[0].shape == (0, 5, 16)


@pytest.mark.parametrize("name", ["gated-deltanet", "titans", "omeganet", "moneta"])
def test_gradients_of_each_sequence_by_vmap(name):
    torch.manual_seed(0)
    memory = OmegaMemory(4, 2, name).double()
    q, k, v = (torch.randn(3, 1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    _, state = memory(q[0], k[0], v[0])

    def loss(q, k, v):
        return memory(q, k, v, state=state)[0].square().sum()

    gradient = torch.func.grad(loss, (0, 1, 2))
    together = torch.func.vmap(gradient)(q, k, v)
    for alone, row in zip(zip(q, k, v, strict=True), zip(*together, strict=True), strict=True):
        torch.testing.assert_close(row, gradient(*alone))


@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas"])
def test_a_jacobian_of_a_layer(name):
    memory = NeuralMemory(8, 2, name, chunk_size=4).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)

    def sums(x):
        return memory(x)[0].sum((0, 1))

    torch.testing.assert_close(torch.func.jacrev(sums)(x), torch.autograd.functional.jacobian(sums, x))
