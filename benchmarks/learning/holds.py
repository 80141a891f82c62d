"""How many pairs a memory holds that has not been trained: what its form can do, at the gates with which a layer
starts."""

from __future__ import annotations

from dataclasses import replace

import torch

from atlas_memory import OmegaMemory
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.memory import RULES, Polynomial, Rule, l2_normalise
from atlas_memory.ops.flops import state_bytes

from .study import Study

BATCH, HEADS, PAIRS = 8, 2, (16, 32, 64, 128)
HIGHEST = (0.1, 0.5, 1.0)
"""Coefficients of degree 0, 1 and 2 by which the highest leads; the Taylor series of exp has 1, 1 and 0.71."""


def _kinds(rule: Rule) -> tuple[str, ...]:
    of_degree_2 = isinstance(rule.features, Polynomial) and rule.features.degree == 2
    return ("", " (highest degree)") if of_degree_2 else ("",)


def measure(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``HOLDS``."""
    torch.manual_seed(seed)
    name, _, highest = case.partition(" (")
    rule = RULES[name]
    memory = OmegaMemory(dim, HEADS, rule, gates=False).eval()
    if highest and memory.sqrt_a is not None:
        with torch.no_grad():
            memory.sqrt_a.copy_(torch.tensor(HIGHEST))
    projection = GateProjection(dim * HEADS, HEADS, rule)
    found = {}
    for pairs in PAIRS[:1] if quick else PAIRS:
        k, v = l2_normalise(torch.randn(BATCH, HEADS, pairs, dim)), torch.randn(BATCH, HEADS, pairs, dim)
        with torch.no_grad():
            projection.weight.zero_()  # the gates' starting values, whatever the token
            gates = projection(k.new_zeros(BATCH, pairs, dim * HEADS))
            _, state = memory(k, k, v, replace(gates, alpha=None))
            answers = memory.retrieve(k, state)
        found[f"held {pairs}"] = float((torch.cdist(answers, v).argmin(-1) == torch.arange(pairs)).float().mean())
    size = state_bytes(rule, dim, HEADS)
    return found | ({} if size is None else {"state_bytes": float(size)})


HOLDS = Study(
    name="holds",
    shows="16, 32, 64 and 128 pairs of a random unit key and a random value are read once, by a fresh memory as the "
    "rule has it, at the gates' starting values but for alpha = 1: nothing fades, nothing has been trained. The share "
    "of keys whose answer is nearer to their own value than to all others, and the bytes of state of two heads. "
    "Highest degree: with coefficients of the features of 0.1, 0.5 and 1 in place of the Taylor series of exp.",
    cases=tuple(f"{name}{kind}" for name, rule in RULES.items() for kind in _kinds(rule)),
    widths=(16, 32, 64),
    measure=measure,
    columns=("candidate", "head", *(f"{n} pairs held" for n in PAIRS), "state kB", "seeds", "revision"),
)
