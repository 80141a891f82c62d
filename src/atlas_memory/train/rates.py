"""A learning rate of their own for the memories' gates."""

from __future__ import annotations

from typing import Any

from torch import nn

from atlas_memory.layers.gate_projection import GateProjection


def split_by_rate(model: nn.Module, groups: list[dict[str, Any]], lr: float, gate_rate: float) -> list[dict[str, Any]]:
    """`groups`, the parameters of gates taken out of each into a group of their own that learns at `gate_rate` x `lr`.

    A gate's logit is a sum over the width of the model, so that a step of every weight at the common rate moves it far;
    docs/settings.md has what slower gates bring and cost. The block "hope" makes its gates by memories and has none.
    """
    gates = {p for module in model.modules() if isinstance(module, GateProjection) for p in module.parameters()}
    split = []
    for group in groups:
        for rate, among in ((1.0, False), (gate_rate, True)):
            if parameters := [p for p in group["params"] if (p in gates) is among]:
                split.append(group | {"params": parameters, "lr": rate * lr})
    return split
