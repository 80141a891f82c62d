"""TNT (arXiv 2511.07343) as printed. q, k, v [time, dim]. A memory learns W1 [dim, hidden] and W2 [hidden, dim]; norm
is the gain and the shift of its layer norm, [dim] each.

The paper prints no f; this is TTT's and Miras's. Eqs. 5 and 6 are read as Eq. 3: Eq. 5 mixes two indices of chunks, and
Eq. 6 would apply gradients twice. P begins anew with a shard, as in App. C; in Eq. 7 it does so with a chunk.
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def f(W, norm, x):
    return x + F.layer_norm(W["W1"] @ F.gelu(W["W2"] @ x), x.shape, norm[0], norm[1], eps=1e-6)


def loss(W, norm, k, v):
    return (f(W, norm, k) - v).square().sum()


def step(W, frozen, norm, k, v, eta):  # one term of the sums in Eqs. 3, 5 and 6
    G = grad(loss)(frozen, norm, k, v)
    return {n: W[n] - eta * G[n] for n in W}


def chunkwise(W, norm, q, k, v, eta, chunk):  # Eq. 3: one memory; eta [time]
    y = []
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = W
        W = step(W, frozen, norm, k[t], v[t], eta[t])
        y.append(f(W, norm, q[t]))
    return torch.stack(y), W


def tnt(V, W_init, norms, q, k, v, eta, global_chunk, local_chunks, shard):
    """V is the global memory, the list W_init the local ones; norms and eta [memories, time] have V's first."""
    W, W_frozen, P, y = [*W_init], [*W_init], [q.new_zeros(len(q[0]), len(q[0])) for _ in W_init], []
    for t in range(len(q)):
        if t % global_chunk == 0:
            V_frozen = V
        V = step(V, V_frozen, norms[0], k[t], v[t], eta[0, t])  # Eq. 5
        o = f(V_frozen, norms[0], q[t])  # the first term of Eq. 7: V as it was before the chunk
        for i, chunk in enumerate(local_chunks):
            if t % shard == 0:
                W[i], P[i] = W_init[i], 0 * P[i]  # Eqs. 6 and 14: every shard begins anew
            if t % chunk == 0:
                W_frozen[i] = W[i]
            W[i] = step(W[i], W_frozen[i], norms[1 + i], k[t], v[t], eta[1 + i, t])  # Eqs. 6 and 14
            P[i] = P[i] + torch.outer(k[t], k[t]) / k[t].square().sum()
            o = o + f(W[i], norms[1 + i], P[i] @ q[t])  # Eqs. 7 and 15
        y.append(o)
    return torch.stack(y), V, W
