"""Which calls take a kernel: functions of device type, dtype, shapes and rule, and of a switch. No Triton is imported.

No kernel has run on a GPU yet. Until one has been measured there, they wait to be asked for: ATLAS_MEMORY_KERNELS=1 in
the environment.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ..mathematics.bias import L2, DotProduct
from ..mathematics.features import Identity
from ..mathematics.gates import CompleteGates
from ..mathematics.networks import MLP, Linear
from ..mathematics.optimisers import GradientDescent
from ..mathematics.retention import Decay, Keep
from ..mathematics.rules import Rule

SWITCH = "ATLAS_MEMORY_KERNELS"
"""The environment variable that lets kernels be taken."""

KINDS: dict[str, tuple[type, ...]] = {
    "features": (Identity,),
    "network": (Linear, MLP),
    "bias": (L2, DotProduct),
    "optimiser": (GradientDescent,),
    "retention": (Decay, Keep),
}
"""The parts of a rule that the chunk kernels know."""

WIDTHS = (16, 32, 64, 128)
"""Head widths of the chunk kernels."""

CHUNKS = (16, 32, 64)
"""Their chunks b."""

GRAM_SIZE = 64
"""The largest Gram matrix: at 128 the backward kernel asks for more shared memory than an SM of an H200 has."""


def supports(rule: Rule, device: str, dtype: torch.dtype, shape: torch.Size, gate: CompleteGates) -> bool:
    """Whether kernels/chunk.py computes ``rule`` for q of this device type, dtype and ``shape``
    ``[batch, heads, time, dim]``: an MLP of depth 2 or a matrix on plain keys, L2 or the dot product, gradient descent,
    bare steps at frozen gradients, linear retention to zero, gates one a head, float32 on CUDA, and widths that fit."""
    network, window = rule.network, rule.window
    return (
        device == "cuda"
        and dtype == torch.float32
        and all(type(getattr(rule, part)) in kinds for part, kinds in KINDS.items())
        and len(network.lifted) <= 2
        and not network.bias
        and not network.norm
        and not rule.optimiser.bounded
        and not rule.live
        and not rule.retention.to_start
        and window.read == "after"
        and window.chunk in CHUNKS
        and window.size <= window.chunk + 1
        and shape[-1] in WIDTHS
        and _fits(len(network.lifted) == 2, shape[-1], window.chunk + window.size - 1)
        and shape[0] * shape[1] * shape[2] > 0
        and gate.eta.dim() == 3
        and gate.alpha.dim() == 3
        and available()
    )


def _fits(deep: bool, dim: int, tokens: int) -> bool:
    """Whether both chunk kernels, for heads of ``dim`` and so many window tokens a chunk, were seen to need no more
    shared memory than an SM of an H200 has: docs/kernels.md."""
    wide, long = dim > 64, tokens > 64
    return not (wide and long) if deep else not (wide or long)


def supports_gram(device: str, dtype: torch.dtype, size: int) -> bool:
    """Whether kernels/gram_newton_schulz.py takes Gram matrices of this device type and dtype, ``size`` x ``size``."""
    return device == "cuda" and dtype == torch.float32 and 0 < size <= GRAM_SIZE and available()


def available() -> bool:
    """Whether kernels were asked for, and ``import triton`` would find it."""
    return os.environ.get(SWITCH) == "1" and find_spec("triton") is not None
