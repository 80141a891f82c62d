"""The short causal convolution (layers/short_conv.py) in one kernel forward and one backward, where PyTorch makes a
pass over all tokens for each tap, and several in its backward pass.

y[t] = sum_j w[j] x[t + j] for x of ``taps - 1`` more tokens than y. With dy the gradient of y, dx[s] = sum_j w[j]
dy[s - j] and dw[j] = sum_t dy[t] x[t + j], of which each program makes a part. Sums are in float32, or float64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

import triton

from .kernel_check import distance

ROWS, COLUMNS = 32, 64
"""Tokens and channels of a program."""


def convolve(x: Tensor, w: Tensor) -> Tensor:
    """y ``[batch, time, channels]``, from x ``[batch, time + taps - 1, channels]`` and w ``[channels, taps]`` of one
    floating dtype."""
    x, w, time = x.contiguous(), w.contiguous(), x.shape[1] - w.shape[1] + 1
    y = x.new_empty(x.shape[0], time, x.shape[2])
    _launch(_forward, time, x, w, y)
    return y


def convolve_back(x: Tensor, w: Tensor, by_y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and w from that of y."""
    x, w, by_y = x.contiguous(), w.contiguous(), by_y.contiguous()
    channels, taps = w.shape
    by_x = torch.empty_like(x)
    blocks = x.shape[0] * triton.cdiv(x.shape[1], ROWS)
    by_w = x.new_empty(blocks, taps, channels, dtype=torch.promote_types(x.dtype, torch.float32))
    _launch(_backward, x.shape[1], x, w, by_y, by_x, by_w)
    return by_x, by_w.sum(0).mT.to(w.dtype)


def deviation(dtype: torch.dtype, taps: int, device: torch.device) -> float:
    """How far both kernels are from PyTorch, on a few tokens: see ``distance`` of kernel_check.py."""
    # A number of channels that 16 divides, as in models: for others Triton makes another kernel.
    draw, time, channels = torch.Generator().manual_seed(0), 2 * ROWS + 5, COLUMNS + 16
    sizes = (2, time + taps - 1, channels), (channels, taps), (2, time, channels)
    x, w, by_y = (torch.randn(size, generator=draw, dtype=torch.float32).to(device, dtype) for size in sizes)
    wide = [t.double().requires_grad_() for t in (x, w)]
    y = torch.stack([wide[0][:, j : j + time] * wide[1][:, j] for j in range(taps)]).sum(0)
    expected = [y, *torch.autograd.grad(y, wide, by_y.double())]
    return distance([convolve(x, w), *convolve_back(x, w, by_y)], expected)


def _launch(kernel: Any, rows: int, x: Tensor, w: Tensor, *tensors: Tensor) -> None:
    channels, taps = w.shape
    layout = (x.shape[0] * triton.cdiv(rows, ROWS), triton.cdiv(channels, COLUMNS))
    with torch.cuda.device_of(x):
        kernel[layout](x, w, *tensors, x.shape[1] - taps + 1, channels, TAPS=taps, ROWS=ROWS, COLUMNS=COLUMNS)


@triton.jit(do_not_specialize=["time"])
def _forward(x_at, w_at, y_at, time, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = tl.cdiv(time, ROWS)
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    t, c = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exist = (t < time)[:, None] & (c < channels)[None, :]
    wide: tl.constexpr = tl.float64 if y_at.dtype.element_ty == tl.float64 else tl.float32
    y = tl.zeros([ROWS, COLUMNS], wide)
    x_at += row * (time + TAPS - 1) * channels
    for j in tl.static_range(TAPS):
        x = tl.load(x_at + (t + j)[:, None] * channels + c[None, :], mask=exist, other=0.0)
        y += x.to(wide) * tl.load(w_at + c * TAPS + j, mask=c < channels, other=0.0).to(wide)[None, :]
    tl.store(y_at + (row * time + t)[:, None] * channels + c[None, :], y, mask=exist)


@triton.jit(do_not_specialize=["time"])
def _backward(
    x_at,
    w_at,
    by_y_at,
    by_x_at,
    by_w_at,
    time,
    channels,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The dx of some rows, and what their tokens add to dw, ``[programs, taps, channels]``."""
    blocks = tl.cdiv(time + TAPS - 1, ROWS)
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    t, c = block * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exist = (t < time + TAPS - 1)[:, None] & (c < channels)[None, :]
    wide: tl.constexpr = tl.float64 if by_x_at.dtype.element_ty == tl.float64 else tl.float32
    here = row * (time + TAPS - 1) * channels + c[None, :]
    x = tl.load(x_at + here + t[:, None] * channels, mask=exist, other=0.0).to(wide)
    by_x = tl.zeros([ROWS, COLUMNS], wide)
    for j in tl.static_range(TAPS):
        of = t - j
        real = exist & ((of >= 0) & (of < time))[:, None]
        by_y = tl.load(by_y_at + (row * time + of)[:, None] * channels + c[None, :], mask=real, other=0.0).to(wide)
        by_x += by_y * tl.load(w_at + c * TAPS + j, mask=c < channels, other=0.0).to(wide)[None, :]
        at = by_w_at + (program * TAPS + j) * channels + c
        tl.store(at, tl.sum(by_y * x, 0), mask=c < channels)
    tl.store(by_x_at + here + t[:, None] * channels, by_x, mask=exist)
