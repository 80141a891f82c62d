"""The forward kernels of the delta rule: what each chunk would write, the matrix from chunk to chunk, and what is read.
The equations are in delta_common.py."""

from __future__ import annotations

import triton.language as tl

import triton

from .delta_common import decay, gate, inverse, last, mul, part, place, retention, tokens


@triton.jit(do_not_specialize=["time", "heads", "count"])
def write(
    k_at, v_at, alpha_at, eta_at, solved_at, written_at, through_at, tail_at, whole_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T, U and G of every chunk, and of alpha the last row of D (``tail``) and c_b (``whole``)."""
    pair, chunk = place(count)
    offsets, exist = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
    k, v = tl.load(k_at + offsets, mask=exist, other=0.0), tl.load(v_at + offsets, mask=exist, other=0.0)
    alpha, eta = retention(alpha_at, pair, chunk, time, 0, CHUNK), gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
    before = retention(alpha_at, pair, chunk, time, 1, CHUNK)
    decayed, since = decay(before, 1, CHUNK), tl.cumprod(before, 0)
    a = decayed * eta[None, :] * mul(k, tl.trans(k), PRECISION)
    if AFTER:
        a, since = alpha[:, None] * a, alpha * since
    solved = inverse(a, PRECISION, CHUNK)
    t = tl.arange(0, CHUNK)
    tl.store(solved_at + part(pair, chunk, count, t, t, CHUNK, CHUNK), solved)
    there = part(pair, chunk, count, t, tl.arange(0, WIDE), CHUNK, WIDE)
    tl.store(written_at + there, mul(solved, v, PRECISION))
    tl.store(through_at + there, mul(solved, since[:, None] * k, PRECISION))
    end = last(alpha, CHUNK)
    tail = tl.sum(tl.where((t == CHUNK - 1)[:, None], decayed, 0.0), 0) * end
    tl.store(tail_at + (pair * count + chunk) * CHUNK + t, tl.where(t == CHUNK - 1, 1.0, tail))
    tl.store(whole_at + pair * count + chunk, last(tl.cumprod(before, 0), CHUNK) * end)


@triton.jit(do_not_specialize=["time", "heads", "count"])
def carry(
    k_at, eta_at, through_at, tail_at, whole_at, initial_at, written_at, matrix_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S before every chunk and after the last, ``[pairs, count + 1, WIDE, WIDE]``, and w in place of U. A program walks
    the chunks with ROWS rows of S, which do not meet the others."""
    pair, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    exist = (row < DIM)[:, None] & (column < DIM)[None, :]
    s = tl.load(initial_at + pair * DIM * DIM + row[:, None] * DIM + column[None, :], mask=exist, other=0.0)
    t = tl.arange(0, CHUNK)
    chunk = pair * 0
    while chunk < count:  # numpy 2.4 refuses the interpreter's range over an argument
        tl.store(matrix_at + part(pair, chunk, count + 1, row, column, WIDE, WIDE), s)
        here = (pair * count + chunk) * CHUNK
        offsets, real = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
        k = tl.load(k_at + offsets, mask=real, other=0.0)
        through = tl.load(through_at + part(pair, chunk, count, t, column, CHUNK, WIDE))
        at = written_at + (here + t[:, None]) * WIDE + row[None, :]
        w = tl.load(at) - mul(through, tl.trans(s), PRECISION)
        tl.store(at, w)
        r = tl.load(tail_at + here + t) * gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
        s = tl.load(whole_at + pair * count + chunk) * s + mul(tl.trans(w), r[:, None] * k, PRECISION)
        chunk += 1
    tl.store(matrix_at + part(pair, count, count + 1, row, column, WIDE, WIDE), s)


@triton.jit(do_not_specialize=["time", "heads", "count"])
def read(
    q_at, k_at, alpha_at, eta_at, written_at, matrix_at, y_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of every chunk."""
    pair, chunk = place(count)
    offsets, exist = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
    q, k = tl.load(q_at + offsets, mask=exist, other=0.0), tl.load(k_at + offsets, mask=exist, other=0.0)
    alpha, eta = retention(alpha_at, pair, chunk, time, 0, CHUNK), gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
    t, d = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    s = tl.load(matrix_at + part(pair, chunk, count + 1, d, d, WIDE, WIDE))
    w = tl.load(written_at + part(pair, chunk, count, t, d, CHUNK, WIDE))
    mixed = decay(alpha, 0, CHUNK) * eta[None, :] * mul(q, tl.trans(k), PRECISION)
    y = tl.cumprod(alpha, 0)[:, None] * mul(q, tl.trans(s), PRECISION) + mul(mixed, w, PRECISION)
    tl.store(y_at + offsets, y, mask=exist)
