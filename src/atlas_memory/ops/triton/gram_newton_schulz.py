"""Newton-Schulz on Gram matrices: Q with NS(S) = Q S from G = S S^T, forward and backward one kernel each.

One program a matrix. It reads G once, runs every iteration on chip and writes Q once. With f the floor (or 0), P the
symmetric part of G + f I over t = tr G + f, a, b, c the coefficients of rules/orthogonal.py and i = 1..k,

    z_i = a I + b P_i + c P_i^2,    Q_i = z_i Q_{i-1},    P_{i+1} = z_i P_i z_i,    Q = t^(-1/2) Q_k.

All of these are polynomials in one symmetric matrix, so that they are symmetric and commute, and only the symmetric
part of a gradient matters. With sym(X) = (X + X^T) / 2 and bars for gradients, from i = k down to 1:

    z'_i     = sym(Q'_i Q_{i-1} + 2 P'_{i+1} z_i P_i)                  Q'_k = t^(-1/2) sym(Q'),  P'_{k+1} = 0
    P'_i     = sym(z_i P'_{i+1} z_i + b z'_i + 2 c z'_i P_i)
    Q'_{i-1} = sym(z_i Q'_i)
    G'       = P'_1 / t - I (<P'_1, P_1> + <Q', Q> / 2) / t

The backward pass recomputes P_i and Q_{i-1} from P_1 for every i: for k = 5 a few dozen products of matrices that
never leave the chip, where saving them would write ten times what the forward pass does. Sizes are padded to powers of
two: the padding of P is zero, and the block a^k I that arises in the padding of Q does not mix with the rest.

Every product is in full float32 (or float64): Newton-Schulz multiplies rounding errors by up to 485, and TF32's are
2^13 times those of float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

import triton

from ...rules.orthogonal import COEFFICIENTS, CONVERGENT


def gram_newton_schulz(gram: Tensor, steps: int = 5, floor: Tensor | None = None) -> Tensor:
    """``gram_polynomial`` of ops/newton_schulz.py, for ``gram`` ``[..., m, m]`` with m <= 64, float32 or (in
    the interpreter) float64; same shape and dtype. Differentiable once, with respect to ``gram``."""
    return _GramNewtonSchulz.apply(gram, floor, steps)


class _GramNewtonSchulz(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gram: Tensor, floor: Tensor | None, steps: int) -> Tensor:
        flat = gram.reshape(-1, *gram.shape[-2:]).contiguous()
        along_key = flat.new_zeros(len(flat))
        if floor is not None:
            along_key = floor.to(flat).expand(*gram.shape[:-2], 1, 1).reshape(-1).contiguous()
        out = torch.empty_like(flat)
        ctx.save_for_backward(flat, along_key)
        ctx.shape, ctx.options = gram.shape, options(gram.shape[-1], gram.dtype, steps, floor is not None)
        _launch(_forward, ctx.options, flat, along_key, out)
        return out.view(gram.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gram, along_key = ctx.saved_tensors
        out = torch.empty_like(gram)
        _launch(_backward, ctx.options, gram, along_key, grad.reshape(gram.shape).contiguous(), out)
        return out.view(ctx.shape), None, None


def options(size: int, dtype: torch.dtype, steps: int, floor: bool = False) -> dict[str, Any]:
    """The compile-time values for matrices of ``size`` x ``size``, with a floor or without."""
    a, b, c = CONVERGENT if floor else COEFFICIENTS
    padded = max(16, triton.next_power_of_2(size))
    return {
        "SIZE": size,
        "PADDED": padded,
        "STEPS": steps,
        "A": a,
        "B": b,
        "C": c,
        "TINY": torch.finfo(dtype).tiny,
        "num_warps": {16: 1, 32: 4, 64: 8}[padded],
        "num_stages": 1,
    }


def _launch(kernel: Any, values: dict[str, Any], gram: Tensor, *tensors: Tensor) -> None:
    if gram.numel():
        with torch.cuda.device_of(gram):
            kernel[(gram.shape[0],)](gram, *tensors, **values)


@triton.jit
def _mul(x, y):
    return tl.dot(x, y, input_precision="ieee", out_dtype=x.dtype)


@triton.jit
def _number(value: tl.constexpr, like):
    """A constant in the dtype of ``like``; a bare one would be rounded to float32."""
    return tl.full([1, 1], value, like.dtype)


@triton.jit
def _symmetric(x):
    return 0.5 * (x + tl.trans(x))


@triton.jit
def _at(SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of this program's matrix, which of them exist, and the identity."""
    i = tl.arange(0, PADDED)
    offsets = tl.program_id(0).to(tl.int64) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
    return offsets, (i[:, None] < SIZE) & (i[None, :] < SIZE), i[:, None] == i[None, :]


