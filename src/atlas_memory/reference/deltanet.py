"""DeltaNet (arXiv 2406.06484, sec. 2.2) and Gated DeltaNet (arXiv 2412.06464, Eq. 10) as printed.

q, k, v [time, dim]; eta, alpha [time], which the papers call beta and alpha. M [dim, dim] is their S.
"""

import torch


def deltanet(M, q, k, v, eta):
    return gated_deltanet(M, q, k, v, eta, torch.ones_like(eta))


def gated_deltanet(M, q, k, v, eta, alpha):
    one, y = torch.eye(len(M)).to(M), []
    for t in range(len(q)):
        M = M @ (alpha[t] * (one - eta[t] * torch.outer(k[t], k[t]))) + eta[t] * torch.outer(v[t], k[t])
        y.append(M @ q[t])
    return torch.stack(y), M
