"""How memories are computed, not what: recomputation, compilation, and what a state keeps alive."""

import shutil
from functools import partial

import pytest
import torch
from torch._dynamo import config as dynamo

from atlas_memory import NeuralMemory, OmegaMemory, compile_options, set_execution
from atlas_memory.layers.attention import FullAttention
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.hope import SelfModifyingMemory
from atlas_memory.layers.tnt import Hierarchy
from atlas_memory.memory import RULES, Gates, chunkwise
from atlas_memory.ops.chunkwise import begin, end, read_on
from atlas_memory.ops.compiling import compiled_for_rule

DIM, HEADS = 16, 2
LAYERS = {
    "omeganet": {"rule": "omeganet", "chunk_size": 4},
    "atlas": {"rule": "atlas", "chunk_size": 4},
    "memora": {"rule": "memora", "chunk_size": 4},
    "gated-deltanet": {"rule": "gated-deltanet", "chunk_size": 4},
    "deeptransformer": {"rule": "deeptransformer", "chunk_size": 4},
    "tnt": {"rule": "tnt", "hierarchy": Hierarchy(8, (4,), 8)},
}


def layer(name: str) -> NeuralMemory | SelfModifyingMemory:
    torch.manual_seed(0)
    if name == "hope":
        return SelfModifyingMemory(DIM, HEADS, chunk_size=4).double()
    return NeuralMemory(DIM, HEADS, **LAYERS[name]).double()


def results(memory, x, mask=None, before=None):
    """Outputs, state, and the gradients of x and all parameters."""
    x = x.clone().requires_grad_()
    y, state = memory(x, before, mask)
    leaves = [x, *memory.parameters()]
    grads = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True, materialize_grads=True)
    held = []
    state.map(lambda t: held.append(t) or t)
    return [y, *held, *grads]


@pytest.mark.parametrize("name", [*LAYERS, "hope"])
def test_recomputation_changes_nothing(name):
    """Also where rows are padded, where the last group and the last chunk are not full, and from a state whose rows
    stand at different places of their chunks."""
    memory, x = layer(name), torch.randn(2, 27, DIM, dtype=torch.float64)
    mask = torch.ones(2, 27)
    mask[1, 13:] = 0
    with torch.no_grad():
        carried = memory(torch.randn(2, 7, DIM, dtype=torch.float64), mask=mask[:, 9:16])[1]
    for real, before in ((None, None), (mask, None), (None, carried), (mask, carried)):
        expected = results(memory, x, real, before)
        for groups in (1, 3):
            set_execution(memory, recompute=groups)
            # From this state an ulp of x moves memora's gradients by 3e-10.
            for a, b in zip(results(memory, x, real, before), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10 if before is None else 1e-9)
            set_execution(memory)


def saved_bytes(memory, x) -> int:
    """Of all distinct tensors that the backward pass has been given to keep, parameters apart."""
    held, own = {}, {p.data_ptr() for p in memory.parameters()}

    def pack(t):
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        memory(x)[0].sum()
    return sum(size for at, size in held.items() if at not in own)


ULP = {"rtol": torch.finfo(torch.float32).eps, "atol": 1e-9}
IN_FLOAT64 = RULES["atlas"].vary(optimiser={"normalised": False}, window={"chunk": 4})


def test_recomputation_in_lower_precision():
    """What passes from group to group is not rounded to float32 where Newton-Schulz works in float64: all that the
    memory returns, and gradients, differ by an ulp at most."""
    memory, leaves = OmegaMemory(DIM, HEADS, IN_FLOAT64), torch.randn(3, 2, HEADS, 27, DIM, requires_grad=True)

    def everything() -> list[torch.Tensor]:
        y, state = memory(*leaves)
        held = []
        state.map(lambda t: held.append(t) or t)
        own = [memory.sqrt_a, *memory.initial]
        return [y, *held, *torch.autograd.grad(y.sin().sum(), [leaves, *own])]

    expected = everything()
    set_execution(memory, recompute=1)
    for a, b in zip(everything(), expected, strict=True):
        torch.testing.assert_close(a, b, **ULP)


