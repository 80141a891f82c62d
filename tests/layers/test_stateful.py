"""States: what is printed of them, the one before the first token, and files."""

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from atlas_memory import RULES, NeuralMemory, OmegaMemory
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.omega_memory import set_execution
from atlas_memory.layers.tnt import HierarchicalMemory, Hierarchy
from atlas_memory.memory import State
from atlas_memory.train.distributed import destroy_process_group

DIM, HEADS = 16, 2
OPTIONS = {"rule": "titans", "chunk_size": 4}
LAYERS = {
    "lmm": ("lmm", OPTIONS),
    "persistent": ("lmm", OPTIONS | {"persistent_tokens": 2}),
    "dot": ("lmm", {"rule": "dot", "window": 2, "chunk_size": 4}),
    "tnt": ("lmm", {"rule": "tnt", "hierarchy": {"global_chunk": 8, "local_chunks": [4], "shard": 8}}),
    "mag": ("mag", OPTIONS | {"attention_window": 4}),
    "mal": ("mal", OPTIONS | {"attention_window": 4}),
    "mac": ("mac", OPTIONS | {"attention_window": 4}),
    "hope": ("hope", {"rule": "hope", "chunk_size": 4}),
    "swa": ("swa", {"attention_window": 4}),
    "attention": ("attention", {}),
}


def layer(name):
    torch.manual_seed(0)
    block, options = LAYERS[name]
    return BLOCKS[block].make(DIM, HEADS, **options).double()


