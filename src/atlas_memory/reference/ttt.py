"""TTT (arXiv 2407.04620) as printed: TTT-Linear, where M holds W [dim, dim] and b [dim]; and TTT-MLP, where it holds W1
[hidden, dim], b1, W2 [dim, hidden] and b2. q, k, v [time, dim] are theta_Q x, theta_K x and theta_V x; eta [time]; norm
is the gain and the shift of the layer norm, [dim] each. A chunk is a mini-batch of TTT.
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def f(M, norm, x):  # sec. 2.7: x + LN(f_res(x))
    out = M["W"] @ x + M["b"] if "W" in M else M["W2"] @ F.gelu(M["W1"] @ x + M["b1"]) + M["b2"]
    return x + F.layer_norm(out, x.shape, norm[0], norm[1], eps=1e-6)


def loss(M, norm, k, v):  # Eq. 4
    return (f(M, norm, k) - v).square().sum()


def ttt(M, norm, q, k, v, eta, chunk):
    z = []
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = M  # sec. 2.4: all gradients of a mini-batch at its start
        G = grad(loss)(frozen, norm, k[t], v[t])
        M = {n: M[n] - eta[t] * G[n] for n in M}  # Eq. 2
        z.append(f(M, norm, q[t]))  # Eq. 5
    return torch.stack(z), M
