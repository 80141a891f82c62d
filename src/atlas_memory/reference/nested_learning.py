"""Nested Learning (arXiv 2512.24695) as printed: the memory of Hope that answers, given k, v, eta and alpha (in Hope
other such memories make them). q, k, v [time, dim]; eta, alpha [time]. M holds W1 [dim, hidden] and W2 [hidden, dim].

Eq. 88 multiplies by alpha I - eta k k^T, which fits one matrix that multiplies k. Here the k of a matrix is what that
matrix multiplies. With the l2 loss Eq. 88 takes out twice what was stored under k, by this factor and by the gradient.
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def memory(M, x):  # Eq. 89
    return x + M["W1"] @ F.gelu(M["W2"] @ x)


def loss(M, k, v):
    return (memory(M, k) - v).square().sum()


def hope(M, q, k, v, eta, alpha, chunk):
    y = []
    for t in range(len(q)):
        y.append(memory(M, q[t]))  # y_t = M_{t-1}(q_t), before the write
        if t % chunk == 0:
            frozen = M  # Eq. 90: the memory at the end of the chunk before
        G = grad(loss)(frozen, k[t], v[t])
        f = {"W2": k[t], "W1": F.gelu(frozen["W2"] @ k[t])}
        keep = {n: alpha[t] * torch.eye(len(f[n])).to(q) - eta[t] * torch.outer(f[n], f[n]) for n in M}
        M = {n: M[n] @ keep[n] - eta[t] * G[n] for n in M}  # Eq. 88, delta gradient descent (Eqs. 56-57)
    return torch.stack(y), M
