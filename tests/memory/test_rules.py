"""The table of rules and what can be changed in a rule."""

import pytest
import torch

from atlas_memory import RULES, Rule
from atlas_memory.memory import (
    MLP,
    GatedMLP,
    GradientDescent,
    Identity,
    Linear,
    Momentum,
    Muon,
    Window,
    resolve_rule,
)


def test_the_rows_are_what_the_papers_say():
    assert isinstance(RULES["atlas"].optimiser, Muon) and RULES["atlas"].optimiser.every == 1
    assert RULES["atlas"].network == MLP(depth=2, expansion=4)
    assert isinstance(RULES["atlas++"].network, GatedMLP)
    assert isinstance(RULES["omeganet"].optimiser, GradientDescent)
    assert RULES["titans"].window.size == 1 and isinstance(RULES["titans"].optimiser, Momentum)
    assert isinstance(RULES["deltanet"].network, Linear) and RULES["deltanet"].features == Identity()


def test_ablations_differ_from_atlas_in_one_part():
    parts = ("features", "network", "bias", "retention", "optimiser", "window")
    for name in ("atlas++", "omeganet", "atlas-linear", "atlas-identity", "atlas-c1"):
        assert sum(getattr(RULES[name], p) != getattr(RULES["atlas"], p) for p in parts) == 1


def test_vary_changes_only_what_it_names():
    rule = RULES["atlas"].vary(optimiser={"every": 4}, window={"size": 2})
    assert rule.optimiser == Muon(every=4) and rule.window == Window(2, 16)
    assert rule.network == RULES["atlas"].network and RULES["atlas"].optimiser.every == 1


@pytest.mark.parametrize(
    "parts,message",
    [
        ({"optimizer": {}}, "a rule has no part 'optimizer'; its parts are features"),
        (
            {"optimiser": {"rate": 1}},
            "optimiser Muon has no field 'rate'; its fields are steps, every, precise",
        ),
        ({"retention": {"alpha": 1}}, "retention Decay has no field 'alpha'; its fields are to_start"),
        ({"optimiser": 3}, "must be a mapping"),
        ({"optimiser": {"steps": 0}}, "Muon steps must be an integer >= 1"),
        ({"features": {"degree": 0}}, "degree must be an integer >= 1"),
    ],
)
def test_vary_refuses(parts, message):
    with pytest.raises(ValueError, match=message):
        RULES["atlas"].vary(**parts)


def test_resolve():
    assert resolve_rule("atlas") is RULES["atlas"]
    assert resolve_rule("atlas", window=3).window == Window(3, 16)
    assert resolve_rule(Rule(), chunk_size=8).window == Window(8, 8)
    with pytest.raises(ValueError, match="unknown rule 'atlsa'; known rules: atlas, "):
        resolve_rule("atlsa")


def test_initial_weights_have_unit_fan_in():
    torch.manual_seed(0)
    first, second = RULES["titans"].initial_weights(heads=4, dim=32)
    assert first.shape == (4, 128, 32) and second.shape == (4, 32, 128)
    assert abs(first.var().item() * 32 - 1) < 0.1
