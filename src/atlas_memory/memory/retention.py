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
    """M_t = alpha_t M_{t-1} + update, alpha_t in [0, 1] a token and head (ATLAS Eq. 32).

    As printed, the learned M_0 fades with everything else: a model trained on short texts still reads through what is
    left of it, and meets a memory without M_0 only when it reads on. ``to_start`` lets it fade to M_0 instead of to
    zero, M_t = alpha_t M_{t-1} + (1 - alpha_t) M_0 + update: a soft form of TNT's resets (TNT Eq. 6), not in ATLAS.
    """

    to_start: bool = False

    gated = True

    def start(self, initial: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """What the memory fades to, given M_0; None for zero."""
        return initial if self.to_start else None

    def factor(self, alpha: Tensor) -> Tensor:
        """What multiplies the old memory at each token: ``[batch, heads, time]``."""
        return alpha


@dataclass(frozen=True)
class Keep:
    """M_t = M_{t-1} + update: nothing is forgotten but by being overwritten; the gate alpha is not read."""

    gated = False

    def start(self, initial: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Nothing fades."""
        return None

    def factor(self, alpha: Tensor) -> Tensor:
        """Ones: ``[batch, heads, time]``."""
        return torch.ones_like(alpha)


Retention = Decay | Keep
