"""Titans (arXiv 2501.00663), the long-term memory as printed. q, k, v [time, dim]; eta, alpha, theta [time].

The letters are those of ATLAS, which prints the same equations as its 12 and 13: alpha is Titans' 1 - alpha, theta its
eta, and eta its theta. M holds W1 [dim, hidden] and W2 [hidden, dim]. Titans asks for an MLP of any depth (sec. 3.1)
and prints none: the one here is ATLAS's, with its residual (ATLAS Eq. 42).
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def memory(M, x):
    return x + M["W1"] @ F.gelu(M["W2"] @ x)


def loss(M, k, v):  # Eq. 12
    return (memory(M, k) - v).square().sum()


def titans(M, q, k, v, eta, alpha, theta, chunk):
    S, y = {n: torch.zeros_like(W) for n, W in M.items()}, []
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = M  # sec. 3.2: gradients at the memory before the chunk (Eqs. 16-18); with chunk=1 Eq. 14 itself
        u = grad(loss)(frozen, k[t], v[t])
        S = {n: theta[t] * S[n] - eta[t] * u[n] for n in M}  # Eq. 14, the surprise
        M = {n: alpha[t] * M[n] + S[n] for n in M}  # Eq. 13
        y.append(memory(M, q[t]))
    return torch.stack(y), M
