"""The backward kernels of the delta rule, in the order in which they run: from y to w and S of each chunk, S from chunk
to chunk backwards, and from w to what the chunk was made of. The letters are those of delta_common.py; dX is the
gradient of X, and S' the matrix after the chunk:

    from y:     dw = M^T dy,   dS = dy^T (c Q),   N = dy w^T,   P = D diag(eta) * N,
                dQ = c (dy S) + P K,   dK = P^T Q
    carried:    dw += r (K dS'^T),   dS += c_b dS' - dw^T G
    from w:     dV = T^T dw,   dA = -dV w^T,   P = rho (D' * dA) diag(eta),
                dK += P K + P^T K - rho c' (dV S) + r (w dS')

alpha_s is a factor of D[t, n] for n < s <= t. With F[t, n] what D[t, n] adds to the loss by its logarithm, the gradient
of log alpha_s is therefore the sum of F over these t and n, and likewise for D', c, c', r and c_b. Columns of q, k and
S, and rows of w and S, are taken a block at a time: whole tiles side by side do not fit into the registers.
"""

from __future__ import annotations

import triton.language as tl

import triton

from .delta_common import by_logarithms, decay, gate, mul, part, place, retention, tokens


@triton.jit(do_not_specialize=["time", "heads", "count"])
def read_back(
    q_at, k_at, alpha_at, eta_at, written_at, matrix_at, by_y_at,
    by_q_at, by_k_at, by_alpha_at, by_eta_at, by_written_at, by_matrix_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From y: dQ, and its parts of dK, dw, dS and of the gradients of eta and log alpha."""
    pair, chunk = place(count)
    alpha, eta = retention(alpha_at, pair, chunk, time, 0, CHUNK), gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
    t, every, block = tl.arange(0, CHUNK), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    decayed = decay(alpha, 0, CHUNK)
    scores, by_mixed = tl.zeros([CHUNK, CHUNK], alpha.dtype), tl.zeros([CHUNK, CHUNK], alpha.dtype)
    for first in range(0, WIDE, BLOCK):
        offsets, exist = tokens(
            pair, chunk, first, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, BLOCK
        )
        q, k = tl.load(q_at + offsets, mask=exist, other=0.0), tl.load(k_at + offsets, mask=exist, other=0.0)
        scores += mul(q, tl.trans(k), PRECISION)
    scores *= decayed
    mixed = tl.trans(scores * eta[None, :])
    for first in range(0, WIDE, BLOCK):
        offsets, exist = tokens(
            pair, chunk, first, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, BLOCK
        )
        by_y = tl.load(by_y_at + offsets, mask=exist, other=0.0)
        there = part(pair, chunk, count, t, first + block, CHUNK, WIDE)
        by_mixed += mul(by_y, tl.trans(tl.load(written_at + there)), PRECISION)
        tl.store(by_written_at + there, mul(mixed, by_y, PRECISION))
    along = by_mixed * scores
    by_scores = decayed * by_mixed * eta[None, :]
    back = tl.trans(by_scores)
    token = chunk * CHUNK + t
    tl.store(by_eta_at + pair * time + token, tl.sum(along, 0), mask=token < time)
    by_log = by_logarithms(along * eta[None, :], 0, CHUNK)
    since = tl.cumprod(alpha, 0)
    by_since = tl.zeros([CHUNK], alpha.dtype)
    whole, real = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
    by_y = tl.load(by_y_at + whole, mask=real, other=0.0)
    for first in range(0, WIDE, BLOCK):
        offsets, exist = tokens(
            pair, chunk, first, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, BLOCK
        )
        q, k = tl.load(q_at + offsets, mask=exist, other=0.0), tl.load(k_at + offsets, mask=exist, other=0.0)
        s = tl.load(matrix_at + part(pair, chunk, count + 1, every, first + block, WIDE, WIDE))
        old = since[:, None] * mul(by_y, s, PRECISION)
        by_since += tl.sum(old * q, 1)
        tl.store(by_q_at + offsets, old + mul(by_scores, k, PRECISION), mask=exist)
        tl.store(by_k_at + offsets, mul(back, q, PRECISION), mask=exist)
        tl.store(
            by_matrix_at + part(pair, chunk, count, every, first + block, WIDE, WIDE),
            mul(tl.trans(by_y), since[:, None] * q, PRECISION),
        )
    by_log += tl.sum(tl.where(t[:, None] >= t[None, :], by_since[:, None], 0.0), 0)
    tl.store(by_alpha_at + pair * time + token, by_log, mask=token < time)


@triton.jit(do_not_specialize=["time", "heads", "count"])
def carry_back(
    k_at, eta_at, through_at, tail_at, whole_at, by_end_at, by_written_at, by_matrix_at, by_initial_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first: dw in place of its part from y, and dS' in place of what y gave to dS. A
    program has ROWS rows of S."""
    pair, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, WIDE)
    exist = (row < DIM)[:, None] & (column < DIM)[None, :]
    outside = pair * DIM * DIM + row[:, None] * DIM + column[None, :]
    by_s = tl.load(by_end_at + outside, mask=exist, other=0.0)
    t = tl.arange(0, CHUNK)
    chunk = pair * 0 + count - 1
    while chunk >= 0:
        at = by_matrix_at + part(pair, chunk, count, row, column, WIDE, WIDE)
        read = tl.load(at)
        tl.debug_barrier()  # another thread may store where this one loads
        tl.store(at, by_s)
        here = (pair * count + chunk) * CHUNK
        offsets, real = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
        k = tl.load(k_at + offsets, mask=real, other=0.0)
        through = tl.load(through_at + part(pair, chunk, count, t, column, CHUNK, WIDE))
        r = tl.load(tail_at + here + t) * gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
        at = by_written_at + (here + t[:, None]) * WIDE + row[None, :]
        by_w = tl.load(at) + mul(r[:, None] * k, tl.trans(by_s), PRECISION)
        tl.store(at, by_w)
        by_s = tl.load(whole_at + pair * count + chunk) * by_s + read - mul(tl.trans(by_w), through, PRECISION)
        chunk -= 1
    tl.store(by_initial_at + outside, by_s, mask=exist)


