"""A block of one's own that does not fit is refused by name: when the model is made, or when it first answers."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from atlas_memory import AtlasConfig, AtlasForCausalLM
from atlas_memory.layers.blocks import BLOCKS, Mixer
from atlas_memory.layers.stateful import Stateful
from atlas_memory.memory import State
from atlas_memory.models.cache import AtlasCache
from atlas_memory.train.tbptt import TBPTTStates


@dataclass(frozen=True, repr=False)
class Last(State):
    x: torch.Tensor


class Before(Stateful):
    """Every token is answered with the one before it. It has no parameters."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        before = torch.cat([x.new_zeros(len(x), 1, self.dim) if state is None else state.x, x], 1)
        return before[:, :-1], Last(before[:, -1:])


class Plain(torch.nn.Linear):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, dim)


class NoWidth(Stateful):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()


class WithoutMask(Before):
    def forward(self, x: Any, state: Any = None) -> Any:
        return x, Last(x)


class Alone(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return x


class OneToken(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return x[:, :1], Last(x)


class Stateless(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return x, None


class BatchLast(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return x, Last(x.new_zeros(1, len(x)))


@pytest.fixture
def register(monkeypatch):
    return lambda kind: monkeypatch.setitem(BLOCKS, "mine", kind)


def model() -> AtlasForCausalLM:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    return AtlasForCausalLM(AtlasConfig(block="mine", **sizes))


def test_one_without_parameters_works_everywhere(register):
    register(Mixer(Before, memory=False, window=False))
    net, ids = model(), torch.randint(258, (2, 6))
    net.eval().generate(ids, max_new_tokens=3, num_beams=2, do_sample=False)
    cache = AtlasCache(1)
    with torch.no_grad():
        parts = [net(input_ids=part, past_key_values=cache).logits for part in ids.split([2, 4], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), net(input_ids=ids).logits)
    states = TBPTTStates(net.train(), batch=2)
    for _ in range(2):
        net(input_ids=ids, labels=ids, past_key_values=states.next_cache()).loss.backward()


@pytest.mark.parametrize(
    "kind,message",
    [
        (Before, r"BLOCKS\['mine'\] must be a Mixer.*, got <class '.*Before'>"),
        (Mixer(Plain, memory=False, window=False), "block='mine': Plain must derive from Stateful"),
        (Mixer(NoWidth, memory=False, window=False), "block='mine': NoWidth must set self.dim .* 8"),
        (Mixer(WithoutMask, memory=False, window=False), "WithoutMask.forward must take x, state and mask"),
        (
            Mixer(Before),
            "could not be made with the options attention_window, persistent_tokens.*memory=True, window=True",
        ),
    ],
)
def test_when_the_model_is_made(register, kind, message):
    register(kind)
    with pytest.raises(ValueError, match=message):
        model()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "kind,message",
    [
        (Alone, r"Alone must return \(y, state\), .* got a Tensor"),
        (OneToken, r"OneToken must return \(y, state\), .* as x is, \[2, 6, 8\]; got \[2, 1, 8\]"),
        (Stateless, "Stateless must return a State .* beside y, got a NoneType"),
        (BatchLast, r"BatchLast must have the batch of 2 first in x of its state, got \[1, 2\]"),
    ],
)
def test_when_it_first_answers(register, kind, message, training):
    register(Mixer(kind, memory=False, window=False))
    with pytest.raises(ValueError, match=message):
        model().train(training)(input_ids=torch.randint(258, (2, 6)))


class Branch(Stateful):
    """A branch that begins at zero, and a buffer."""

    def __init__(self, dim: int, heads: int, saved: bool = True) -> None:
        super().__init__()
        self.dim, self.out = dim, torch.nn.Linear(dim, dim)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, dim), persistent=saved)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.eye_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        x = x if mask is None else x * mask[..., None]
        return self.out(self.scale * x), Last(x.new_zeros(len(x), 1))


def test_buffers_are_saved_and_weights_begin_as_the_block_says(register, tmp_path):
    register(Mixer(Branch, memory=False, window=False))
    net = model().eval()
    mixer = net.get_submodule("model.layers.0.mixer")
    assert torch.equal(mixer.out.weight, torch.eye(8)) and not mixer.out.bias.any()
    net.save_pretrained(tmp_path)
    loaded, ids = AtlasForCausalLM.from_pretrained(tmp_path).eval(), torch.randint(258, (2, 6))
    assert torch.equal(loaded(input_ids=ids).logits, net(input_ids=ids).logits)
    register(Mixer(lambda dim, heads: Branch(dim, heads, saved=False), memory=False, window=False))
    with pytest.raises(ValueError, match=r"buffers that are not saved with the model, scale: .*persistent=True"):
        model()


def test_what_is_not_registered_says_how_it_is():
    with pytest.raises(ValueError, match=r"block='mine' is unknown; .*BLOCKS\['mine'\] = Mixer\(...\)"):
        AtlasConfig(block="mine")
    with pytest.raises(ValueError, match=r"rule='mine' is unknown; .*RULES\['mine'\] = Rule\(...\)"):
        AtlasConfig(rule="mine")
    with pytest.raises(ValueError, match=r"optimiser has no kind 'Mine'; .*KINDS\['optimiser'\] \+= \(Mine,\)"):
        AtlasConfig(rule_options={"optimiser": {"kind": "Mine"}})


@dataclass(frozen=True, repr=False)
class Nothing(State):
    pass


class Pointwise(Stateful):
    """What remembers nothing."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return x.square() if mask is None else x.square() * mask[..., None], Nothing()


def test_one_that_remembers_nothing_works_everywhere(register, tmp_path):
    register(Mixer(Pointwise, memory=False, window=False))
    net, ids = model().eval(), torch.randint(256, (2, 9))
    whole = net(input_ids=ids, use_cache=True)
    starts = torch.zeros_like(ids[:, 4:])
    starts[:, 2] = 1
    cache = net(input_ids=ids[:, :4], use_cache=True).past_key_values
    after = net(input_ids=ids[:, 4:], past_key_values=cache, document_starts=starts)
    torch.testing.assert_close(after.logits, whole.logits[:, 4:])
    assert net.generate(ids, max_new_tokens=2, num_beams=2, do_sample=False).shape == (2, 11)
    mixer = net.get_submodule("model.layers.0.mixer")
    mixer.save_state(mixer.initial_state(), tmp_path / "state")
    assert isinstance(mixer.load_state(tmp_path / "state"), Nothing)
