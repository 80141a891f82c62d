"""The short causal convolution after the q, k and v projections (size 4 in ATLAS, section 5.1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.banded import take
from ..ops.triton import kernel_support
from ..ops.triton.kernel_check import matches_pytorch
from ..rules.autograd import Function, call
from ..rules.validation import LONGEST, check_size


class ShortConvolution(nn.Module):
    """Depthwise causal convolution: each channel mixes its last ``size`` inputs; starts near the identity.

    Args:
        channels: number of channels.
        size: taps, >= 1; 1 leaves only a scale.
    """

    def __init__(self, channels: int, size: int = 4) -> None:
        super().__init__()
        check_size("conv_size", size, LONGEST)
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Taps uniform in +-1/(2 size), plus one at the current token."""
        bound = 0.5 / self.size
        nn.init.uniform_(self.weight, -bound, bound)
        with torch.no_grad():
            self.weight[:, -1] += 1.0

    def forward(self, x: Tensor, past: Tensor | None = None, length: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve along time.

        Args:
            x: ``[batch, time, channels]``.
            past: the last size - 1 inputs before x, ``[batch, size - 1, channels]``; None: zeros.
            length: real tokens of each row ``[batch]``, the rest being right padding; None: all.

        Returns:
            y ``[batch, time, channels]`` and the new ``past``.

        Raises:
            ValueError: ``past`` of another batch or layer.
        """
        batch, time, channels = x.shape
        if past is None:
            past = x.new_zeros(batch, self.size - 1, channels)
        if past.shape != (batch, self.size - 1, channels):
            raise ValueError(
                f"x has {batch} rows, and the state must have past inputs {[batch, self.size - 1, channels]}, got "
                f"{list(past.shape)}: it is of another batch or layer"
            )
        past = past.to(x.dtype)
        inputs = torch.cat([past, x], 1)
        if time == 0:
            return x, past
        weight = self.weight.to(x.dtype)
        y = (inputs * weight.mT).sum(1, keepdim=True) if time == 1 else call(_Convolution, inputs, weight)
        if length is None:
            return y, inputs[:, time:].clone(memory_format=torch.contiguous_format)  # a view would keep all inputs
        last = length[:, None] + torch.arange(self.size - 1, device=x.device)
        return y, take(inputs, last)


def check_lag(key_lag: int, conv_size: int) -> None:
    """Raise ValueError unless a convolution of this size can delay keys by so many tokens."""
    check_size("conv_size", conv_size, LONGEST)
    if isinstance(key_lag, bool) or not isinstance(key_lag, int) or not 0 <= key_lag < conv_size:
        raise ValueError(f"key_lag must be an integer >= 0 and below conv_size={conv_size}, got {key_lag!r}")


class _Convolution(Function):
    """y_t = sum_j w_j x_{t+j}, tap by tap over blocks of time that stay in cache: ``conv1d`` is slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        if _has_kernel(x, w):
            from ..ops.triton.conv_kernel import convolve

            return convolve(x, w)
        taps = w.shape[1]
        time, w = x.shape[1] - taps + 1, w.mT.contiguous()
        y = []
        for start, stop in _blocks(x, time):
            part = x[:, start:stop] * w[0]
            for j in range(1, taps):
                part = part.addcmul_(x[:, start + j : stop + j], w[j])
            y.append(part)
        return torch.cat(y, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        if _has_kernel(x, w) and not torch.is_grad_enabled():  # else gradients of gradients are wanted
            from ..ops.triton.conv_kernel import convolve_back

            return convolve_back(x, w, g)
        wide = torch.promote_types(g.dtype, torch.float32)
        to_x, by_tap = g.new_zeros(x.shape, dtype=x.dtype), w.mT.contiguous()  # of g: vmap knows its size then
        to_w = [torch.zeros_like(tap, dtype=wide) for tap in by_tap]
        for start, stop in _blocks(x, g.shape[1]):
            part = g[:, start:stop]
            for j, tap in enumerate(by_tap):
                to_x[:, start + j : stop + j].addcmul_(part, tap)
                to_w[j] = to_w[j] + (part * x[:, start + j : stop + j]).sum((0, 1), dtype=wide)
        return to_x, torch.stack(to_w, -1).to(w.dtype)


def _has_kernel(x: Tensor, w: Tensor) -> bool:
    by_default = (
        partial(matches_pytorch, "conv_kernel", x.dtype, w.shape[1], x.device) if kernel_support.on_cuda(x) else None
    )
    return kernel_support.taken(None, kernel_support.convolution_refusal, x.device.type, x.dtype, by_default=by_default)


CACHED = 2**18
"""About how many numbers of x a block may have to stay in cache."""


def _blocks(x: Tensor, time: int) -> list[tuple[int, int]]:
    """The blocks of time, (first, behind the last). One block under a compiler, which finds its own, and on a GPU."""
    whole = x.device.type != "cpu" or torch.compiler.is_compiling()
    size = time if whole else max(1, CACHED // max(1, x.shape[0] * x.shape[2]))
    return [(start, min(start + size, time)) for start in range(0, time, size)]
