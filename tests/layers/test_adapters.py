"""Other libraries put layers of theirs in the place of ours: adapters, and quantised ones."""

import pytest
import torch
from torch import nn

from atlas_memory import NeuralMemory, set_execution
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.titans import MemoryAsContext


class Adapted(nn.Module):
    """A projection with something added to it, whose ``weight`` is that of the base alone, as with LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.added(x)


def adapt(memory: NeuralMemory, adapted: NeuralMemory) -> None:
    adapted.load_state_dict(memory.state_dict())
    adapted.qkv = Adapted(adapted.qkv).double()
    with torch.no_grad():
        memory.qkv.weight += adapted.qkv.added.weight


def test_an_adapter_of_the_projection_is_asked_wherever_the_weight_is():
    torch.manual_seed(0)
    memory, adapted = (NeuralMemory(16, 2, "omeganet", window=2, chunk_size=4).double() for _ in range(2))
    adapt(memory, adapted)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    for one, other in zip(memory(x), adapted(x), strict=True):
        for mine, theirs in zip(*([t] if torch.is_tensor(t) else t.tensors() for t in (one, other)), strict=True):
            torch.testing.assert_close(theirs, mine)
    state = memory(x)[1]
    torch.testing.assert_close(adapted.retrieve(x, state.memory), memory.retrieve(x, state.memory))


class Wrapped(nn.Module):
    """As tutorials of LoRA write it: without a ``weight``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.added(x)


@pytest.mark.parametrize("block", ["lmm", "mag", "mal", "mac", "hope", "swa", "attention"])
def test_a_wrapper_without_a_weight(block):
    torch.manual_seed(0)
    mixer = BLOCKS[block].make(16, 2)
    wrapped = [(parent, name) for parent in mixer.modules() for name in ("qkv", "q") if hasattr(parent, name)]
    assert wrapped
    for parent, name in wrapped:
        if isinstance(getattr(parent, name), nn.Linear):
            setattr(parent, name, Wrapped(getattr(parent, name)))
    x = torch.randn(2, 9, 16)
    y, state = mixer(x)
    mixer(x, state)[0].sum().backward()
    assert y.shape == x.shape
    assert all(m.added.weight.grad.any() for m in mixer.modules() if isinstance(m, Wrapped))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("block", ["lmm", "mag", "mal", "mac", "hope", "swa", "attention"])
def test_norms_that_are_kept_in_float32(block):
    torch.manual_seed(0)
    mixer = BLOCKS[block].make(16, 2).bfloat16()
    x = torch.randn(2, 9, 16).bfloat16()
    expected, _ = mixer(x)
    for module in mixer.modules():
        if isinstance(module, nn.RMSNorm):
            module.float()
    y, state = mixer(x)
    assert y.dtype == mixer(x, state)[0].dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=2e-2, rtol=2e-2)


def test_memory_as_context_with_an_adapter():
    torch.manual_seed(0)
    mixers = [MemoryAsContext(16, 2, attention_window=4, rule="omeganet").double() for _ in range(2)]
    mixers[1].load_state_dict(mixers[0].state_dict())
    adapt(mixers[0].memory, mixers[1].memory)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    torch.testing.assert_close(mixers[1](x)[0], mixers[0](x)[0])


@pytest.mark.filterwarnings("ignore:.*ao.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_a_quantised_layer():
    torch.manual_seed(0)
    memory = NeuralMemory(32, 2, "omeganet", chunk_size=4).eval()
    small = torch.ao.quantization.quantize_dynamic(memory, {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(2, 9, 32)
    y, state = small(x)
    exact = memory(x)[0]
    assert 0 < (y - exact).norm() < 0.1 * exact.norm()
    assert small.retrieve(x, state.memory).isfinite().all()


def test_gradients_through_dropout_in_a_projection_when_groups_are_computed_again():
    torch.manual_seed(0)
    memory = NeuralMemory(16, 2, "gated-deltanet", chunk_size=4).double()
    memory.qkv.register_forward_hook(lambda module, x, y: nn.functional.dropout(y, 0.3))
    x = torch.randn(2, 27, 16, dtype=torch.float64)

    set_execution(memory, recompute=1)
    torch.manual_seed(1)
    loss = memory(x)[0].sin().sum()
    slope = torch.autograd.grad(loss, memory.gate.weight)[0]
    direction, step = torch.randn_like(slope), 1e-5

    def at(shift: float) -> torch.Tensor:
        with torch.no_grad():
            memory.gate.weight += shift * direction
        torch.manual_seed(1)
        value = memory(x)[0].sin().sum().detach()
        with torch.no_grad():
            memory.gate.weight -= shift * direction
        return value

    torch.testing.assert_close((slope * direction).sum(), (at(step) - at(-step)) / (2 * step), rtol=1e-6, atol=1e-7)
