"""ATLAS (arXiv 2505.23735) as printed. q, k, v [time, dim]; eta, alpha, theta [time]; gamma [time, window], where
gamma[t, j] weighs token t - j. M maps names to matrices: W1 [dim, hidden], W2 [hidden, features], W3 as W2.

    muon=True               Atlas (Eqs. 32-33); with W3 in M Atlas++ (Eq. 43)
    muon=False              OmegaNet (Eq. 10); with phi=exponential Dot (Eq. 27)
    muon=False, dot=True    DLA (Eq. 19), with a window of one token; SWLA (Eq. 20), with W1 alone in M;
                            with phi=exponential DeepTransformer (Eq. 25), and SWDT (Table 1) with a longer window
"""

import torch
import torch.nn.functional as F
from torch.func import grad


def polynomial(x, a):  # phi(x).phi(y) = a_0 + a_1 x.y + a_2 (x.y)^2 (Eq. 5); a_j starts at 1/j!
    i, j = torch.triu_indices(len(x), len(x))
    squares = x[i] * x[j] * (1 + (i != j)).to(x).sqrt()  # without these roots of 2 the product is not that of Eq. 5
    return torch.cat([a[:1].sqrt(), a[1].sqrt() * x, a[2].sqrt() * squares])


def exponential(x, degree=14):  # phi*(x).phi*(y) = exp(x.y) (Eqs. 22-23); it has no end, and is cut off here
    powers = [torch.ones_like(x[:1])]
    for p in range(1, degree + 1):
        powers.append(torch.kron(powers[-1], x) / p**0.5)
    return torch.cat(powers)


def memory(M, phi, x):
    if "W2" not in M:
        return M["W1"] @ phi(x)  # a matrix, as for SWLA
    gate = M["W3"] @ phi(x) if "W3" in M else 1.0  # Eq. 43
    return x + M["W1"] @ (F.gelu(M["W2"] @ phi(x)) * gate)  # Eq. 42; x itself, since phi(x) is longer than v


def newton_schulz(S, steps=5):  # NS-5 of Eq. 32; the coefficients are Muon's
    X = S / S.norm()
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def atlas(M, phi, q, k, v, eta, alpha, theta, gamma, window, chunk, muon=True, dot=False):
    def loss(M, k, v):  # Eqs. 19, 20 and 25 print <M, v> without the minus, which would erase
        return -(memory(M, phi, k) @ v) if dot else (memory(M, phi, k) - v).square().sum()

    def omega(M, t):  # Eq. 9
        return sum(gamma[t, t - i] * loss(M, k[i], v[i]) for i in range(max(0, t - window + 1), t + 1))

    S, y = {n: torch.zeros_like(W) for n, W in M.items()}, []
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = M  # gradients are taken at the memory before the chunk (Eqs. 15-16)
        G = grad(omega)(frozen, t)
        S = {n: theta[t] * S[n] + G[n] for n in M}  # Eq. 33; Table 1 prints a minus, and ascends
        step = {n: newton_schulz(S[n]) for n in M} if muon else G  # Eq. 40; without Muon the gradient
        M = {n: alpha[t] * M[n] - eta[t] * step[n] for n in M}  # Eqs. 32 and 10
        y.append(memory(M, phi, q[t]))
    return torch.stack(y), M
