"""What `atlas rules` says about state and cost, against real states and PyTorch's own count."""

import sys

import pytest
import torch

from atlas_memory.memory import (
    RULES,
    Exponential,
    Rule,
    chunkwise,
    resolve_rule,
)
from atlas_memory.ops.flops import multiply_adds, state_bytes
from atlas_memory.ops.muon_space import TOGETHER, MuonSpace
from tests.counting import flop_counter, triangular

from .problems import Problem, random_problem

# Variants that no row has: steps now and then, a memory that fades to M_0, other reads, three layers, windows over
# several blocks.
VARIANTS = {
    "every-third": RULES["atlas-linear"].vary(optimiser={"every": 3}, window={"chunk": 9}),
    "to-start": RULES["titans"].vary(retention={"to_initial": True}),
    "delta-to-start": RULES["hope"].vary(retention={"to_initial": True}),
    "frozen-gradients": RULES["omeganet"].vary(optimiser={"online": False}),
    "frozen-momentum": RULES["titans"].vary(optimiser={"online": False}),
    "printed": RULES["omeganet"].vary(retention={"to_initial": False}, optimiser={"normalised": False}),
    "frozen": RULES["titans"].vary(window={"read": "frozen"}),
    "three": RULES["omeganet"].vary(network={"depth": 3, "expansion": 2}),
    "muon-settles": RULES["atlas-identity"].vary(retention={"kind": "LqNorm"}, optimiser={"every": None}),
    "momentum-by-key": RULES["dot"].vary(optimiser={"kind": "Momentum"}),
    "blocks": RULES["omeganet"].vary(window={"chunk": 40}),
    "blocks-momentum": RULES["titans"].vary(window={"size": 5, "chunk": 56}),
    "blocks-muon": RULES["atlas"].vary(window={"chunk": 40}, optimiser={"every": 8}),
    "muon-frozen": RULES["atlas"].vary(
        optimiser={"online": False, "every": 3}, window={"size": 3, "chunk": 9}, retention={"kind": "RowNorm"}
    ),
}


def problem(rule: Rule, time: int, dim: int) -> Problem:
    return random_problem(rule, 0, batch=1, time=time, dim=dim, dtype=torch.float32)


def with_horizon(rule: Rule) -> Rule:
    """A growing rule cut off such that its third chunk meets as many columns as a long stream does."""
    return rule.vary(features={"horizon": rule.window.chunk + 1}) if isinstance(rule.features, Exponential) else rule


@pytest.mark.parametrize("name", [*RULES, *VARIANTS])
def test_state_bytes(name: str) -> None:
    rule = with_horizon(resolve_rule(VARIANTS.get(name, name)))
    with torch.no_grad():
        _, state = chunkwise(*problem(rule, 3 * rule.window.chunk + 1, dim=4).arguments())
    assert state_bytes(rule, dim=4, heads=2) == state.nbytes


@pytest.mark.parametrize("name", [*RULES, *VARIANTS])
def test_multiply_adds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % of a call's third chunk, triangular systems apart, which PyTorch does not count. As the model has it,
    chunk after chunk, and of Newton-Schulz by products and a few steps at a time."""
    monkeypatch.setattr(sys.modules["atlas_memory.ops.chunkwise"], "has_scan", lambda rule: False)
    rule = with_horizon(resolve_rule(VARIANTS.get(name, name)))
    b, counts = rule.window.chunk, []
    given = problem(rule, 3 * b, dim=8)
    for time in (2 * b, 3 * b):
        with torch.no_grad(), flop_counter() as counter:
            chunkwise(*given.between(0, time).arguments(), muon_space=MuonSpace(together=TOGETHER, eigenvalues=False))
        counts.append(counter.get_total_flops() / 2)
    uncounted = 2 * triangular(rule, 8)
    ratio = (multiply_adds(rule, dim=8, heads=2) * b - uncounted) / (counts[1] - counts[0])
    assert 0.99 <= ratio <= 1.01


@pytest.mark.parametrize("name", ["deeptransformer", "dot"])
def test_what_grows_has_no_number(name: str) -> None:
    assert state_bytes(RULES[name], 8, 2) is None
    assert multiply_adds(RULES[name], 8, 2) is None
