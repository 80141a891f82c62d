"""The gates alpha, eta, theta and gamma as functions of the token (ATLAS section 3.2, App. D). Their form: ours.

Each is a sigmoid of an affine map of x, one a head (and, for gamma, one a place in the window). Starting values:

* alpha: heads forget at different rates, with half-lives spread evenly in logarithm from 8 to 512 tokens;
* theta: 0.8;
* eta: for gradient descent and momentum in (0, 1), starting at 1/2, within their bounded step; for Muon at most
  ``every / chunk``, so that the steps of one chunk add up to a spectral norm of at most about 1, starting at a
  quarter of that;
* gamma: 0.95 on the current token and 0.05 on older ones. A window that starts half open smears each write.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, Muon, Rule

HALF_LIVES = (8.0, 512.0)


class GateProjection(nn.Module):
    """x -> ``Gates``, those only that the rule reads.

    Args:
        dim: width of x.
        heads: memory heads.
        rule: decides which gates there are, and the largest step.
    """

    def __init__(self, dim: int, heads: int, rule: Rule) -> None:
        super().__init__()
        self.heads = heads
        self.window = rule.window.size
        self.has_alpha, self.has_theta = rule.retention.gated, rule.optimiser.has_momentum
        self.is_muon = isinstance(rule.optimiser, Muon)
        self.max_eta = min(1.0, rule.optimiser.every / rule.window.chunk) if self.is_muon else 1.0
        self.weight = nn.Parameter(torch.empty(self._groups() * heads, dim))
        self.bias = nn.Parameter(torch.empty(self._groups() * heads))
        self.reset_parameters()

    def _groups(self) -> int:
        return 1 + self.has_alpha + self.has_theta + (self.window if self.window > 1 else 0)

    def reset_parameters(self) -> None:
        """Small random weights, and the biases described above."""
        nn.init.normal_(self.weight, std=0.1 * self.weight.shape[1] ** -0.5)
        groups = [torch.full((self.heads,), _logit(0.25 if self.is_muon else 0.5))]
        if self.has_alpha:
            half_life = torch.logspace(math.log10(HALF_LIVES[0]), math.log10(HALF_LIVES[1]), self.heads)
            groups.append(torch.logit(0.5 ** (1.0 / half_life)))
        if self.has_theta:
            groups.append(torch.full((self.heads,), _logit(0.8)))
        if self.window > 1:
            groups.append(torch.full((self.heads,), _logit(0.95)))
            groups += [torch.full((self.heads,), _logit(0.05))] * (self.window - 1)
        with torch.no_grad():
            self.bias.copy_(torch.cat(groups))

    def forward(self, x: Tensor) -> Gates:
        """``[batch, time, dim]`` -> gates ``[batch, heads, time]`` (gamma ``[..., c]``), in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        groups = list(logits.sigmoid().unflatten(-1, (-1, self.heads)).permute(2, 0, 3, 1))  # each [batch, heads, time]
        eta = self.max_eta * groups.pop(0)
        alpha = groups.pop(0) if self.has_alpha else None
        theta = groups.pop(0) if self.has_theta else None
        return Gates(eta, alpha, theta, torch.stack(groups, -1) if groups else None)


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))