@triton.jit(do_not_specialize=["time", "heads", "count"])
def write_back(
    k_at, alpha_at, eta_at, solved_at, written_at, matrix_at, tail_at, whole_at, by_written_at, by_matrix_at,
    by_k_at, by_v_at, by_alpha_at, by_eta_at,
    time, heads, count, batch_stride, head_stride, time_stride,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From w: dV, and the rest of dK and of the gradients of eta and alpha."""
    pair, chunk = place(count)
    alpha, eta = retention(alpha_at, pair, chunk, time, 0, CHUNK), gate(eta_at, pair, chunk, time, 0.0, 0, CHUNK)
    before = retention(alpha_at, pair, chunk, time, 1, CHUNK)
    rate = alpha if AFTER else tl.full([CHUNK], 1.0, alpha.dtype)
    t, every, block = tl.arange(0, CHUNK), tl.arange(0, WIDE), tl.arange(0, BLOCK)
    by_a, scores = tl.zeros([CHUNK, CHUNK], alpha.dtype), tl.zeros([CHUNK, CHUNK], alpha.dtype)
    solved = tl.trans(tl.load(solved_at + part(pair, chunk, count, t, t, CHUNK, CHUNK)))
    for first in range(0, WIDE, BLOCK):
        offsets, exist = tokens(
            pair, chunk, first, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, BLOCK
        )
        there = part(pair, chunk, count, t, first + block, CHUNK, WIDE)
        by_v = mul(solved, tl.load(by_written_at + there), PRECISION)
        tl.store(by_v_at + offsets, by_v, mask=exist)
        by_a -= mul(by_v, tl.trans(tl.load(written_at + there)), PRECISION)
        k = tl.load(k_at + offsets, mask=exist, other=0.0)
        scores += mul(k, tl.trans(k), PRECISION)
    by_a *= decay(before, 1, CHUNK)
    by_kernel = rate[:, None] * by_a * eta[None, :]
    by_kernel += tl.trans(by_kernel)
    by_a *= scores
    by_eta = tl.sum(rate[:, None] * by_a, 0)
    by_a *= eta[None, :]
    by_rate = tl.sum(by_a, 1)
    moved = by_logarithms(rate[:, None] * by_a, 1, CHUNK)
    by_since, by_tail = tl.zeros([CHUNK], alpha.dtype), tl.zeros([CHUNK], alpha.dtype)
    since, by_whole = tl.cumprod(before, 0), tl.zeros([BLOCK], alpha.dtype)
    here = (pair * count + chunk) * CHUNK + t
    tail, whole = tl.load(tail_at + here), tl.load(whole_at + pair * count + chunk)
    tl.debug_barrier()  # the values below were stored above, by other threads
    wide, full = tokens(pair, chunk, 0, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, WIDE)
    values = tl.load(by_v_at + wide, mask=full, other=0.0)
    w = tl.load(written_at + part(pair, chunk, count, t, every, CHUNK, WIDE))
    for first in range(0, WIDE, BLOCK):
        offsets, exist = tokens(
            pair, chunk, first, time, heads, batch_stride, head_stride, time_stride, CHUNK, DIM, BLOCK
        )
        k = tl.load(k_at + offsets, mask=exist, other=0.0)
        s = tl.load(matrix_at + part(pair, chunk, count + 1, every, first + block, WIDE, WIDE))
        by_s = tl.load(by_matrix_at + part(pair, chunk, count, every, first + block, WIDE, WIDE))
        by_whole += tl.sum(by_s * s, 0)
        new, old = mul(w, by_s, PRECISION), mul(values, s, PRECISION)
        by_tail += tl.sum(new * k, 1)
        by_since -= tl.sum(old * k, 1)
        by_k = tl.load(by_k_at + offsets, mask=exist, other=0.0) + (tail * eta)[:, None] * new
        by_k += mul(by_kernel, k, PRECISION) - (rate * since)[:, None] * old
        tl.store(by_k_at + offsets, by_k, mask=exist)
    by_since *= since
    by_tail *= tail
    by_rate += by_since
    row, column = t[:, None], t[None, :]
    along = tl.where(row > column, (rate * by_since)[:, None], 0.0)
    along += tl.where(row < column, (by_tail * eta)[:, None], 0.0)
    along += tl.where(row == column + 1, moved[:, None], 0.0)
    by_log = tl.sum(along, 0) + whole * tl.sum(by_whole, 0)
    token = chunk * CHUNK + t
    real, at = token < time, pair * time + token
    by_alpha = (tl.load(by_alpha_at + at, mask=real, other=0.0) + by_log) / alpha
    if AFTER:
        by_alpha += by_rate
    tl.store(by_alpha_at + at, by_alpha, mask=real)
    tl.store(by_eta_at + at, tl.load(by_eta_at + at, mask=real, other=0.0) + by_eta + by_tail, mask=real)
