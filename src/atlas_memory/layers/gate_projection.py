"""The gates alpha, eta, theta, delta and gamma as functions of the token (ATLAS section 3.2, App. D). Their form: ours.

Each is a sigmoid of an affine map of x, delta a softplus; one a head, and for gamma one a place in the window. They
start at the constants below, chosen by measurement (docs/explanation/initialisation.md). eta is a share of a full
write where steps are normalised. Raw steps start at that over the squared length of a feature-mapped unit key, or as
the optimiser says (``largest_step``, ``raw_eta``). *Hebbian* rules write a value whatever the memory answers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, Rule
from ..rules.autograd import no_autocast
from ..rules.validation import check_size

START_ETA, DEEP_ETA, MOMENTUM_ETA = 0.5, 0.95, 0.7
"""eta in a memory of one matrix; in a deeper one; and in that with momentum or with fixed sums of rows."""
START_THETA, SPREAD = 0.2, 0.2
"""The momentum decay; and the standard deviation of the maps' weights, times sqrt(dim)."""
HEBBIAN_ETA, HEBBIAN_PENDING_ETA, HEBBIAN_SPREAD, HEBBIAN_LARGEST = 0.475, 0.35, 1.0, 4.0
"""Of Hebbian rules: eta; eta where a step is taken after several tokens (``every``); ``SPREAD``; and the largest eta of
raw steps."""
START_GATE, HEBBIAN_GATE = 1.28, 0.3
"""The gate at a layer's output before SiLU, on average; SiLU makes 1.00 of the first."""
HALF_LIVES = (128.0, 8192.0)
"""Tokens, spread evenly in logarithm over the heads."""
NARROW, HEBBIAN_NARROW, LARGEST_GAIN = 64, 128, 4.0
"""The weights of layers narrower than this count width / dim times as much, up to ``LARGEST_GAIN`` times, so that gates
learn as fast there."""