def test_groups_in_lower_precision():
    """As above of the way by which a layer reads in groups."""
    memory, (q, k, v) = OmegaMemory(DIM, HEADS, IN_FLOAT64), torch.randn(3, 2, HEADS, 27, DIM)
    eta = torch.rand(2, HEADS, 27)
    expected, last = chunkwise(memory.rule, memory.params, q, k, v, Gates(eta))
    params, reading = begin(memory.rule, memory.params, q[:, :, :0], None)
    outputs = []
    for part in zip(*(x.split(4, 2) for x in (q, k, v, eta)), strict=True):
        y, reading = read_on(memory.rule, False, params, reading, *part[:3], Gates(part[3]))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, **ULP)
    held = [[], []]
    for tensors, state in zip(held, (last, end(reading, q)), strict=True):
        state.map(lambda t, tensors=tensors: tensors.append(t) or t)
    for a, b in zip(*held, strict=True):
        torch.testing.assert_close(a, b, **ULP)


def test_recomputation_of_a_layer_in_lower_precision():
    """To 1e-6 of the largest entry, since projections add up in float32."""
    memory, x = NeuralMemory(DIM, HEADS, IN_FLOAT64), torch.randn(2, 27, DIM)
    expected = results(memory, x)
    set_execution(memory, recompute=1)
    for a, b in zip(results(memory, x), expected, strict=True):
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a / size, b / size, rtol=1e-6, atol=1e-6)


