"""The backward kernel of the chunk recurrence: chunks in reverse, each recomputed from its start memory.

The adjoint of the equations of chunk_parts.py, x' the gradient of x, W_1' and W_2' of the chunk's end memory given
and G_1, G_2 those of its start wanted. Sums over entries are written <.>.

What needs E, R and a alone, a block of hidden units at a time (first loop):

    B' = -y' E^T,  X' = R * B'                            z' = a (y' W_2) + X' u
    hq' = z' * sigma'(hq)                                 A' = -hq' delta^T
    delta' = -A^T hq' - r (K W_1'^T)                      F' = delta' * s
    u' = X'^T z - r (E W_2')                              h' = u' * s + delta' * F * sigma''(h)
    G_1 = a_b W_1' + (a hq')^T Q + h'^T K                 G_2 = a_b W_2' + (a y')^T z + E^T F'
    K' = -(r delta) W_1' + h' W_1 + C'^T Q + ...          Q' = rho y' + (a hq') W_1 + C' K,   C' = R * A'
    E' = -B^T y' - r (u W_2'^T) + F' W_2                  R' = X * B' + C * A', and on its last row r'
    a' = <z * (y' W_2)> + <hq' * (Q W_1^T)>, and on its last a_b' = <W_1' * W_1> + <W_2' * W_2>
    r' = -<delta * (K W_1'^T)> - <E * (u W_2'^T)>

The scalars. R_t = alpha_t R_{t-1} + eta_t Gamma_t, and a likewise, so that with S = D^T R', and D_{-1} D one row down:

    eta'_t = <S_t, Gamma_t>,  Gamma' = eta S         alpha'_t = <S_t, (D_{-1} diag(eta) Gamma)_t> + (D^T a')_t a_{t-1}

What needs E' (second loop; nothing for the dot product), added to the above:

    p' = kappa E',  V' = -kappa E'  (dot: 0 and -E')      u' = p' W_2,  h' = u' * s
    G_1 += h'^T K,  G_2 += p'^T u                         K' += h' W_1 + rho p'

``Linear``: u' and z' are gradients of K and Q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_parts import activate, errors, gates, inner_at, last, mul, outer_at, rows


@triton.jit
def backward(
    q_at,
    k_at,
    v_at,
    alpha_at,
    eta_at,
    gamma_at,
    w1_at,
    w2_at,
    grad_y_at,
    grad_frozen1_at,
    grad_frozen2_at,
    grad_q_at,
    grad_k_at,
    grad_v_at,
    grad_alpha_at,
    grad_eta_at,
    grad_gamma_at,
    grad1_at,
    grad2_at,
    time,
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
    """``grad1_at``, ``grad2_at`` hold the gradients of the end memory and are left with those of M_0; ``grad_frozen``
    are those of the memory before the last chunk, beside what flows through it; gradients of k and v begin at zero."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dtype: tl.constexpr = w2_at.dtype.element_ty
    scale = tl.load(scale_at)
    t, n, lanes = tl.arange(0, CHUNK), tl.arange(0, PADDED), tl.arange(0, DIM)
    tokens, size = program * time, HIDDEN * DIM
    keys = program * (time + WINDOW - 1) * DIM
    grad1_at += program * size
    grad2_at += program * size
    start = (tl.cdiv(time, CHUNK) - 1) * CHUNK
    while start >= 0:
        at_end = start + CHUNK >= time
        here = (start // CHUNK * programs + program) * size
        stop = tl.minimum(start + CHUNK, time) + WINDOW - 1
        k, v = rows(k_at + keys, start, n, stop, DIM, dtype), rows(v_at + keys, start, n, stop, DIM, dtype)
        q = rows(q_at + tokens * DIM, start, t, time, DIM, dtype)
        grad_y = rows(grad_y_at + tokens * DIM, start, t, time, DIM, dtype)
        e = errors(
            k, v, w1_at + here, w2_at + here, scale,
            HIDDEN, DIM, BLOCK, DEEP, ACTIVATION, RESIDUAL, L2, PRECISION,
        )  # fmt: skip
        alpha, step, gamma, decay = gates(
            alpha_at + tokens, eta_at + tokens, gamma_at + tokens * WINDOW,
            start, time, k, CHUNK, WINDOW, PADDED,
        )  # fmt: skip
        mixing = mul(decay, step[:, None] * gamma, PRECISION)
        retained = tl.cumprod(alpha, 0)
        final, kept = last(mixing, CHUNK), last(retained, CHUNK)
        grad_b = -mul(grad_y, tl.trans(e), PRECISION)
        grad_x = mixing * grad_b

        similar = tl.zeros_like(mixing)  # X
        grad_e = tl.zeros_like(k)
        grad_k = tl.zeros_like(k)
        grad_q = grad_y if RESIDUAL else tl.zeros_like(q)
        grad_retained = tl.zeros_like(retained)
        grad_final = tl.zeros_like(final)
        grad_kept = tl.zeros_like(kept)
        pairs = mul(q, tl.trans(k), PRECISION) if DEEP else mixing  # C
        weights = mixing * pairs  # A
        grad_weights = tl.zeros_like(mixing)
        for block in range(0, HIDDEN, BLOCK):
            outer = outer_at(block, HIDDEN, DIM, BLOCK)
            w2, end2 = tl.load(w2_at + here + outer), tl.load(grad2_at + outer)
            grad_kept += tl.sum(tl.sum(w2 * end2, 1), 0)
            u, z = k, q
            if DEEP:
                inner = inner_at(block, HIDDEN, DIM, BLOCK)
                w1, end1 = tl.load(w1_at + here + inner), tl.load(grad1_at + inner)
                grad_kept += tl.sum(tl.sum(w1 * end1, 1), 0)
                u, s, bend = activate(mul(k, tl.trans(w1), PRECISION), ACTIVATION)
                back_error = mul(e, w2, PRECISION)  # F
                delta = back_error * s
                from_start = mul(q, tl.trans(w1), PRECISION)
                z, slope, _curve = activate(retained[:, None] * from_start - mul(weights, delta, PRECISION), ACTIVATION)
            similar += mul(z, tl.trans(u), PRECISION)
            from_y = mul(grad_y, w2, PRECISION)
            grad_retained += tl.sum(z * from_y, 1)
            grad_z = retained[:, None] * from_y + mul(grad_x, u, PRECISION)
            into = mul(u, tl.trans(end2), PRECISION)
            grad_e -= final[:, None] * into
            grad_final -= tl.sum(e * into, 1)
            grad_u = mul(tl.trans(grad_x), z, PRECISION) - final[:, None] * mul(e, end2, PRECISION)
            start2 = kept * end2 + mul(tl.trans(retained[:, None] * grad_y), z, PRECISION)
            if DEEP:
                grad_hidden = grad_z * slope
                grad_weights -= mul(grad_hidden, tl.trans(delta), PRECISION)
                grad_retained += tl.sum(grad_hidden * from_start, 1)
                into = mul(k, tl.trans(end1), PRECISION)
                grad_final -= tl.sum(delta * into, 1)
                grad_delta = -final[:, None] * into - mul(tl.trans(weights), grad_hidden, PRECISION)
                grad_back = grad_delta * s
                grad_e += mul(grad_back, tl.trans(w2), PRECISION)
                start2 += mul(tl.trans(e), grad_back, PRECISION)
                grad_h = grad_u * s + grad_delta * back_error * bend
                faded = retained[:, None] * grad_hidden
                grad_q += mul(faded, w1, PRECISION)
                grad_k += mul(grad_h, w1, PRECISION) - mul(final[:, None] * delta, end1, PRECISION)
                start1 = kept * end1 + mul(tl.trans(faded), q, PRECISION) + mul(tl.trans(grad_h), k, PRECISION)
                start1 += tl.load(grad_frozen1_at + program * size + inner, mask=(inner >= 0) & at_end, other=0.0)
                tl.store(grad1_at + inner, start1)
            else:
                grad_q += grad_z
                grad_k += grad_u
            start2 += tl.load(grad_frozen2_at + program * size + outer, mask=(outer >= 0) & at_end, other=0.0)
            tl.store(grad2_at + outer, start2)

        grad_mixing = similar * grad_b
        grad_e -= mul(tl.trans(mixing * similar), grad_y, PRECISION)
        if DEEP:
            grad_pairs = mixing * grad_weights
            grad_mixing += pairs * grad_weights
            grad_q += mul(grad_pairs, k, PRECISION)
            grad_k += mul(tl.trans(grad_pairs), q, PRECISION)
        at_last = t == CHUNK - 1
        grad_mixing += tl.where(at_last[:, None], grad_final[None, :], 0.0)
        grad_retained += tl.where(at_last, grad_kept, 0.0)

        # The scalars. Gates and D are made again, not kept through the loop. alpha, D and a one row down begin with 1.
        _alpha, step, gamma, decay = gates(
            alpha_at + tokens, eta_at + tokens, gamma_at + tokens * WINDOW,
            start, time, k, CHUNK, WINDOW, PADDED,
        )  # fmt: skip
        token = start + t
        before = tl.load(alpha_at + tokens + token - 1, mask=(t > 0) & (token - 1 < time), other=1.0).to(dtype)
        below = t[:, None] > t[None, :]
        down = tl.cumprod(tl.where(t[:, None] > t[None, :] + 1, before[:, None], 1.0).to(dtype), 0)
        down = tl.where(below, down, 0.0)
        summed = mul(tl.trans(decay), grad_mixing, PRECISION)  # S
        grad_alpha = tl.sum(summed * mul(down, step[:, None] * gamma, PRECISION), 1)
        grad_alpha += tl.sum(decay * grad_retained[:, None], 0) * tl.cumprod(before, 0)
        grad_step = tl.sum(summed * gamma, 1)
        grad_gamma = step[:, None] * summed
        tl.store(grad_alpha_at + tokens + token, grad_alpha, mask=token < time)
        tl.store(grad_eta_at + tokens + token, grad_step, mask=token < time)
        age = t[:, None] + (WINDOW - 1) - n[None, :]
        seen = (age >= 0) & (age < WINDOW) & (token < time)[:, None]
        tl.store(grad_gamma_at + (tokens + token)[:, None] * WINDOW + age, grad_gamma, mask=seen)

        grad_v = -grad_e
        if L2:
            grad_v = scale * grad_v
        grad_p = -grad_v
        if RESIDUAL and L2:
            grad_k += grad_p
        if L2:
            tl.debug_barrier()  # this loop reads what other threads have stored in the loop above
            for block in range(0, HIDDEN, BLOCK):
                outer = outer_at(block, HIDDEN, DIM, BLOCK)
                w2, start2 = tl.load(w2_at + here + outer), tl.load(grad2_at + outer)
                u = k
                if DEEP:
                    inner = inner_at(block, HIDDEN, DIM, BLOCK)
                    w1 = tl.load(w1_at + here + inner)
                    u, s, _bend = activate(mul(k, tl.trans(w1), PRECISION), ACTIVATION)
                grad_u = mul(grad_p, w2, PRECISION)
                start2 += mul(tl.trans(grad_p), u, PRECISION)
                if DEEP:
                    grad_h = grad_u * s
                    grad_k += mul(grad_h, w1, PRECISION)
                    tl.store(grad1_at + inner, tl.load(grad1_at + inner) + mul(tl.trans(grad_h), k, PRECISION))
                else:
                    grad_k += grad_u
                tl.store(grad2_at + outer, start2)

        offsets = (tokens + token)[:, None] * DIM + lanes[None, :]
        tl.store(grad_q_at + offsets, grad_q, mask=(token < time)[:, None])
        offsets, exists = keys + (start + n)[:, None] * DIM + lanes[None, :], (start + n < stop)[:, None]
        tl.store(grad_k_at + offsets, tl.load(grad_k_at + offsets, mask=exists) + grad_k, mask=exists)
        tl.store(grad_v_at + offsets, tl.load(grad_v_at + offsets, mask=exists) + grad_v, mask=exists)
        tl.debug_barrier()  # the next chunk reads what other threads have just written
        start -= CHUNK