class GateProjection(nn.Module):
    """Makes ``Gates`` of x: only those that the rule reads.

    Args:
        dim: width of x.
        heads: memory heads.
        rule: decides which gates there are, and the largest step.
        rank: make eta and alpha channel-wise, through one map dim -> rank for both and a map rank -> dim each (Miras
            section 5.4: 32 or 64). None: one a head.

    Raises:
        ValueError: a rank below 1, or one for an optimiser that mixes the rows of a matrix, such as Muon.
    """

    def __init__(self, dim: int, heads: int, rule: Rule, rank: int | None = None) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        if rank is not None:
            check_size("gate_rank", rank)
        if rank is not None and rule.optimiser.mixes_rows:
            raise ValueError(
                f"gate_rank={rank} makes gates channel-wise, but {type(rule.optimiser).__name__} mixes the rows of a "
                "matrix in its steps: drop it, or take another optimiser"
            )
        self.window = rule.window.size
        self.max_eta = rule.optimiser.largest_step(rule.every, rule.window.chunk)
        if _is_hebbian(rule) and not rule.optimiser.normalised and len(rule.network.feature_mapped) == 1:
            self.max_eta = HEBBIAN_LARGEST
        self.start_eta = self._first_eta(rule)
        self.spread = SPREAD
        if _is_hebbian(rule) and rule.optimiser.normalised:
            self.start_eta = HEBBIAN_ETA if rule.every == 1 else HEBBIAN_PENDING_ETA
            self.spread = HEBBIAN_SPREAD
        self.gain = gain_of(dim, HEBBIAN_NARROW if _is_hebbian(rule) else NARROW)
        channels = ["eta"] + ["alpha"] * rule.retention.gated
        self.start_delta = rule.bias.start_delta(dim // heads)
        others = ["theta"] * rule.optimiser.has_momentum + ["delta"] * rule.bias.has_delta
        others += ["gamma"] * (self.window if self.window > 1 else 0)
        self.per_head = others if rank else channels + others
        self.per_channel = channels if rank else []
        self.weight = nn.Parameter(torch.empty(len(self.per_head) * heads, dim))
        self.bias = nn.Parameter(torch.empty(len(self.per_head) * heads))
        self.down = nn.Parameter(torch.empty(rank, dim)) if rank else None
        self.up = nn.Parameter(torch.empty(len(self.per_channel) * dim, rank)) if rank else None
        self.up_bias = nn.Parameter(torch.empty(len(self.per_channel) * dim)) if rank else None
        self.reset_parameters()

    def _first_eta(self, rule: Rule) -> float:
        width, start = self.dim // self.heads, DEEP_ETA
        if len(rule.network.feature_mapped) == 1 and not _is_hebbian(rule):
            start = START_ETA
        elif rule.retention.fixed_row_sums or (rule.optimiser.has_momentum and not rule.optimiser.mixes_rows):
            start = MOMENTUM_ETA
        if rule.optimiser.normalised:
            return start
        if rule.optimiser.raw_eta:
            return rule.optimiser.raw_eta
        with torch.device("cpu"):
            key = torch.full((width,), width**-0.5)
            return start / max(1.0, float(rule.features.squared_norm(key))) / self.max_eta

    def _start(self, name: str) -> Tensor:
        """The bias with which a gate starts, ``[heads]``."""
        if name == "alpha":
            first, last = map(math.log10, HALF_LIVES)
            half_life = torch.logspace(first, last, self.heads, dtype=torch.float64)  # bfloat16 would make alpha 1
            return torch.logit(0.5 ** (1.0 / half_life))
        delta = math.log(math.expm1(self.start_delta))  # of a softplus
        start = {"eta": _logit(self.start_eta), "theta": _logit(START_THETA), "delta": delta}
        return torch.full((self.heads,), start[name])

    def reset_parameters(self) -> None:
        """Small random weights, and the biases described above."""
        nn.init.normal_(self.weight, std=self.spread * self.dim**-0.5 / self.gain)
        groups = [self._start(name) for name in self.per_head if name != "gamma"]
        if self.window > 1:
            groups.append(torch.full((self.heads,), _logit(0.95)))
            groups += [torch.full((self.heads,), _logit(0.05))] * (self.window - 1)
        with torch.no_grad():
            if groups:
                self.bias.copy_(torch.cat(groups))
            if self.down is not None and self.up is not None and self.up_bias is not None:
                nn.init.normal_(self.down, std=self.dim**-0.5)
                nn.init.normal_(self.up, std=0.1 * self.up.shape[1] ** -0.5)
                wide = [self._start(name).repeat_interleave(self.dim // self.heads) for name in self.per_channel]
                self.up_bias.copy_(torch.cat(wide))

    def forward(self, x: Tensor) -> Gates:
        """x ``[batch, time, dim]`` -> gates ``[batch, heads, time]``, in at least float32. Channel-wise ones have a
        last dimension dim / heads, and gamma c."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        found: dict[str, Tensor] = {}
        gamma: list[Tensor] = []
        with no_autocast(x.device):
            weight, flat = self.weight.to(dtype), x.to(dtype).flatten(0, 1)
            logits = torch.addmm(self.bias.to(dtype), flat, weight.T, alpha=self.gain).unflatten(0, x.shape[:2])
            by_name = logits.unflatten(-1, (-1, self.heads)).permute(2, 0, 3, 1).unbind()
            for name, logit in zip(self.per_head, by_name, strict=True):
                if name == "gamma":
                    gamma.append(logit.sigmoid())
                else:
                    found[name] = F.softplus(logit) if name == "delta" else logit.sigmoid()
            if self.down is not None and self.up is not None and self.up_bias is not None:
                narrow = F.linear(x.to(dtype), self.down.to(dtype))
                wide = F.linear(narrow, self.up.to(dtype), self.up_bias.to(dtype)).sigmoid()
                wide = wide.unflatten(-1, (len(self.per_channel), self.heads, -1)).permute(2, 0, 3, 1, 4)
                found.update(zip(self.per_channel, wide, strict=True))
        eta = self.max_eta * found["eta"]
        stacked = torch.stack(gamma, -1) if gamma else None
        return Gates(eta, found.get("alpha"), found.get("theta"), stacked, found.get("delta"))


def _logit(p: float) -> float:
    return math.log(p / (1.0 - p))


def start_gate(rule: Rule) -> float:
    """The first bias of the gate at a layer's output. Answers of Hebbian rules grow with what is written, except those
    of a matrix whose rows keep their length or sum."""
    return HEBBIAN_GATE if _is_hebbian(rule) and not rule.retention.has_mirror_map else START_GATE


def _is_hebbian(rule: Rule) -> bool:
    """Whether what is written does not depend on what is answered, and nothing is taken out."""
    return rule.bias.is_linear and not rule.optimiser.erases


def gain_of(width: int, narrow: int = NARROW) -> float:
    """The factor of the weights that make gates of ``width`` numbers."""
    return min(max(1.0, narrow / width), LARGEST_GAIN)
