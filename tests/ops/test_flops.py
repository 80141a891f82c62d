"""What `atlas rules` says about state and cost, against real states and PyTorch's own count."""

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


def test_multiply_adds() -> None:
    """The delta rule by hand, of a chunk of b tokens with heads of d: two kernels, the triangular system, the answers
    of the chunk; W for keys and queries, and the write."""
    d, b = 16, 32
    delta = RULES["deltanet"].vary(window={"chunk": b})
    of_chunk = 2 * b * b * d + b * b * d // 2 + b * b * d + 2 * b * d * d + b * d * d
    assert multiply_adds(delta, dim=d, heads=3) == 3 * of_chunk // b
    assert (
        multiply_adds(RULES["titans"], 8, 1)
        < multiply_adds(RULES["omeganet"], 8, 1)
        < multiply_adds(RULES["atlas"], 8, 1)
    )


@pytest.mark.parametrize("name", ["deeptransformer", "dot"])
def test_what_grows_has_no_number(name: str) -> None:
    assert state_bytes(RULES[name], 8, 2) is None
    assert multiply_adds(RULES[name], 8, 2) is None
