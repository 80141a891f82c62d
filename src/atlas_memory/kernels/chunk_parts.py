"""What the forward and the backward kernel of the chunk recurrence share, and the equations of a chunk.

One head, one chunk of b tokens, its N = b + c - 1 window tokens as rows of K and V, its queries as rows of Q, a memory
W_1 ``[H, d]``, W_2 ``[d, H]`` at the chunk's start. sigma is the activation, rho is 1 with a residual, else 0; ``*``
multiplies entry by entry and a vector beside a matrix multiplies rows; L2: kappa = 2 scale:

    h = K W_1^T,  u = sigma(h),  s = sigma'(h)            E = kappa (rho K + u W_2^T - V), or -V
    F = E W_2,    delta = F * s                           the deltas of W_2 and W_1 are E and delta
    R = D diag(eta) Gamma,  a = cumprod(alpha)              r, a_b: their last rows
    C = Q K^T,  A = R * C                                 hq = a (Q W_1^T) - A delta,   z = sigma(hq)
    X = z u^T,  B = R * X                                 y = rho Q + a (z W_2^T) - B E
    W_1' = a_b W_1 - delta^T (r K)                        W_2' = a_b W_2 - E^T (r u)

``Linear`` is the outer matrix alone: u = K, z = Q, no W_1. The hidden units are taken a block at a time, for only sums
over them are needed: of the predictions, of X and of z W_2^T. A program's memory therefore stays in
global memory, in the slot where the backward pass wants it anyway, and is read back from the cache: its 2 H d numbers
do not fit into registers beside what a chunk needs once H d is 64 * 256.

Tokens that do not exist are zero keys, values and queries with alpha = 1, eta = gamma = 0: E, u and z are zero there,
nothing is written and nothing fades.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mul(x, y, PRECISION: tl.constexpr):
    """x y."""
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=x.dtype)


@triton.jit
def activate(h, ACTIVATION: tl.constexpr):
    """sigma(h), sigma'(h) and sigma''(h). Constants are given a dtype, since bare ones would be float32."""
    if ACTIVATION == "silu":
        gate = 1.0 / (1.0 + tl.exp(-h))
        bend = gate * (1.0 - gate)
        return h * gate, gate + h * bend, bend * (2.0 + h * (1.0 - 2.0 * gate))
    cdf = 0.5 * (1.0 + tl.erf(h * tl.full([], 0.7071067811865476, h.dtype)))
    pdf = tl.exp(-0.5 * h * h) * tl.full([], 0.3989422804014327, h.dtype)
    return h * cdf, cdf + h * pdf, pdf * (2.0 - h * h)


@triton.jit
def rows(at, first, count, stop, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Rows first, first + 1, ... of a ``[., DIM]`` array at the indices ``count``, zero from row ``stop`` on."""
    token = first + count
    offsets = token[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(at + offsets, mask=(token < stop)[:, None], other=0.0).to(DTYPE)


@triton.jit
def inner_at(block, HIDDEN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the rows of W_1 of a block of hidden units, ``[BLOCK, DIM]``."""
    return (block + tl.arange(0, BLOCK))[:, None] * DIM + tl.arange(0, DIM)[None, :]


@triton.jit
def outer_at(block, HIDDEN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the columns of W_2 of a block of hidden units, ``[DIM, BLOCK]``."""
    return tl.arange(0, DIM)[:, None] * HIDDEN + (block + tl.arange(0, BLOCK))[None, :]


@triton.jit
def errors(
    k,
    v,
    w1_at,
    w2_at,
    scale,
    HIDDEN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEEP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """E."""
    if not L2:
        return -v
    prediction = k if RESIDUAL else tl.zeros_like(k)
    for block in range(0, HIDDEN, BLOCK):
        w2 = tl.load(w2_at + outer_at(block, HIDDEN, DIM, BLOCK))
        u = k
        if DEEP:
            w1 = tl.load(w1_at + inner_at(block, HIDDEN, DIM, BLOCK))
            u, _slope, _bend = activate(mul(k, tl.trans(w1), PRECISION), ACTIVATION)
        prediction += mul(u, tl.trans(w2), PRECISION)
    return scale * (prediction - v)


@triton.jit
def gates(
    alpha_at,
    eta_at,
    gamma_at,
    start,
    time,
    like,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
):
    """alpha, eta ``[CHUNK]``, Gamma ``[CHUNK, PADDED]``, D ``[CHUNK, CHUNK]`` of the chunk at token ``start``, in the
    dtype of ``like``; D[t, n] = alpha_{n+1} .. alpha_t is a running product down each column, exact for any alpha."""
    t, n = tl.arange(0, CHUNK), tl.arange(0, PADDED)
    token = start + t
    alpha = tl.load(alpha_at + token, mask=token < time, other=1.0).to(like.dtype)
    eta = tl.load(eta_at + token, mask=token < time, other=0.0).to(like.dtype)
    age = t[:, None] + (WINDOW - 1) - n[None, :]
    seen = (age >= 0) & (age < WINDOW) & (token < time)[:, None]
    gamma = tl.load(gamma_at + token[:, None] * WINDOW + age, mask=seen, other=0.0).to(like.dtype)
    below = t[:, None] > t[None, :]
    decay = tl.cumprod(tl.where(below, alpha[:, None], 1.0).to(like.dtype), 0)
    return alpha, eta, gamma, tl.where(t[:, None] >= t[None, :], decay, 0.0)


@triton.jit
def last(x, CHUNK: tl.constexpr):
    """The last of ``CHUNK`` rows."""
    at = tl.arange(0, CHUNK) == CHUNK - 1
    if len(x.shape) == 2:
        return tl.sum(tl.where(at[:, None], x, 0.0), 0)
    else:  # without it the compiler reads on, and finds shapes that do not fit
        return tl.sum(tl.where(at, x, 0.0), 0)
