"""The MLP of a block, and the continuum memory system of Nested Learning (arXiv 2512.24695): a chain of MLPs that learn
at different rates.

    y = MLP_K(... MLP_2(MLP_1(x)))                                                                         (Eq. 70)
    theta_l <- theta_l - step(sum of the last C_l gradients)  at every C_l-th time, else unchanged         (Eq. 71)

theta_l are the weights of MLP_l, and C_l is its period. ``atlas_memory.train.MultiPeriod`` puts Eq. 71 around any outer
optimiser. The unit of time is its step, where the paper's is the token: C_l = 16 means every 16th batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..rules.validation import MOST, UNBOUNDED, check_size


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, Eq. 6), `[..., dim]` to `[..., dim]`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        check_size("hidden", hidden)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ContinuumLevel(nn.Module):
    """One MLP of the chain, ``x + SwiGLU(RMSNorm(x))``. A trained block's can be loaded into it (Sec. 7.3)."""

    def __init__(self, dim: int, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def check_periods(name: str, periods: Any) -> tuple[int, ...]:
    """``periods`` as a tuple; ValueError unless they are whole numbers >= 1 that do not decrease."""
    if not isinstance(periods, list | tuple) or not 0 < len(periods) <= MOST:
        raise ValueError(
            f"{name} must list a number of steps a level, such as [1, 4, 16], at most {MOST}; got {str(periods)[:80]}"
        )
    for period in periods:
        check_size(f"every entry of {name}", period, UNBOUNDED)
    if list(periods) != sorted(periods):
        raise ValueError(f"{name}={list(periods)} must go from the fastest level to the slowest: sort them")
    return tuple(periods)


class ContinuumMLP(nn.Module):
    """A chain of residual MLPs, from the fastest to the slowest (Nested Learning, Eq. 70).

    It takes the place of ``x + mlp(norm(x))``. SwiGLU, RMSNorm and the default periods are our choices.

    Args:
        dim: width of x.
        hidden: channels of each level; K levels have K times the parameters of one MLP as wide.
        periods: C_l, optimiser steps between two changes of each level, never decreasing; their number is that of
        levels.
        eps: of the norms.

    Raises:
        ValueError: periods that decrease, or a bad size.
    """

    def __init__(self, dim: int, hidden: int, periods: Sequence[int] = (1, 4, 16), eps: float = 1e-6) -> None:
        super().__init__()
        self.periods = check_periods("periods", periods)
        self.levels = nn.ModuleList(ContinuumLevel(dim, hidden, eps) for _ in self.periods)

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            x = level(x)
        return x

    def parameter_periods(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Every parameter of the chain with the period of its level."""
        for level, period in zip(self.levels, self.periods, strict=True):
            for parameter in level.parameters():
                yield parameter, period

    def extra_repr(self) -> str:
        return f"periods={self.periods}"
