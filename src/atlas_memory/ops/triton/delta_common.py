"""What the kernels of the delta rule share, and the equations of a chunk.

One head, one chunk of b tokens, rows of K, Q and V for its tokens, and the matrix S at its start. Token t writes w_t,
what is new about its value; rho_t is alpha_t where the delta step comes after the decay, else 1:

    w_t = v_t - rho_t S_{t-1} k_t,      S_t = alpha_t S_{t-1} + eta_t w_t k_t^T,      y_t = S_t q_t

D[t, n] = alpha_{n+1}..alpha_t for n <= t, else 0, and c_t = alpha_1..alpha_t; D' and c' are the same a row late:
D'[t, n] = D[t-1, n], c'_t = c_{t-1}. A vector beside a matrix multiplies its rows, and ``*`` is entry by entry. The
chunk is then (as in delta_scan.py, which has -w for w)

    A = rho (D' * K K^T) diag(eta),      T = (I + A)^{-1},      U = T V,      G = T (rho c' K)
    w = U - G S^T,                       M = D diag(eta) * Q K^T,             y = c (Q S^T) + M w
    S' = c_b S + w^T (r K),              r: the last row of D diag(eta)

U, G, M and T are of the chunk alone, so that only w and S' wait for the chunk before. Tokens that do not exist have
zero keys, values and queries, alpha = 1 and eta = 0: they write nothing, and nothing decays.
"""

from __future__ import annotations

import triton.language as tl

import triton


@triton.jit
def mul(x, y, PRECISION: tl.constexpr):
    """x y."""
    return tl.dot(x, y, input_precision=PRECISION, out_dtype=x.dtype)


@triton.jit
def place(count):
    """Which sequence and head this program is for, and which of ``count`` chunks."""
    program = tl.program_id(0).to(tl.int64)
    return program // count, program % count


@triton.jit
def tokens(
    pair, chunk, first, time, heads, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Offsets of a chunk's rows in q, k, v or y, ``[CHUNK, COLUMNS]``, from column ``first`` on, and which of them
    exist."""
    t, d = chunk * CHUNK + tl.arange(0, CHUNK), first + tl.arange(0, COLUMNS)
    start = (pair // heads) * batch_stride + (pair % heads) * head_stride
    return start + t[:, None] * time_stride + d[None, :], (t < time)[:, None] & (d < DIM)[None, :]


@triton.jit
def part(pair, chunk, count, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of some rows and columns of one of the ``[pairs, count, ROWS, COLUMNS]`` matrices that kernels leave for
    one another."""
    return ((pair * count + chunk) * ROWS + row)[:, None] * COLUMNS + column[None, :]


@triton.jit
def gate(at, pair, chunk, time, neutral, late, CHUNK: tl.constexpr):
    """A gate ``[pairs, time]`` of the chunk's tokens, or of the tokens before them where ``late`` is 1; ``neutral`` for
    what is not in the chunk."""
    t = tl.arange(0, CHUNK) - late
    token = chunk * CHUNK + t
    return tl.load(at + pair * time + token, mask=(t >= 0) & (token < time), other=neutral)


@triton.jit
def retention(at, pair, chunk, time, late, CHUNK: tl.constexpr):
    """alpha, as ``gate``. A closed one is 1e-20, so that its gradient can be found by dividing by it."""
    return tl.maximum(gate(at, pair, chunk, time, 1.0, late, CHUNK), 1e-20)


@triton.jit
def decay(alpha, late: tl.constexpr, CHUNK: tl.constexpr):
    """D; or D', where ``late`` is 1 and ``alpha`` is a token late."""
    t, n = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    product = tl.cumprod(tl.where(t > n + late, alpha[:, None], 1.0), 0)
    return tl.where(t >= n + late, product, 0.0)


@triton.jit
def by_logarithms(x, late: tl.constexpr, CHUNK: tl.constexpr):
    """Given for each entry of D (of D' where ``late`` is 1) what its logarithm adds to the loss, the same for the
    logarithm of every factor s: the sum of x[t, n] over n < s <= t (D': n < s < t). D' gives it a token late."""
    t, n = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.sum(tl.where(n + late < t, tl.cumsum(x, 0, reverse=True), 0.0), 1)


@triton.jit
def last(x, CHUNK: tl.constexpr):
    """The last of CHUNK numbers."""
    return tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, x, 0.0), 0)


@triton.jit
def inverse(a, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """(I + a)^{-1} of a strictly lower triangular ``[CHUNK, CHUNK]``.

    The blocks of 16 on the diagonal are solved row after row, all at once; with X for what they give, and B = X a
    below them, the rest is (I - B) (I + B^2) X, exact for up to four blocks.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    own = tl.arange(0, BLOCKS)[:, None, None, None] == tl.arange(0, BLOCKS)[None, None, :, None]
    a4 = tl.reshape(a, (BLOCKS, 16, BLOCKS, 16))
    blocks = tl.sum(tl.where(own, a4, 0.0), 2)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    zeros = tl.minimum(tl.abs(blocks), 0.0)  # of zeros alone the compiler makes code that spills registers
    x = tl.where(row == column, 1.0, zeros)
    for i in range(1, 16):
        line = tl.sum(tl.where(row == i, blocks, 0.0), 1)
        x = tl.where(row == i, x - tl.sum(line[:, :, None] * x, 1)[:, None, :], x)
    out = tl.reshape(tl.where(own, x[:, :, None, :], 0.0), (CHUNK, CHUNK))
    if BLOCKS > 1:
        t, n = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
        below = tl.where(t // 16 == n // 16, 0.0, a)
        b = tl.dot(out, below, input_precision=PRECISION, out_dtype=a.dtype)
        if BLOCKS > 2:
            twice = tl.dot(b, b, input_precision=PRECISION, out_dtype=a.dtype)
            out += tl.dot(twice, out, input_precision=PRECISION, out_dtype=a.dtype)
        out -= tl.dot(b, out, input_precision=PRECISION, out_dtype=a.dtype)
    return out
