"""What is of no use raises an alarm that says so; what is of use raises none."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from atlas_memory.layers.gates import GateProjection
from atlas_memory.layers.memory import NeuralMemory
from atlas_memory.memory import RULES, Gates
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.observation import alarms, summarise, trace


def no_eta(module: nn.Module, _: Any, output: Any) -> Any:
    return replace(output, eta=0 * output.eta) if isinstance(module, GateProjection) else None


def short_memory(module: nn.Module, _: Any, output: Gates) -> Any:
    if not isinstance(module, GateProjection) or output.alpha is None:
        return None
    return replace(output, alpha=torch.full_like(output.alpha, 0.5))


def no_branch(module: nn.Module, _: Any, output: Any) -> Any:
    return (0 * output[0], output[1]) if isinstance(module, NeuralMemory) else None


@contextmanager
def everywhere(hook: Any) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def model_of(rule: str, block: str = "lmm") -> AtlasForCausalLM:
    torch.manual_seed(0)
    window = {} if block in ("lmm", "hope") else {"attention_window": 8}
    options: Any = {"hidden_size": 16, "num_attention_heads": 2, "rule": rule, "block": block, **window}
    return AtlasForCausalLM(AtlasConfig.preset("nano", **options))


def raised(model: AtlasForCausalLM) -> list[tuple[str, str]]:
    ids = torch.randint(0, 256, (2, 80), generator=torch.Generator().manual_seed(0))
    return [(alarm.kind, alarm.text) for alarm in alarms(summarise(trace(model, ids)))]


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_begins_with_an_alarm(rule: str) -> None:
    assert raised(model_of(rule, "hope" if rule == "hope" else "lmm")) == []


@pytest.mark.parametrize("block", ["lmm", "mag"])
@pytest.mark.parametrize("rule", ["gated-deltanet", "titans", "omeganet"])
def test_what_is_of_no_use_is_named(rule: str, block: str) -> None:
    model = model_of(rule, block)
    for hook, kind, count, remedy in (
        (no_eta, "writes nothing", 2, "train.gate_rate"),
        (short_memory, "forgets", 1, "train.gate_rate"),
        (no_branch, "unused", 2, "scaled away"),
    ):
        with everywhere(hook):
            found = raised(model)
        assert [name for name, _ in found] == [kind] * count
        assert all(remedy in text and "\n" not in text for _, text in found)


def test_numbers_that_are_not_finite() -> None:
    model = model_of("titans")
    with torch.no_grad():
        model.model.layers[1].mixer.memory.initial[0].fill_(torch.inf)
    assert [kind for kind, _ in raised(model)] == ["broken"]
