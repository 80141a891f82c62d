"""The activations sigma of the hidden units, and their slopes sigma', which the inner gradients need: both from one
pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .functions import Function, call

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}


def with_slope(activation: str, h: Tensor) -> tuple[Tensor, Tensor]:
    """sigma(h) and sigma'(h), of any shape, for the exact (erf) GELU or SiLU."""
    function: type[torch.autograd.Function] = _Gelu if activation == "gelu" else _Silu
    return call(function, h)


class _WithSlope(Function):
    """sigma and sigma' as one function: autograd would keep and traverse a dozen intermediates of sigma'."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])


class _Gelu(_WithSlope):
    """GELU, h Phi(h), and its slope Phi(h) + h N(h), with Phi and N the normal distribution and its density."""

    @staticmethod
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.erf(h * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        return h * below, torch.addcmul(below, h, _density(h))

    @staticmethod
    def backward(ctx: Any, to_value: Tensor, to_slope: Tensor) -> Tensor:
        h, slope = ctx.saved_tensors
        return torch.addcmul(to_value * slope, to_slope * _density(h), 2.0 - h * h)


class _Silu(_WithSlope):
    """SiLU, h s(h), and its slope s(h) (1 + h (1 - s(h))), with s the sigmoid."""

    @staticmethod
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(h)
        value = h * gate
        return value, torch.addcmul(gate, value, 1.0 - gate)

    @staticmethod
    def backward(ctx: Any, to_value: Tensor, to_slope: Tensor) -> Tensor:
        h, slope = ctx.saved_tensors
        gate = torch.sigmoid(h)
        # (s + h s (1 - s))' = s (1 - s) (2 + h (1 - 2 s))
        curved = gate * (1.0 - gate) * torch.addcmul(torch.full_like(h, 2.0), h, 1.0 - 2.0 * gate)
        return torch.addcmul(to_value * slope, to_slope, curved)


def _density(h: Tensor) -> Tensor:
    """That of the standard normal distribution at h."""
    return (h * h).mul(-0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))