@triton.jit
def _start(gram, floor_at, exists, eye, TINY: tl.constexpr):
    """P_1, and the reciprocal and inverse root of t, both 0 where it is no normal positive number."""
    floor = tl.load(floor_at + tl.program_id(0))
    cache = tl.sum(tl.sum(tl.where(eye, gram, 0.0), 1), 0) + floor
    gram += tl.where(eye & exists, floor, 0.0)
    some = cache > TINY
    safe = tl.where(some, cache, 1.0)
    inverse, root = tl.where(some, 1.0 / safe, 0.0), tl.where(some, 1.0 / tl.sqrt(safe), 0.0)
    return _symmetric(gram) * inverse, inverse, root


@triton.jit
def _polynomial(power, eye, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = _number(A, power), _number(B, power), _number(C, power)
    return tl.where(eye, a, 0.0) + b * power + c * _mul(power, power)


@triton.jit
def _forward(
    gram_at,
    floor_at,
    out_at,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    TINY: tl.constexpr,
):
    offsets, exists, eye = _at(SIZE, PADDED)
    power, _, root = _start(tl.load(gram_at + offsets, mask=exists, other=0.0), floor_at, exists, eye, TINY)
    q = _polynomial(power, eye, A, B, C)
    z = q
    for _ in range(STEPS - 1):
        power = _mul(_mul(z, power), z)
        z = _polynomial(power, eye, A, B, C)
        q = _mul(z, q)
    tl.store(out_at + offsets, root * q, mask=exists)


@triton.jit
def _backward(
    gram_at,
    floor_at,
    grad_at,
    out_at,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    TINY: tl.constexpr,
):
    offsets, exists, eye = _at(SIZE, PADDED)
    first, inverse, root = _start(tl.load(gram_at + offsets, mask=exists, other=0.0), floor_at, exists, eye, TINY)
    one = tl.where(eye, 1.0, 0.0).to(first.dtype)
    grad = _symmetric(tl.load(grad_at + offsets, mask=exists, other=0.0))
    grad_q = root * grad
    grad_power = tl.zeros_like(first)
    along_scale = tl.sum(tl.sum(tl.zeros_like(first), 1), 0)  # <Q', Q>
    b, c = _number(B, first), _number(C, first)
    for back in range(STEPS):
        power, q = first, one
        z = _polynomial(power, eye, A, B, C)
        for _ in range(STEPS - 1 - back):
            q = _mul(z, q)
            power = _mul(_mul(z, power), z)
            z = _polynomial(power, eye, A, B, C)
        if back == 0:
            along_scale = tl.sum(tl.sum(grad_q * _mul(z, q), 1), 0)
        carried = _mul(grad_power, z)
        grad_z = _symmetric(_mul(grad_q, q) + 2.0 * _mul(carried, power))
        grad_power = _symmetric(_mul(z, carried) + b * grad_z + 2.0 * c * _mul(grad_z, power))
        grad_q = _symmetric(_mul(z, grad_q))
    along_trace = tl.sum(tl.sum(grad_power * first, 1), 0) + 0.5 * along_scale
    out = inverse * (grad_power - tl.where(eye, along_trace, 0.0))
    tl.store(out_at + offsets, out, mask=exists)
