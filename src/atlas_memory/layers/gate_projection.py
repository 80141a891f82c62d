"""The gates alpha, eta, theta, delta and gamma as functions of the token (ATLAS section 3.2, App. D). Their form: ours.

Each is a sigmoid of an affine map of x, one a head (and, for gamma, one a place in the window). Starting values, by
measurement (docs/explanation/initialisation.md):

* alpha: heads forget at different rates, with half-lives spread evenly in logarithm over ``HALF_LIVES`` tokens;
* theta: ``START_THETA``, however often the memory makes a step (``every``), since theta acts once a step;
* eta: in (0, 1), a share of a full write, starting at ``START_ETA`` in a memory of one matrix and at ``DEEP_ETA`` in a
  deeper one, ``MOMENTUM_ETA`` if steps have momentum or rows have fixed sums. Where steps are raw
  (``normalised=False``), it starts at that over the squared length of a feature-mapped unit key. Raw steps of Muon have
  the length eta, whatever the
  gradient: there eta is at most ``every / chunk``, so that the steps of one chunk add up to a spectral norm of at most
  about 1, and it starts at a quarter of that (``largest_step`` and ``raw_eta`` of the optimiser). Where what is
  written does not depend on what is answered (``is_linear``, and nothing is taken out), noise adds up: there, with
  normalised steps, eta starts lower and all gates with larger weights, to learn soon which tokens to leave out
  (``HEBBIAN_ETA``, ``HEBBIAN_SPREAD``), and with bare ones eta may be larger (``HEBBIAN_LARGEST``);
* delta: no sigmoid but a softplus, starting where the bias says;
* gamma: 0.95 on the current token and 0.05 on older ones. A window that starts half open smears each write.

The maps start with weights of standard deviation ``SPREAD`` / sqrt(dim): gates that differ from token to token from the
first step on learn sooner which tokens to write. An optimiser such as AdamW moves each weight by about the learning
rate, and so a gate by the more the wider x is. In layers narrower than ``NARROW`` (``HEBBIAN_NARROW``) the weights
therefore count up to ``LARGEST_GAIN`` times as much: gates learn as fast there (not channel-wise ones).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, Rule
from ..rules.autograd import no_autocast
from ..rules.validation import check_size

START_ETA, DEEP_ETA, MOMENTUM_ETA = 0.5, 0.95, 0.7
"""A write of the first leaves a matrix a quarter of the squared error at its key, and more of what was written before:
layers learn sooner which tokens to write (docs/explanation/initialisation.md). A deep memory answers less of what a
step aims at. Momentum repeats a step in those after it, 1 / (1 - theta) in all, unless steps get their length anew, as
Muon's do. Rows with fixed sums (``memora``) move in a straight line within a chunk and are mapped once in it: from 0.95
on writes that hardly decay drove them to where gradients grow a thousand times within 4,096 tokens
(docs/explanation/initialisation.md)."""
START_THETA, SPREAD = 0.2, 0.2
HEBBIAN_ETA, HEBBIAN_WAITING_ETA, HEBBIAN_SPREAD = 0.475, 0.35, 1.0
"""The same of Hebbian rules, which write a value whatever is answered; the second eta where writes wait for a step
(``every`` above 1)."""
HEBBIAN_LARGEST = 4.0
"""The largest eta of a matrix that is written so, by raw steps: with what it begins at it is then far from the upper
end of its sigmoid, where tokens that are written and tokens that are left out come to differ by more."""
START_GATE, HEBBIAN_GATE = 1.28, 0.3
"""Where the gate at a layer's output starts on average, before SiLU. SiLU makes 1.00 of the first: what the heads
answer passes at its full size. As long as a layer recalls little, training closes its gates; where they begin near zero
they come to lie below it, where SiLU is nearly flat, and some never open again. Hebbian rules learn later what to leave
out, and begin quietly if their answers grow with what is written (docs/explanation/initialisation.md)."""
HALF_LIVES = (128.0, 8192.0)
"""Of heads that begin at 32, some forgot their pairs before they had learned anything, and stayed closed."""
NARROW, HEBBIAN_NARROW, LARGEST_GAIN = 64, 128, 4.0


class GateProjection(nn.Module):
    """Makes ``Gates`` of x: only those that the rule reads.

    Args:
        dim: width of x.
        heads: memory heads.
        rule: decides which gates there are, and the largest step.
        rank: make eta and alpha channel-wise, through one map dim -> rank for both and a map rank -> dim each (Miras
            section 5.4: 32 or 64). None: one a head. An optimiser that mixes the rows of a matrix, such as Muon, takes
            none.

    Raises:
        ValueError: a rank below 1, or one for such an optimiser.
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
            self.start_eta = HEBBIAN_ETA if rule.every == 1 else HEBBIAN_WAITING_ETA
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
        """Where eta starts. Raw steps write under a key k in proportion to eta |phi(k)|^2."""
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
        """What the bias of a gate starts with, ``[heads]``: the logit (for delta its softplus's input) of its starting
        value."""
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
    """What the bias of the gate at the output of a layer with this rule starts with. A memory that is mapped, whose
    rows keep their length or their sum, answers no louder for all the noise that it has written."""
    return HEBBIAN_GATE if _is_hebbian(rule) and not rule.retention.has_mirror_map else START_GATE


def _is_hebbian(rule: Rule) -> bool:
    """Whether what is written does not depend on what is answered, and nothing is taken out."""
    return rule.bias.is_linear and not rule.optimiser.erases


def gain_of(width: int, narrow: int = NARROW) -> float:
    """How many times the weights count that make gates of ``width`` numbers: more than once below ``narrow``."""
    return min(max(1.0, narrow / width), LARGEST_GAIN)
