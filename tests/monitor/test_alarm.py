"""What is of no use raises an alarm that says so; what is of use raises none."""

from typing import Any

import pytest
import torch

from atlas_memory.memory import RULES
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.monitor import alarms, summarise, trace
from benchmarks.learning.alarms import SPOILT, spoilt


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
    for how, kind, count, remedy in (
        ("eta at 0", "no writes", 2, "train.gate_lr_scale"),
        ("retention at one half", "no retention", 1, "train.gate_lr_scale"),
        ("branch at 0", "unused", 2, "scaled away"),
    ):
        with spoilt(SPOILT[how]):
            found = raised(model)
        assert [name for name, _ in found] == [kind] * count
        assert all(remedy in text and "\n" not in text for _, text in found)


def test_numbers_that_are_not_finite() -> None:
    model = model_of("titans")
    with torch.no_grad():
        model.model.layers[1].mixer.memory.initial[0].fill_(torch.inf)
    assert [kind for kind, _ in raised(model)] == ["nonfinite"]
