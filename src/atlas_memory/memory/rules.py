"""A rule is a value: one choice on each axis of the inner problem. Models are rows of one table.

Axes (Miras's four, with ATLAS's features and window): feature map, memory network, attentional bias, retention, inner
optimiser, window. To add a model, compose values and add a row to ``RULES``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .bias import L2, AttentionalBias
from .features import FeatureMap, Identity, Polynomial
from .networks import MLP, GatedMLP, Linear, Network, Trace
from .optimisers import GradientDescent, Momentum, Muon, Optimiser
from .retention import Decay, Keep, Retention
from .windows import Window


@dataclass(frozen=True)
class Rule:
    """How keys are lifted, what learns, what it minimises, what it keeps, how it steps, and over which window."""

    features: FeatureMap = field(default_factory=Polynomial)
    network: Network = field(default_factory=MLP)
    bias: AttentionalBias = field(default_factory=L2)
    retention: Retention = field(default_factory=Decay)
    optimiser: Optimiser = field(default_factory=Muon)
    window: Window = field(default_factory=lambda: Window(size=8, chunk=16))

    def vary(self, **parts: Mapping[str, Any]) -> Rule:
        """The rule with fields of its parts changed: ``rule.vary(optimiser={"every": 16}, window={"size": 4})``.

        Raises:
            ValueError: a part or field that does not exist, or a value that it refuses.
        """
        changed: dict[str, Any] = {}
        known = [f.name for f in fields(self)]
        for name, options in parts.items():
            if name not in known:
                raise ValueError(f"a rule has no part {name!r}; its parts are {', '.join(known)}")
            if not isinstance(options, Mapping):
                raise ValueError(f"options of {name!r} must be a mapping of field to value, got {options!r}")
            part = getattr(self, name)
            allowed = [f.name for f in fields(part)]
            for option in options:
                if option not in allowed:
                    has = f"its fields are {', '.join(allowed)}" if allowed else "it has no fields"
                    raise ValueError(f"{name} {type(part).__name__} has no field {option!r}; {has}")
            changed[name] = replace(part, **options)
        return replace(self, **changed)

    def shapes(self, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of the memory's matrices for heads of ``dim``."""
        return self.network.shapes(self.features.size(dim), dim)

    def token_curvature(self, weights: Sequence[Tensor], trace: Trace, sqrt_a: Tensor | None) -> Tensor:
        """A bound on the largest eigenvalue of the Gauss-Newton Hessian of each token's loss, ``[..., time]``: the
        bias's curvature times sum_l |d prediction / d (W_l f_l)|^2 |f_l|^2."""
        total = torch.zeros_like(trace.prediction[..., 0])
        gains = self.network.gains(weights, trace)
        for lifted, u, gain in zip(self.network.lifted, trace.inputs, gains, strict=True):
            total = total + gain * (self.features.squared_norm(u, sqrt_a) if lifted else u.square().sum(-1))
        return self.bias.curvature * total

    def initial_weights(self, heads: int, dim: int) -> tuple[Tensor, ...]:
        """A random M_0, normal with variance 1 / columns: one ``[heads, rows, columns]`` a matrix. The papers do not
        state theirs. A matrix memory starts at zero, where its first write is the plain outer product."""
        if isinstance(self.network, Linear):
            return tuple(torch.zeros(heads, *shape) for shape in self.shapes(dim))
        return tuple(torch.randn(heads, rows, columns) * columns**-0.5 for rows, columns in self.shapes(dim))


@dataclass(frozen=True)
class Params:
    """The outer parameters of the inner problem: ``initial``, the learned M_0, one ``[heads, rows, columns]`` a matrix;
    ``sqrt_a``, the feature map's degree coefficients ``[degree + 1]`` or None for its default."""

    initial: tuple[Tensor, ...]
    sqrt_a: Tensor | None = None


ATLAS = Rule()

RULES: dict[str, Rule] = {
    # ATLAS Eqs. 32-33 and 57-58
    "atlas": ATLAS,
    # ATLAS Eq. 43
    "atlas++": replace(ATLAS, network=GatedMLP()),
    # ATLAS Eq. 10; also the row "w/o Muon" of ATLAS Table 6
    "omeganet": replace(ATLAS, optimiser=GradientDescent()),
    # ATLAS Eqs. 12-13; Titans Eqs. 12-14
    "titans": Rule(features=Identity(), optimiser=Momentum(), window=Window(size=1, chunk=16)),
    # W_t = W_{t-1} - eta~ (W k - v) k^T with gradients at the chunk's start; the delta rule to the letter with
    # window chunk=1 and optimiser bounded=False (a bounded step never overwrites a value whole: eta~ < 1 / b)
    "deltanet": Rule(
        features=Identity(),
        network=Linear(),
        bias=L2(scale=0.5),
        retention=Keep(),
        optimiser=GradientDescent(),
        window=Window(size=1, chunk=16),
    ),
    # The other ablations of ATLAS Table 6, a line each
    "atlas-linear": replace(ATLAS, network=Linear()),
    "atlas-identity": replace(ATLAS, features=Identity()),
    "atlas-c1": ATLAS.vary(window={"size": 1}),
}


def resolve_rule(rule: str | Rule, window: int | None = None, chunk_size: int | None = None) -> Rule:
    """A rule by name or value, with its window c and chunk b replaced where given.

    Raises:
        ValueError: a name that is not in ``RULES``, or a size below 1.
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known rules: {', '.join(RULES)}")
        rule = RULES[rule]
    sizes = {name: value for name, value in (("size", window), ("chunk", chunk_size)) if value is not None}
    return rule.vary(window=sizes) if sizes else rule
