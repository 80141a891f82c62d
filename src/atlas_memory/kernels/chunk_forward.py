"""The forward kernel of the chunk recurrence: one program a batch row and head, the equations of chunk_parts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_parts import activate, errors, gates, inner_at, last, mul, outer_at, rows


@triton.jit
def forward(
    q_at,
    k_at,
    v_at,
    alpha_at,
    eta_at,
    gamma_at,
    w1_at,
    w2_at,
    y_at,
    time,
    slots,
    scale_at,
    HIDDEN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    PADDED: tl.constexpr,
    DEEP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    L2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Reads the memory before chunk j from slot j % slots, ``[slots, programs, ...]``, and writes that after it to the
    next; k and v begin with the WINDOW - 1 tokens before the first."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dtype: tl.constexpr = w2_at.dtype.element_ty
    scale = tl.load(scale_at)
    t, n = tl.arange(0, CHUNK), tl.arange(0, PADDED)
    keys = program * (time + WINDOW - 1) * DIM
    start = 0
    while start < time:  # numpy 2.4 refuses the interpreter's range over an argument
        chunk = start // CHUNK
        here = ((chunk % slots) * programs + program) * HIDDEN * DIM
        there = (((chunk + 1) % slots) * programs + program) * HIDDEN * DIM
        stop = tl.minimum(start + CHUNK, time) + WINDOW - 1
        k, v = rows(k_at + keys, start, n, stop, DIM, dtype), rows(v_at + keys, start, n, stop, DIM, dtype)
        q = rows(q_at + program * time * DIM, start, t, time, DIM, dtype)
        e = errors(
            k, v, w1_at + here, w2_at + here, scale,
            HIDDEN, DIM, BLOCK, DEEP, ACTIVATION, RESIDUAL, L2, PRECISION,
        )  # fmt: skip
        alpha, step, gamma, decay = gates(
            alpha_at + program * time,
            eta_at + program * time,
            gamma_at + program * time * WINDOW,
            start, time, k, CHUNK, WINDOW, PADDED,
        )  # fmt: skip
        mixing = mul(decay, step[:, None] * gamma, PRECISION)
        retained = tl.cumprod(alpha, 0)
        final, kept = last(mixing, CHUNK), last(retained, CHUNK)
        weights = mixing * mul(q, tl.trans(k), PRECISION)  # A
        read = tl.zeros_like(q)
        similar = tl.zeros_like(weights)  # X
        for block in range(0, HIDDEN, BLOCK):
            outer = outer_at(block, HIDDEN, DIM, BLOCK)
            w2 = tl.load(w2_at + here + outer)
            u, z = k, q
            if DEEP:
                inner = inner_at(block, HIDDEN, DIM, BLOCK)
                w1 = tl.load(w1_at + here + inner)
                u, s, _bend = activate(mul(k, tl.trans(w1), PRECISION), ACTIVATION)
                delta = mul(e, w2, PRECISION) * s
                hidden = retained[:, None] * mul(q, tl.trans(w1), PRECISION) - mul(weights, delta, PRECISION)
                z, _slope, _curve = activate(hidden, ACTIVATION)
                written = mul(tl.trans(final[:, None] * delta), k, PRECISION)
                tl.store(w1_at + there + inner, kept * w1 - written)
            read += mul(z, tl.trans(w2), PRECISION)
            similar += mul(z, tl.trans(u), PRECISION)
            written = mul(tl.trans(final[:, None] * e), u, PRECISION)
            tl.store(w2_at + there + outer, kept * w2 - written)
        y = retained[:, None] * read - mul(mixing * similar, e, PRECISION)
        if RESIDUAL:
            y += q
        offsets = (program * time + start + t)[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(y_at + offsets, y.to(y_at.dtype.element_ty), mask=(start + t < time)[:, None])
        tl.debug_barrier()  # the next chunk reads what other threads have just written
        start += CHUNK