def test_what_recomputation_keeps_of_self_modifying_memories():
    """A state of all five a group; projections and convolution outside are kept as ever."""
    memory, x = layer("hope"), torch.randn(1, 256, DIM, dtype=torch.float64, requires_grad=True)
    everything = saved_bytes(memory, x)
    set_execution(memory, recompute=8)
    state = memory(x[:, :1].detach())[1].nbytes
    assert saved_bytes(memory, x) < min(everything / 8, 256 // (8 * 4) * state + 16 * x.nbytes)


def test_what_recomputation_keeps():
    """A memory state a group and the inputs, where otherwise every token has its activations kept."""
    memory, x = layer("omeganet"), torch.randn(1, 256, DIM, dtype=torch.float64, requires_grad=True)
    everything = saved_bytes(memory, x)
    set_execution(memory, recompute=8)
    assert saved_bytes(memory, x) < everything / 8
    longer = torch.randn(1, 512, DIM, dtype=torch.float64, requires_grad=True)
    state = memory(x[:, :1].detach())[1].nbytes
    assert saved_bytes(memory, longer) - saved_bytes(memory, x) <= x.nbytes + 256 // (8 * 4) * state


@pytest.mark.extended
@pytest.mark.parametrize("name", ["omeganet", "atlas", "tnt", "hope"])
def test_one_graph_and_no_other_when_numbers_change(name):
    """``torch.compile(fullgraph=True)``, forward and backward, from a fresh memory; other inputs, and so other gates
    and rates, give no new graph."""
    memory, x = layer(name), torch.randn(2, 8, DIM, dtype=torch.float64)
    torch.compiler.reset()
    whole = torch.compile(memory, fullgraph=True, backend="aot_eager", dynamic=False)
    x = x.requires_grad_()
    y, y0 = whole(x)[0], memory(x)[0]
    torch.testing.assert_close(y, y0, rtol=1e-9, atol=1e-10)
    leaves = [x, *memory.parameters()]
    grads = [torch.autograd.grad(z.sin().sum(), leaves, allow_unused=True, materialize_grads=True) for z in (y, y0)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    with dynamo.patch(error_on_recompile=True):
        whole(3.0 * x)[0].sum().backward()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["omeganet", "atlas", "lact"])
def test_a_compiled_step_at_any_phase(name):
    """One graph decodes rows that stand at different places of their chunks, through several chunks."""
    torch.manual_seed(0)
    memory = layer(name) if name in LAYERS else NeuralMemory(DIM, HEADS, name, chunk_size=4).double()
    mask = torch.ones(3, 9)
    mask[1, 2:] = mask[2, 7:] = 0
    torch.compiler.reset()
    step = torch.compile(memory, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.inference_mode():
        state = memory(torch.randn(3, 9, DIM, dtype=torch.float64), mask=mask)[1]
        seen = state.memory.seen % 4
        assert len(set(seen.tolist())) == 3
        ours = state
        for t in range(10):
            x = torch.randn(3, 1, DIM, dtype=torch.float64)
            with dynamo.patch(error_on_recompile=t > 1):  # the first state was made by another function
                y, ours = step(x, ours)
            expected, state = memory(x, state)
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="compiling needs a C++ compiler")
@pytest.mark.parametrize(
    "make", [partial(NeuralMemory, rule="lact", chunk_size=16), partial(SelfModifyingMemory, chunk_size=8)]
)
def test_compiled_chunks(make):
    """LaCT's gate at sizes that are vectorised in two directions met PyTorch's issue 185702 (compiling.py). Of Hope,
    what its memories make of a chunk is compiled with it."""
    torch.manual_seed(0)
    memory, x = make(32, 2).double(), torch.randn(1, 17, 32, dtype=torch.float64)
    expected = results(memory, x)
    set_execution(memory, compiled=True)
    for a, b in zip(results(memory, x), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.extended
def test_gradients_of_a_compiled_layer_in_float32():
    """Compared in float32, in which the compiler computes slopes anew for the backward pass, and not to the bit."""
    memory, x = NeuralMemory(32, 2, "titans"), torch.randn(2, 16, 32)

    def gradients(call) -> list[torch.Tensor]:
        return list(torch.autograd.grad(call(x)[0].square().sum(), list(memory.parameters())))

    expected = gradients(memory)
    for a, b in zip(gradients(torch.compile(memory, options=compile_options())), expected, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.extended
def test_compiled_chunks_are_compiled_once_for_all_lengths(monkeypatch):
    """Once for a call's first chunk, whose momentum is no function of anything, and once for all others."""
    compiled = torch.compile  # the compiler's own code takes ten times as long
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, backend="aot_eager", dynamic=False))
    compiled_for_rule.cache_clear()
    memory = NeuralMemory(16, 2, rule="titans", chunk_size=4).double()
    texts = [torch.randn(2, time, 16, dtype=torch.float64) for time in (12, 20, 8, 28)]
    expected = [results(memory, x) for x in texts]
    set_execution(memory, compiled=True)
    for index, (x, of_x) in enumerate(zip(texts, expected, strict=True)):
        with dynamo.patch(error_on_recompile=index > 0):
            for a, b in zip(results(memory, x), of_x, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    compiled_for_rule.cache_clear()


def test_a_state_keeps_nothing_else_alive():
    """What was sliced from the inputs must not keep them: a state's size is what it says it is."""
    memory = layer("omeganet")
    with torch.no_grad():
        state = memory(torch.randn(1, 100, DIM, dtype=torch.float64))[1]
    held = []
    state.map(lambda t: held.append(t) or t)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    assert sum(storages.values()) <= state.nbytes


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="recompute, a number of chunks, must be an integer >= 1, got 0"):
        set_execution(layer("omeganet"), recompute=0)
    with pytest.raises(ValueError, match="FullAttention has no memory"):
        set_execution(FullAttention(16, 2), compiled=True)


@pytest.mark.extended
def test_a_memory_as_context_is_compiled():
    """It reads no tokens once, to begin with, which a compiler looks at too."""
    torch.compiler.reset()
    mixer, x = BLOCKS["mac"].make(16, 2, rule="titans", attention_window=4), torch.randn(1, 6, 16)
    torch.testing.assert_close(torch.compile(mixer, backend="eager")(x)[0], mixer(x)[0])
