"""How many pairs a memory holds, before any training: ATLAS's Propositions 1 and 2 and Theorem 1.

Pairs of a random unit key and a random value are read by a fresh memory at the gates with which a layer starts, but for
alpha = 1, so that nothing fades, and gamma = 1, so that all of a window counts. A memory *holds* n of them where the
squared cosine between answers and values is 0.9 on average: nine tenths of the value's energy, at whatever scale the
rule answers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.layers.omega_memory import OmegaMemory
from atlas_memory.ops.flops import state_bytes
from atlas_memory.rules.features import l2_normalise
from atlas_memory.rules.rule import RULES, Rule

HELD, HEADS, BATCH = 0.9, 2, 4
READINGS = (1, 64)
"""How often the pairs are read, one reading after the other: once, and until a matrix changes little. A hidden layer
goes on learning for a thousand readings."""
MOST = 4096

Changes = dict[str, dict[str, Any]]
_DEEP: Changes = {"window": {"size": 1}, "features": {"kind": "Identity"}}
_MATRIX: Changes = _DEEP | {"network": {"kind": "Linear"}}


def _omega(**changes: dict[str, Any]) -> Rule:
    return RULES["omeganet"].vary(**changes)


def _degree(degree: int) -> Changes:
    return _MATRIX | {"features": {"degree": degree}}


MEMORIES: dict[str, Rule] = {
    "Hebbian": _omega(**_MATRIX, bias={"kind": "DotProduct"}),  # W k, dot product
    "online": _omega(**_MATRIX),  # W k, L2, c = 1 (delta rule)
    "Omega, c = 4": _omega(**(_MATRIX | {"window": {"size": 4}})),  # W k, L2, c = 4
    "Omega, c = 16": _omega(**(_MATRIX | {"window": {"size": 16}})),  # W k, L2, c = 16
    "Muon": RULES["atlas"].vary(**_MATRIX),  # W k, L2, c = 1, Muon
    "Muon, as printed": RULES["atlas"].vary(**_MATRIX).printed(),  # the same with steps of ATLAS Eq. 32
    "degree 2": _omega(**_degree(2)),  # W phi_2(k)
    "degree 3": _omega(**_degree(3)),  # W phi_3(k)
    "MLP, 1 d": _omega(**_DEEP, network={"expansion": 1}),  # two layers, d hidden units
    "MLP, 4 d": _omega(**_DEEP, network={"expansion": 4}),  # two layers, 4 d hidden units
    "MLP, 16 d": _omega(**_DEEP, network={"expansion": 16}),  # two layers, 16 d hidden units
    "MLP, 4 d, Muon": RULES["atlas"].vary(**_DEEP, network={"expansion": 4}),  # the same with Muon
    "omeganet": RULES["omeganet"],  # MLP, 4 d, phi_2, c = 8
    "atlas": RULES["atlas"],  # the same with Muon
}
"""What is compared; all but the last two are `omeganet` with one part changed."""
LARGEST: dict[str, int] = {
    "Muon, as printed": 32,
    "degree 3": 16,
    "degree 2": 32,
    "omeganet": 16,
    "atlas": 16,
    "MLP, 16 d": 32,
}
"""The widest heads of memories whose matrices would grow too large for a laptop."""


def fresh(rule: Rule, dim: int) -> OmegaMemory:
    """A memory of `HEADS` heads that has read nothing. The highest degree of its features leads, with coefficients 0.1
    and 0.3 of the lower ones; under the Taylor series of exp all pairs share too much."""
    memory = OmegaMemory(dim, HEADS, rule, gates=False).eval()
    if memory.sqrt_a is not None:
        with torch.no_grad():
            degrees = len(memory.sqrt_a)
            memory.sqrt_a.copy_(torch.tensor([0.1] + [0.3] * (degrees - 2) + [1.0]))
    return memory


@torch.inference_mode()
def likeness(memory: OmegaMemory, pairs: int, seed: int, readings: int) -> float:
    """The mean squared cosine between answers and values after so many pairs were read so many times."""
    g = torch.Generator().manual_seed(seed)
    dim = memory.dim
    k, v = (torch.randn(BATCH, HEADS, pairs, dim, generator=g) for _ in range(2))
    k, state = l2_normalise(k), None
    projection = GateProjection(dim * HEADS, HEADS, memory.rule)
    projection.weight.zero_()  # the gates' starting values, whatever the token
    gates = replace(projection(k.new_zeros(BATCH, pairs, dim * HEADS)), alpha=None, gamma=None)
    for _ in range(readings):
        order = torch.randperm(pairs, generator=g)  # or the last pairs would be the best known each time
        _, state = memory(k[:, :, order], k[:, :, order], v[:, :, order], gates, state)
    return float(_squared_cosine(memory.retrieve(k, state), v))


def _squared_cosine(x: Tensor, y: Tensor) -> Tensor:
    norms = x.square().sum(-1) * y.square().sum(-1)
    return ((x * y).sum(-1).square() / norms.clamp_min(1e-30)).mean()


def stored(memory: OmegaMemory, seed: int, readings: int) -> int:
    """The most pairs that the memory holds, by bisection in steps of a sixteenth of an octave; 0 if not even one."""
    if likeness(memory, 1, seed, readings) < HELD:
        return 0
    low = 1.0
    while low < MOST and likeness(memory, round(2 * low), seed, readings) >= HELD:
        low *= 2
    high = 2 * low
    while high / low > 2 ** (1 / 16) and round(high) - round(low) > 1:
        middle = math.sqrt(low * high)
        if likeness(memory, round(middle), seed, readings) >= HELD:
            low = middle
        else:
            high = middle
    return round(low)


def measure(memory: str, dim: int, seed: int) -> dict[str, float]:
    """The pairs that a memory of `MEMORIES` holds after each of `READINGS`, the likeness after one reading of as many
    pairs as heads are wide, and the numbers and bytes of state a head."""
    if dim < 2:
        raise ValueError(f"heads of {dim}: the cosine of two numbers is always 1, take at least 2")
    torch.manual_seed(seed)
    made = fresh(MEMORIES[memory], dim)
    found = {f"stored, {n} reading{'s'[: n > 1]}": float(stored(made, seed, n)) for n in READINGS}
    found["likeness of d pairs"] = likeness(made, dim, seed, 1)
    numbers = sum(rows * columns for rows, columns in made.rule.shapes(dim))
    size = state_bytes(made.rule, dim, HEADS)
    return found | {"numbers": float(numbers)} | ({} if size is None else {"state bytes": size / HEADS})


def slope(dims: list[int], held: list[float]) -> float:
    """Of log(stored) against log(d), by least squares; nan with fewer than two points above zero."""
    points = [(math.log(d), math.log(n)) for d, n in zip(dims, held, strict=True) if n > 0]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
