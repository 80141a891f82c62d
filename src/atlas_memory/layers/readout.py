"""The gates of self-modifying Titans, read from what two of their memories answer (Nested Learning, Eq. 88)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .gates import SPREAD, gain_of

MEMORIES = ("memory", "k", "v", "eta", "alpha")
"""What the five memories of a head are for, in the order in which they are stacked: all heads of one, then the next."""

START_ETAS = (0.5, 0.02)
"""Where eta starts: that of M_memory, and that of the other memories."""

HALF_LIVES = (32.0, 8192.0)
"""Tokens: those with which M_memory starts, spread over the heads; all others start with the first."""


class Readout(NamedTuple):
    """The parameters of a ``GateReadout``, as arguments of what is compiled or computed again in a backward pass."""

    weight: Tensor
    bias: Tensor

    def gates(self, eta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """What M_eta and M_alpha answer, ``[batch, heads, time, dim]`` -> eta and alpha of all memories,
        ``[batch, 5 heads, time]``, in the dtype of the answers."""
        dim = eta.shape[-1]
        weight, bias = self.weight.to(eta.dtype) * (dim**0.5 * gain_of(dim)), self.bias.to(eta.dtype)
        answers = torch.stack([for_all(eta), for_all(alpha)])
        logits = (answers * weight.flatten(1, 2)[:, None, :, None]).sum(-1) + bias.flatten(1)[:, None, :, None]
        gates = logits.sigmoid()
        return gates[0], gates[1]


class GateReadout(nn.Module):
    """eta and alpha of each token, head and memory, from what M_eta and M_alpha answer.

    A gate is the sigmoid of ``gain <w, M(x)> sqrt(dim) + b``, with a w and b a gate, memory and head. The root makes
    what is read about as long as the x of ``GateProjection``; the gain, 64 / dim, but at least 1 and at most 4, lets
    gates of narrow heads learn as fast as those of layers 64 wide (layers/gates.py; docs/hope.md).

    Eq. 88 has one eta and one alpha for the five memories of a head. If the memory that makes keys then learns as fast
    as M_memory, it soon answers a token with what came after that token, and not with the key under which M_memory has
    stored it, while queries stay as they are: nothing can be recalled (docs/hope.md). So M_memory starts with an eta of
    1/2 and half-lives spread over ``HALF_LIVES``, the others with an eta of 1/50 and ``HALF_LIVES[0]`` tokens, after
    which they are back at M_0.

    Args:
        dim: width of a head.
        heads: number of heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, len(MEMORIES), heads, dim))
        self.bias = nn.Parameter(torch.empty(2, len(MEMORIES), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random weights, and the starts described above."""
        dim = self.weight.shape[-1]
        nn.init.normal_(self.weight, std=SPREAD * dim**-0.5 / gain_of(dim))
        first, last = map(math.log2, HALF_LIVES)
        half_lives = torch.full(self.bias.shape[1:], HALF_LIVES[0], dtype=torch.float64)  # bfloat16 would make alpha 1
        half_lives[0] = torch.logspace(first, last, self.bias.shape[2], base=2.0, dtype=torch.float64)
        eta = torch.full(self.bias.shape[1:], START_ETAS[1], dtype=torch.float64)
        eta[0] = START_ETAS[0]
        with torch.no_grad():
            self.bias.copy_(torch.stack([eta, 0.5 ** (1.0 / half_lives)]).logit())

    @property
    def read_with(self) -> Readout:
        """The parameters."""
        return Readout(self.weight, self.bias)


def for_all(x: Tensor) -> Tensor:
    """``[batch, heads, ...]`` -> ``[batch, 5 heads, ...]``: the same for the five memories of a head."""
    return x.repeat(1, len(MEMORIES), *(1,) * (x.dim() - 2))
