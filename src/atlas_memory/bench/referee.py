"""The claims of "Test-Time Training with KV Binding Is Secretly Linear Attention" (arXiv 2602.21204), as switches.

The paper says that layers of this kind do not memorise: ascending the inner loss works as well as descending it, more
inner steps hurt, queries may be replaced by keys, and writing the last matrix alone, without momentum, is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory.data import Corpus, Tokens, byte_tokenizer
from atlas_memory.layers.neural_memory import NeuralMemory
from atlas_memory.layers.omega_memory import OmegaMemory
from atlas_memory.monitor.hooks import eval_mode
from atlas_memory.rules.gates import Gates, check_range
from atlas_memory.rules.networks import MLP, GatedMLP
from atlas_memory.rules.optimisers import GradientDescent
from atlas_memory.rules.rule import Rule

from .associative_recall import mqar
from .language_training import crops
from .mad import MAD
from .task import Task
from .task_training import accuracy, task_model, train_on


@dataclass(frozen=True)
class Switch:
    """What is changed in every memory of a model.

    Attributes:
        ascent: Steps climb the inner loss: eta is negative.
        scale: Of eta.
        steps: So many steps at each token, on the same window. alpha acts at the first of them.
        keys_as_queries: The memory is asked by its keys.
        last_matrix: Only the last matrix is written, by gradient descent without momentum.
    """

    ascent: bool = False
    scale: float = 1.0
    steps: int = 1
    keys_as_queries: bool = False
    last_matrix: bool = False


SWITCHES: dict[str, Switch] = {
    "as it is": Switch(),
    "ascent": Switch(ascent=True),
    "ascent, eta / 10": Switch(ascent=True, scale=0.1),
    "2 steps a token": Switch(steps=2),
    "keys as queries": Switch(keys_as_queries=True),
    "last matrix, no momentum": Switch(last_matrix=True),
}
"""Each is trained. How a model "as it is" answers with 2 and 4 steps is asked as well."""


class LastMatrix(MLP):
    """An MLP whose earlier matrices take no steps; its last one takes steps as large as in an `MLP`."""

    @property
    def shares(self) -> tuple[float, ...]:
        return _last(super().shares)


class LastGatedMatrix(GatedMLP):
    """The same of a `GatedMLP`."""

    @property
    def shares(self) -> tuple[float, ...]:
        return _last(super().shares)


def _last(shares: tuple[float, ...]) -> tuple[float, ...]:
    return (1e-12,) * (len(shares) - 1) + shares[-1:]


class AscendingGates(Gates):
    """Gates whose eta may be negative."""

    def check(self, q: Tensor, size: int) -> None:
        check_range("eta", -self.eta.detach())
        replace(Gates(-self.eta), alpha=self.alpha, theta=self.theta, gamma=self.gamma).check(q, size)


class SwitchedMemory(OmegaMemory):
    """An `OmegaMemory` with a `Switch`. It holds the parameters of the memory that it is made of."""

    def __init__(self, memory: OmegaMemory, switch: Switch) -> None:
        self.plain: Rule = memory.plain if isinstance(memory, SwitchedMemory) else memory.rule
        super().__init__(memory.dim, memory.heads, switched_rule(self.plain, switch), gates=False)
        self.switch = switch
        self.initial, self.sqrt_a = memory.initial, memory.sqrt_a
        self.norm_gain, self.norm_shift = memory.norm_gain, memory.norm_shift

    def reads_in_groups(self, x: Tensor) -> bool:
        """Never: groups would be read without the switch."""
        return False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates | None = None,
        state: Any = None,
        *,
        checked: bool = False,
    ) -> tuple[Tensor, Any]:
        """As of `OmegaMemory`."""
        assert gates is not None
        n = self.switch.steps
        q = k if self.switch.keys_as_queries else q
        if n > 1:
            q, k, v = (x.repeat_interleave(n, 2) for x in (q, k, v))
            gates = self._repeated(gates)
        gates = replace(gates, eta=self.switch.scale * gates.eta)
        if self.switch.ascent:
            given = (gates.alpha, gates.theta, gates.gamma, gates.delta, gates.length)
            gates = AscendingGates(-gates.eta, *given)
        y, state = super().forward(q, k, v, gates, state, checked=checked)
        return y[:, :, n - 1 :: n], state

    def _repeated(self, gates: Gates) -> Gates:
        """The gates of every copy of a token, of which each has the window of the token: one copy of each in it."""
        n, time = self.switch.steps, gates.eta.shape[2]
        again = gates.map(lambda gate: gate.repeat_interleave(n, 2) if gate.dim() > 2 else gate * n)
        alpha = again.alpha
        if alpha is not None:
            first = torch.arange(time * n, device=alpha.device) % n == 0
            alpha = alpha.where(first.view(-1, *[1] * (alpha.dim() - 3)), 1.0)
        gamma = again.gamma
        if gamma is not None:
            copy = torch.arange(time * n, device=gamma.device)[:, None] % n
            place = torch.arange(self.rule.window.size, device=gamma.device)
            older = (place + n - 1 - copy) // n  # tokens behind
            counts = (place == 0) | ((place > copy) & ((place - copy - 1) % n == 0))  # the last copy of each
            counts &= older < self.plain.window.size
            index = older.clamp_max(self.plain.window.size - 1)
            gamma = gamma.gather(-1, index.expand(*gamma.shape[:3], -1)) * counts
        return replace(again, alpha=alpha, gamma=gamma)


def switched_rule(rule: Rule, switch: Switch) -> Rule:
    """The rule of a memory with a switch: windows of several tokens, and chunks, count copies."""
    n, size = switch.steps, rule.window.size
    rule = rule.vary(window={"size": size * n if size > 1 else 1, "chunk": rule.window.chunk * n})
    if switch.last_matrix:
        of = {field.name: getattr(rule.network, field.name) for field in fields(rule.network)}
        kind = {"MLP": LastMatrix, "GatedMLP": LastGatedMatrix}.get(type(rule.network).__name__)
        if kind is None:
            raise ValueError(f"a {type(rule.network).__name__} has one matrix, and no other that would not be written")
        rule = replace(rule, network=kind(**of), optimiser=GradientDescent(normalised=rule.optimiser.normalised))
    return rule


def switch_memories(model: nn.Module, switch: Switch) -> nn.Module:
    """The model itself, with the switch in each of its memories, in the place of an earlier one.

    Raises:
        ValueError: it has no memory, or only those of a hierarchy.
    """
    found = 0
    for layer in model.modules():
        if isinstance(layer, NeuralMemory) and isinstance(layer.memory, OmegaMemory):
            layer.memory, found = SwitchedMemory(layer.memory, switch), found + 1
    if not found:
        raise ValueError("the model has no memories to switch: take a rule, and no hierarchy")
    return model


TASKS = ("mqar", "noisy-recall", "bytes")
MQAR = {"8/64": mqar(8, 64), "16/64": mqar(16, 64), "32/128": mqar(32, 128)}
NOISY = next(task for task in MAD if task.name == "noisy-recall")
WIDTH, TEXT_WIDTH, HEAD, ASKED = 32, 64, 16, 128
CROP, READ, STREAMS = 128, 512, 64  # bytes to train on, to read in the evaluation, and how many such texts


def run(cell: dict[str, Any], settings: dict[str, Any]) -> dict[str, float]:
    """Train a rule with a switch on a task; the share of right answers, or bits per byte; and, of a model as it is,
    the same with more steps a token than it was trained with."""
    rule, switch, task, seed = cell["rule"], SWITCHES[cell["switch"]], cell["task"], cell["seed"]
    torch.manual_seed(seed)
    of_text = task == "bytes"
    corpus = Corpus.load(None) if of_text else None
    questions = MQAR if task == "mqar" else {task: NOISY}
    trained = [_bytes(corpus)] if of_text else list(questions.values())
    width, steps = (TEXT_WIDTH if of_text else WIDTH), settings["steps"][task]
    model = switch_memories(task_model(rule, trained[0].vocab_size, width, HEAD), switch)
    train_on(model, trained, steps, settings["tokens"], settings["learning_rate"][task], seed)

    def asked() -> dict[str, float]:
        if corpus is not None:
            return {"bits": held_out_bits(model, corpus)}
        return {name: accuracy(model, one, ASKED, 99) for name, one in questions.items()}

    numbers = asked()
    if switch == Switch():
        for more in (2, 4):
            switch_memories(model, Switch(steps=more))
            numbers |= {f"{name} | {more} steps when read": value for name, value in asked().items()}
            switch_memories(model, Switch(steps=1))
    return numbers


def _bytes(corpus: Any) -> Task:
    ids = Tokens.of(byte_tokenizer(), corpus.train).ids
    return Task("bytes", 258, CROP, partial(crops, ids, CROP))


@torch.inference_mode()
def held_out_bits(model: Any, corpus: Any) -> float:
    """Bits of bytes 128 to 512 of texts that are spread over what is held out."""
    text = Tokens.of(byte_tokenizer(), corpus.held_out).ids.astype(np.int64)
    starts = np.linspace(0, len(text) - READ - 1, STREAMS).astype(int)
    ids = torch.from_numpy(text[starts[:, None] + np.arange(READ + 1)]).to(model.device)
    with eval_mode(model):
        nats = [
            F.cross_entropy(
                model(input_ids=some[:, :-1], use_cache=False).logits[:, CROP:].transpose(1, 2), some[:, CROP + 1 :]
            )
            for some in ids.split(16)
        ]
    return float(torch.stack(nats).mean()) / math.log(2)
