"""Retention: how much of the old memory enters the new one (Miras's name for what others call a forget gate).

Letters: in ATLAS alpha multiplies the old memory, 1 keeps everything. In Titans alpha is the amount forgotten, and
1 - alpha multiplies; alpha here is always ATLAS's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """M_t = alpha_t M_{t-1} + update, alpha_t in [0, 1] a token and head (ATLAS Eq. 32)."""

    gated = True

    def factor(self, alpha: Tensor) -> Tensor:
        """What multiplies the old memory at each token: ``[batch, heads, time]``."""
        return alpha


@dataclass(frozen=True)
class Keep:
    """M_t = M_{t-1} + update: nothing is forgotten but by being overwritten; the gate alpha is not read."""

    gated = False

    def factor(self, alpha: Tensor) -> Tensor:
        """Ones: ``[batch, heads, time]``."""
        return torch.ones_like(alpha)


Retention = Decay | Keep