@pytest.mark.parametrize("name", LAYERS)
def test_before_the_first_token(name):
    memory, x = layer(name), torch.randn(3, 9, DIM, dtype=torch.float64)
    y, end = memory(x)
    y2, end2 = memory(x, memory.initial_state(3))
    torch.testing.assert_close(y2, y, rtol=1e-9, atol=1e-9)
    for a, b in zip(end2.tensors(), end.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_in_a_file(name, tmp_path):
    memory, x = layer(name), torch.randn(3, 9, DIM, dtype=torch.float64)
    _, state = memory(x)
    memory.save_state(state, tmp_path / "state.safetensors")
    again = memory.load_state(tmp_path / "state.safetensors")
    assert type(again) is type(state)
    for (n, a), (m, b) in zip(again.named_tensors(), state.named_tensors(), strict=True):
        assert n == m and a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(memory(x, again)[0], memory(x, state)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("name", LAYERS)
def test_a_state_in_a_checkpoint_of_your_own(name, tmp_path):
    """``torch.save`` beside anything else; ``torch.load`` runs no code of such a file. States are compared by what they
    are, as tensors and modules are in a dictionary."""
    state = layer(name).initial_state(2).detach()
    torch.save({"step": 3, "state": state}, tmp_path / "own.pt")
    again = torch.load(tmp_path / "own.pt", weights_only=True)["state"]
    assert type(again) is type(state) and repr(again) == repr(state)
    assert all(torch.equal(a, b) for a, b in zip(again.tensors(), state.tensors(), strict=True))
    assert state in [state] and again not in [state]


def test_a_state_on_another_device():
    state = layer("mag").initial_state().to("meta")
    assert {t.device.type for t in state.tensors()} == {"meta"}
    assert {t.dtype for t in state.tensors()} == {torch.float64, torch.int64}


@pytest.mark.parametrize("batch", [-1, 2.0, True, torch.zeros(2, 3)])
def test_a_batch_that_is_none_is_named(batch):
    with pytest.raises(ValueError, match="batch must be a whole number of sequences, at least 0, got"):
        layer("lmm").initial_state(batch)


def test_bare_memories():
    for memory in (OmegaMemory(8, 2, "atlas-c1"), HierarchicalMemory(8, 2, "tnt", Hierarchy(8, (4,), shard=8))):
        state = memory.initial_state(5)
        assert state.seen.tolist() == [0] * 5


def test_what_does_not_fit_is_named(tmp_path):
    memory, path = NeuralMemory(DIM, HEADS, "titans"), tmp_path / "s"
    _, state = memory(torch.randn(1, 5, DIM))
    memory.save_state(state, path)
    with pytest.raises(FileNotFoundError, match="t"):
        memory.load_state(tmp_path / "t")
    with pytest.raises(ValueError, match=r"of another layer: .*; in this NeuralMemory: .*size=8"):
        NeuralMemory(DIM, HEADS, "omeganet").load_state(path)
    with pytest.raises(
        ValueError,
        match=r"s holds a state of another layer: window=Window\([^;]*chunk=\d+[^;]*\); in this NeuralMemory: "
        r"window=Window\([^;]*chunk=4[^;]*\)$",
    ):
        NeuralMemory(DIM, HEADS, "titans", chunk_size=4).load_state(path)
    with pytest.raises(ValueError, match=r"memory\.matrices\.0\.weights \[1, 2, 32, 8\]"):
        NeuralMemory(2 * DIM, HEADS, "titans").load_state(path)
    with pytest.raises(ValueError, match=r"only one has memory\.matrices\.0\.sums\.0"):
        memory.save_state(NeuralMemory(DIM, HEADS, "deltanet")(torch.randn(1, 5, DIM))[1], path)
    with pytest.raises(ValueError, match=r"the state has memory\.matrices\.0\.weights"):  # whose states grow
        NeuralMemory(2 * DIM, 2 * HEADS, "dot").save_state(
            NeuralMemory(DIM, HEADS, "dot")(torch.randn(1, 5, DIM))[1], path
        )
    whole = path.read_bytes()
    for part in (b"", whole[:100], whole[:-10]):
        path.write_bytes(part)
        with pytest.raises(ValueError, match="is no state, or was cut short"):
            memory.load_state(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="holds tensors, but no state"):
        memory.load_state(path)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_that_no_state_has_are_refused(name, tmp_path):
    """In a file, and when one is to be written; each of them in the one tensor or other of every layer's states."""
    memory, path = layer(name), tmp_path / "s"
    _, state = memory(torch.randn(2, 9, DIM, dtype=torch.float64))
    memory.save_state(state, path)
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    floats = [key for key, t in tensors.items() if t.is_floating_point() and t.numel()]
    counts = [key for key, t in tensors.items() if not t.is_floating_point()]
    for i, wrong in enumerate((torch.nan, torch.inf, -torch.inf)):
        key = floats[i % len(floats)]
        changed = tensors | {key: tensors[key].index_fill(0, torch.tensor(1), wrong)}
        save_file(changed, path, metadata=about)
        with pytest.raises(ValueError, match=rf"s has numbers in {re.escape(key)} that are not finite"):
            memory.load_state(path)
        values = iter([changed[n] for n, _ in state.named_tensors()])
        with pytest.raises(ValueError, match=rf"the state has numbers in {re.escape(key)} that are not finite"):
            memory.save_state(state.map(lambda t: next(values)), path)  # noqa: B023
    for wrong in (torch.tensor([9, -1]), torch.tensor([2**60, 9]), torch.tensor([True, False])):
        for key in counts:
            save_file(tensors | {key: wrong}, path, metadata=about)
            with pytest.raises(ValueError, match=rf"s has {re.escape(key)}(=.*counts tokens| of torch.bool)"):
                memory.load_state(path)
    save_file(tensors, path, metadata={"format": about["format"]})
    with pytest.raises(ValueError, match="s holds a state of another layer: a layer that it does not name; in this "):
        memory.load_state(path)
    save_file(tensors, path, metadata=about)
    memory.load_state(path)


@pytest.mark.parametrize("name", LAYERS)
def test_files_across_precisions(name, tmp_path):
    """What was made under autocast can be saved, and what was saved in one precision is read on in another."""
    memory, path = layer(name).float(), tmp_path / "s"
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        _, state = memory(torch.randn(2, 9, DIM))
    memory.save_state(state, path)
    for dtype in (torch.float32, torch.bfloat16):
        other = layer(name).to(dtype)
        again = other.load_state(path)
        fresh = other.initial_state(2)
        assert [t.dtype for t in again.tensors()] == [t.dtype for t in fresh.tensors()]
        assert other(torch.randn(2, 3, DIM, dtype=dtype), again)[0].isfinite().all()


@pytest.mark.parametrize("time", [2, 20])
@pytest.mark.parametrize("name", LAYERS)
def test_a_state_of_another_precision_is_read_on(name, time):
    memory = layer(name)
    _, state = memory(torch.randn(2, 9, DIM, dtype=torch.float64))
    x = torch.randn(2, time, DIM, dtype=torch.float64)
    y, after = memory(x, state)
    again, end = memory(x, state.map(lambda t: t.float() if t.is_floating_point() else t))
    torch.testing.assert_close(again, y, rtol=1e-4, atol=1e-5)
    assert [t.dtype for t in end.tensors()] == [t.dtype for t in after.tensors()]


def test_what_is_no_state_is_refused(tmp_path):
    memory = NeuralMemory(DIM, HEADS, "titans")
    y, state = memory(torch.randn(1, 5, DIM))
    for other in (None, (y, state)):
        with pytest.raises(ValueError, match="state must be what a call of this layer returned beside y"):
            memory.save_state(other, tmp_path / "s")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        memory.save_state(state, tmp_path / "nowhere" / "s")
    hierarchy = layer("tnt").float()
    with pytest.raises(ValueError, match=r"state must be the MemoryState .* got a LayerState"):
        memory.retrieve(torch.randn(1, 2, DIM), state)
    with pytest.raises(ValueError, match=r"state must be the HierarchicalState .* got a LayerState"):
        hierarchy.retrieve(torch.randn(1, 2, DIM), state)
    with pytest.raises(ValueError, match=r"state must be the HierarchicalState .* got a MemoryState"):
        hierarchy(torch.randn(1, 5, DIM), state)
    with pytest.raises(ValueError, match="mask has negative numbers or NaN"):
        memory(torch.randn(1, 2, DIM), mask=torch.tensor([[0.0, -torch.inf]]))
    with pytest.raises(ValueError, match="mask has negative numbers or NaN"):
        memory(torch.randn(1, 2, DIM), mask=torch.tensor([[0, -10_000]]))


@pytest.mark.parametrize("name", LAYERS)
def test_training_on_from_inference_mode(name):
    memory, x = layer(name), torch.randn(1, 5, DIM, dtype=torch.float64)
    expected = memory(x, memory(x)[1].detach())[0]
    with torch.inference_mode():
        _, state = memory(x)
    with pytest.raises(ValueError, match=r"made under torch.inference_mode.* give state.detach\(\)"):
        memory(x, state)
    with torch.no_grad():
        assert torch.equal(memory(x, state)[0], expected)
    y = memory(x, state.detach())[0]
    y.sum().backward()
    assert torch.equal(y, expected)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in memory.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_a_call_without_tokens_or_without_writes_reaches_every_parameter(name):
    memory = layer(name)
    for module in memory.modules():
        if hasattr(module, "writes"):
            module.writes = False
    memory(torch.randn(2, 5, DIM, dtype=torch.float64))[0].sum().backward()
    assert all(p.grad is not None for p in memory.parameters())
    memory = layer(name)
    memory(torch.randn(2, 0, DIM, dtype=torch.float64))[0].sum().backward()
    assert all(p.grad is not None for p in memory.parameters())


@pytest.mark.parametrize(
    "options", [{"gate_rank": 2}, {"rule": RULES["gated-deltanet"].vary(window={"read": "frozen"})}]
)
def test_gates_that_a_call_does_not_use_have_a_gradient(options):
    memory = NeuralMemory(DIM, HEADS, **({"rule": "gated-deltanet"} | options))
    memory(torch.randn(2, 5, DIM))[0].sum().backward()
    assert all(p.grad is not None for p in memory.parameters())


def test_printed_and_detached():
    memory = NeuralMemory(DIM, HEADS, "titans")
    _, state = memory(torch.randn(1, 5, DIM))
    assert "memory.matrices.0.weights=[1, 2, 32, 8]" in repr(state) and "bytes" in repr(state)
    assert len(repr(state)) < 1000
    assert any(t.requires_grad for t in state.tensors())
    assert not any(t.requires_grad for t in state.detach().tensors())
    assert "Momentum" in repr(memory) and "chunk=16" in repr(memory)


def test_what_a_state_cannot_hold_is_named() -> None:
    @dataclass(frozen=True)
    class Counts(State):
        seen: int

    with pytest.raises(TypeError, match="a state holds tensors, other states, None and tuples of these, got 3 in it"):
        Counts(3).map(torch.clone)


@pytest.mark.parametrize("name", ["lmm", "attention", "hope"])
def test_counts_that_were_cast_are_refused(name) -> None:
    layer, x = BLOCKS[name].make(8, 2), torch.randn(2, 6, 8)
    state = layer(x)[1]
    with pytest.raises(ValueError, match=r"seen, which counts tokens, must be int64, .* t.is_floating_point"):
        layer(x, state.map(lambda t: t.double()))
    layer(x, state.map(lambda t: t.double() if t.is_floating_point() else t))


def test_a_context_read_on_in_another_precision_keeps_no_longer_numbers() -> None:
    layer = BLOCKS["mac"].make(8, 2, attention_window=4, rule="titans")
    x = torch.randn(1, 9, 8)
    state = layer.double()(x.double())[1]
    after = layer.float()(x, state)[1]
    assert {t.dtype for t in after.tensors() if t.is_floating_point()} == {torch.float32}


def test_attention_keeps_keys_and_values_alone() -> None:
    state = BLOCKS["attention"].make(8, 2)(torch.randn(1, 50, 8))[1]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in state.tensors())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_masks_and_beside_recomputation() -> None:
    x, mask = torch.randn(2, 40, 8), torch.arange(40) < torch.tensor([[40], [11]])
    memory = NeuralMemory(8, 2, rule="titans")
    each = torch.func.vmap(lambda x, mask: memory(x[None], mask=mask[None])[0][0])(x, mask)
    torch.testing.assert_close(each, memory(x, mask=mask)[0])
    for layer in (memory, BLOCKS["hope"].make(8, 2)):
        gradient = torch.func.grad(lambda x, layer=layer: layer(x)[0].sum())
        expected = gradient(x)
        set_execution(layer, recompute=1)
        torch.testing.assert_close(gradient(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", LAYERS)
def test_transforms_over_states(name) -> None:
    memory, x = layer(name), torch.randn(3, 2, 6, DIM, dtype=torch.float64)
    read = torch.func.vmap(memory)
    _, states = read(x)
    y, states = read(x, states)
    for each, row, state in zip(y, x, zip(*states.tensors(), strict=True), strict=True):
        expected, after = memory(row, memory(row)[1])
        torch.testing.assert_close(each, expected)
        for a, b in zip(state, after.tensors(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_copies(name) -> None:
    """Of states with and without a graph."""
    memory, x = layer(name), torch.randn(2, 6, DIM, dtype=torch.float64)
    _, state = memory(x)
    for given in (state, state.detach()):
        copied = copy.deepcopy(given)
        for a, b in zip(copied.tensors(), given.tensors(), strict=True):
            assert torch.equal(a, b) and (a.data_ptr() != b.data_ptr() or not a.numel())
    torch.testing.assert_close(memory(x, copy.deepcopy(state))[0], memory(x, state)[0])


@pytest.mark.extended
def test_an_exported_layer_reads_on(tmp_path) -> None:
    memory, x = layer("lmm").eval(), torch.randn(2, 6, DIM, dtype=torch.float64)
    _, state = memory(x)
    torch.export.save(torch.export.export(memory, (x, state)), tmp_path / "layer.pt2")
    y, after = torch.export.load(tmp_path / "layer.pt2").module()(x, state)
    expected, end = memory(x, state)
    torch.testing.assert_close(y, expected)
    assert type(after) is type(end)
    for a, b in zip(after.tensors(), end.tensors(), strict=True):
        torch.testing.assert_close(a, b)


def test_of_sharded_weights() -> None:
    """A state before the first token is made from plain tensors, whatever the weights are between calls."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer, x = NeuralMemory(8, 2, rule="titans"), torch.randn(1, 6, 8)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        layer(x)[0].sum().backward()
        y, _ = layer(x, layer.initial_state())
        torch.testing.assert_close(y, layer(x)[0])
    finally:
        destroy_process_group()


def test_in_inference_mode_nothing_is_copied():
    """There a copy would be of the same kind."""
    with torch.inference_mode():
        state = layer("lmm")(torch.randn(1, 5, DIM, dtype=torch.float64))[1]
        kept = state.detach()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(state.tensors(), kept.tensors(), strict=True))
    assert not any(t.is_inference() for t in state.detach().tensors())


def test_a_layer_whose_first_weights_are_packed():
    """As libraries of quantised layers pack them, into integers."""
    memory = layer("swa").float()
    memory.qkv.weight = torch.nn.Parameter(torch.zeros(12, dtype=torch.uint8), requires_grad=False)
    memory.qkv.forward = lambda x: x.repeat(1, 1, 3)
    (x,) = memory.empty_inputs(2)
    assert x.dtype == torch.float32 and memory.initial_state(2).keys.dtype == torch.float32
