"""Miras (arXiv 2504.13173) as printed: Moneta, Yaad, Memora. q, k, v [time, dim]; eta, alpha [time, dim] or [time, 1];
delta [time]. W1 [dim, hidden] and W2 [hidden, dim] learn; norm is the gain and the shift of the layer norm, [dim] each.

Within a chunk all matrices move linearly. What is not linear is done at one token of it (sec. 5.4): the last, and for
Memora the first. With chunk=1 that is every token, and the equations are those of sec. 5.3.
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def memory(M, norm, x):  # sec. 5.3
    return x + F.layer_norm(M["W1"] @ F.gelu(M["W2"] @ x), x.shape, norm[0], norm[1], eps=1e-6)


def smooth(e):  # |e| without its corner (sec. 5.1)
    return (e.square() + 1e-6).sqrt()


def rows(gate, W):  # each channel of a gate weighs one row of W1, and hidden / dim rows of W2 (sec. 5.4)
    return gate.repeat_interleave(len(W) // len(gate))[:, None] * W


def miras(A, norm, q, k, v, eta, alpha, chunk, loss, mirror_map, exact=-1, tangent=lambda G: G):
    M, y = {n: mirror_map(A[n]) for n in A}, []
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = {n: mirror_map(A[n]) for n in A}  # Eq. 28: gradients at the memory before the chunk
        G = grad(lambda M, t: loss(memory(M, norm, k[t]) - v[t], t))(frozen, t)
        A = {n: rows(alpha[t], A[n]) - rows(eta[t], G[n]) for n in A}
        M = {n: rows(alpha[t], M[n]) - rows(eta[t], tangent(G[n])) for n in A}
        if t % chunk == exact % chunk:
            M = {n: mirror_map(A[n]) for n in A}
        y.append(memory(M, norm, q[t]))
    return torch.stack(y), M


def moneta(A, norm, q, k, v, eta, alpha, chunk):  # Eq. 24, p = 3 and q = 4
    return miras(A, norm, q, k, v, eta, alpha, chunk, lambda e, t: smooth(e).pow(3).sum(), lambda A: A / A.norm(4) ** 2)


def yaad(M, norm, q, k, v, eta, alpha, delta, chunk):  # Eq. 26; the 1/2 is that of Eq. 13
    def loss(e, t):
        return 0.5 * e.square().sum() if e.norm() <= delta[t] else delta[t] * smooth(e).sum()

    return miras(M, norm, q, k, v, eta, alpha, chunk, loss, lambda M: M)


def memora(M, norm, q, k, v, eta, alpha, chunk):  # Eq. 27; rows of M sum to the c of Eq. 21, here their length
    A = {n: W.log() for n, W in M.items()}
    loss, softmax = (lambda e, t: e.square().sum()), (lambda A: A.shape[1] * A.softmax(1))
    # Where M moves linearly its rows keep their sum: softmax would take back what all entries have in common.
    return miras(A, norm, q, k, v, eta, alpha, chunk, loss, softmax, 0, lambda G: G - G.mean(1, keepdim=True))
