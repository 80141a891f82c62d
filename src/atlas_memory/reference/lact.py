"""LaCT (arXiv 2505.23884) as printed, with Muon, momentum, and the order of its language models: a chunk is read, then
written. q, k, v [time, dim]; eta, theta [time]. M holds W0, W2 [hidden, dim] and W1 [dim, hidden].

Newton-Schulz is Muon's. The public code has coefficients of its own for each iteration, and an eta for each matrix.
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def memory(M, x):  # SwiGLU
    return M["W1"] @ (F.silu(M["W0"] @ x) * (M["W2"] @ x))


def loss(M, k, v, eta):  # of a chunk: sum_i eta_i L(f_W(k_i), v_i), L = -<f_W(k), v>
    return -sum(eta[i] * (memory(M, k[i]) @ v[i]) for i in range(len(k)))


def newton_schulz(S, steps=5):
    X = S / S.norm()
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def lact(M, q, k, v, eta, theta, chunk):
    length = {n: W.norm(dim=1, keepdim=True) for n, W in M.items()}
    S, y = {n: torch.zeros_like(W) for n, W in M.items()}, []
    for start in range(0, len(q), chunk):
        now = slice(start, start + chunk)
        y += [memory(M, x) for x in q[now]]  # apply
        if start + chunk > len(q):
            break  # update, when the chunk is full:
        G = grad(loss)(M, k[now], v[now], eta[now])
        S = {n: theta[now].mean() * S[n] + G[n] for n in M}
        W = {n: M[n] - newton_schulz(S[n]) for n in M}
        M = {n: W[n] / W[n].norm(dim=1, keepdim=True) * length[n] for n in M}  # rows keep the length they had at first
    return torch.stack(y), M
