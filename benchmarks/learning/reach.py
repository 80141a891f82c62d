"""How far outer gradients reach, and how large they are at any length, before training."""

from __future__ import annotations

import torch

from atlas_memory import NeuralMemory
from atlas_memory.memory import RULES

from .study import Study, laptop

HEADS = 2
LENGTHS = (256, 1024, 4096)


def measure(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``REACH``."""
    torch.manual_seed(seed)
    layer = NeuralMemory(dim * HEADS, HEADS, laptop(case))
    x = torch.randn(4, 256, dim * HEADS, requires_grad=True)
    y, _ = layer(x)
    late = y[:, 128:]
    (grad,) = torch.autograd.grad((late * torch.randn_like(late)).sum(), x)
    early, own = (float(part.norm()) for part in (grad[:, :128], grad[:, 128:]))
    found = {"reach": early / (early + own)}
    for length in LENGTHS[:1] if quick else LENGTHS:
        x = torch.randn(1, length, dim * HEADS)
        y, _ = layer(x)
        grads = torch.autograd.grad((y * torch.randn_like(y)).mean(), list(layer.parameters()), allow_unused=True)
        found[f"gradient {length}"] = float(torch.stack([g.norm() for g in grads if g is not None]).norm())
    names = [name for name in found if name.startswith("gradient")]
    root = [found[name] * length**0.5 for name, length in zip(names, LENGTHS, strict=False)]
    return found | {"growth": max(root) / min(root)}


REACH = Study(
    name="reach",
    shows="A fresh layer on random tokens. Reach: of the gradient of the last 128 outputs of 256, the share (of norms) "
    "that goes to the first 128 tokens. Gradients: the norm over all parameters of the gradient of a random mean over "
    "256, 1,024 and 4,096 tokens; growth: the largest over the smallest, times the root of the length, which is what a "
    "mean of independent terms loses.",
    cases=tuple(RULES),
    widths=(16, 32),
    measure=measure,
    columns=(
        "candidate",
        "head",
        "reach",
        "gradient 256",
        "gradient 1,024",
        "gradient 4,096",
        "growth",
        "seeds",
        "revision",
    ),
)
