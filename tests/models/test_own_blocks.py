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
        (Before, r"BLOCKS\['mine'\] must be a Mixer, got <class '.*Before'>: BLOCKS\['mine'\] = Mixer"),
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
        (Alone, r"Alone must return \(y, state\) for each call, got a Tensor"),
        (OneToken, r"OneToken must return y \[batch, time, dim\] as x is, \[2, 6, 8\]; got \[2, 1, 8\]"),
        (Stateless, "Stateless must return a State beside y, got a NoneType"),
        (BatchLast, r"BatchLast must have the batch of 2 first in every tensor of its state, got x \[1, 2\]"),
    ],
)
def test_when_it_first_answers(register, kind, message, training):
    register(Mixer(kind, memory=False, window=False))
    with pytest.raises(ValueError, match=message):
        model().train(training)(input_ids=torch.randint(258, (2, 6)))


<<<<<<< HEAD
=======
class Forgets(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return super().forward(x)


class InItself(Before):
    kept: Any = None

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        y, self.kept = super().forward(x, None if state is None else self.kept)
        return y, self.kept


class Draws(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return super().forward(x + torch.rand(()), state)


class InPlace(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        y, after = super().forward(x, state)
        y = y.clone()
        if state is not None and x.shape[1]:
            state.x.copy_(x[:, -1:])
        return y, after


class Future(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        y, after = super().forward(x, state)
        return y.flip(1), after


class RowsMeet(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return super().forward(x - x.mean(0), state)


class Zero(Before):
    """Begins with zero, and forgets."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.gain = torch.nn.Parameter(torch.zeros(dim))

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        y, after = super().forward(x)
        return self.gain * y, after


class InDouble(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        y, after = super().forward(x, state)
        return y.double(), after


@pytest.mark.parametrize(
    "kind,message",
    [
        (InDouble, "InDouble must answer in the dtype of x, here torch.float32, got torch.float64"),
        (Forgets, "Forgets answers otherwise when it reads 6 tokens in 3 calls than in one"),
        (InItself, "InItself answers otherwise when it reads 6 tokens in 3 calls.*keep nothing in itself"),
        (Draws, "Draws answers otherwise when it is called again: it must draw nothing in eval mode"),
        (InPlace, "InPlace changes in place the state that it is given"),
        (Future, "Future sees the future"),
        (RowsMeet, "RowsMeet answers a row otherwise when other rows are beside it"),
        (Zero, "Zero answers otherwise when it reads 6 tokens in 3 calls than in one"),
    ],
)
def test_what_it_computes_when_the_model_is_made(register, kind, message):
    register(Mixer(kind, memory=False, window=False))
    with pytest.raises(ValueError, match=message):
        model()


class KnowsNoPadding(Before):
    pass


def test_one_that_knows_no_padding_is_warned_of(register):
    register(Mixer(KnowsNoPadding, memory=False, window=False))
    with pytest.warns(UserWarning, match="KnowsNoPadding does not answer as if padding, .*Stateful.forward_masked"):
        model()


class SomeTokens(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        x[:, 0]
        return super().forward(x, state)


class Deaf(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return super().forward(x.detach(), state)


@pytest.mark.parametrize(
    "kind,message",
    [
        (SomeTokens, r"SomeTokens fails for x \[batch, time, dim\] of no tokens, time 0.*index 0 is out of bounds"),
        (Deaf, "Deaf lets no gradient through from y to x"),
    ],
)
def test_what_it_cannot_do_is_warned_of(register, kind, message):
    register(Mixer(kind, memory=False, window=False))
    with pytest.warns(UserWarning, match=message):
        model()


class OnlyElsewhere(Before):
    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        raise RuntimeError("no GPU here")


def test_one_that_cannot_run_here_is_made(register):
    register(Mixer(OnlyElsewhere, memory=False, window=False))
    net = model()
    with pytest.raises(RuntimeError, match="no GPU here"):
        net(input_ids=torch.randint(258, (2, 6)))


>>>>>>> 87dd4d2 (Layers by the field's words: packed rows, right padding, segment layout, non-finite inputs; one forward for all mixers with a memory, one for both attentions)
class Fixed(Stateful):
    """Weights tokens by fixed numbers that are not saved; a branch begins at zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.out = dim, torch.nn.Linear(dim, dim)
        self.register_buffer("scale", self.numbers(), persistent=False)
        self.reset_parameters()

    def numbers(self) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, self.dim)

    def reset_parameters(self) -> None:
        torch.nn.init.eye_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        x = x if mask is None else x * mask[..., None]
        return self.out(self.scale * x), Last(x.new_zeros(len(x), 1))


class Drawn(Fixed):
    def numbers(self) -> torch.Tensor:
        return torch.rand(self.dim)


def test_buffers_that_are_not_saved_and_weights_that_begin_otherwise(register, tmp_path):
    register(Mixer(Fixed, memory=False, window=False))
    net = model().eval()
    mixer = net.get_submodule("model.layers.0.mixer")
    assert torch.equal(mixer.out.weight, torch.eye(8)) and not mixer.out.bias.any()
    net.save_pretrained(tmp_path)
    loaded, ids = AtlasForCausalLM.from_pretrained(tmp_path).eval(), torch.randint(258, (2, 6))
    assert torch.equal(loaded.get_submodule("model.layers.0.mixer").scale, mixer.scale)
    assert torch.equal(loaded(input_ids=ids).logits, net(input_ids=ids).logits)
    register(Mixer(Drawn, memory=False, window=False))
    with pytest.raises(ValueError, match=r"the buffer scale is drawn at random and not saved.*persistent=True"):
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
