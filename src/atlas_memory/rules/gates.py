"""The gates: one value per token and head, made by the outer model (ATLAS section 3.2, App. D)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import is_cheap_to_read

LONGEST_HALF_LIFE = 1e6  # tokens


@dataclass(frozen=True)
class Gates:
    """How much of each token to keep, to write and to weigh.

    Values out of range are refused on a CPU, in calls of more than one token. NaN makes all later outputs NaN.

    Attributes:
        eta: step size >= 0, ``[batch, heads, time]``; or channel-wise, ``[batch, heads, time, dim]``, each for rows /
            dim rows of a matrix (Miras section 5.4), but for Muon. Where steps are normalised, and in delta rules with
            unit keys, a share of a full write; above 2 memories may diverge.
        alpha: retention in [0, 1], shaped as eta may be; multiplies the old memory. None: 1. ``Keep`` does not read it.
        theta: momentum decay in [0, 1], ``[batch, heads, time]``. None: 0. Read by momentum and Muon.
        gamma: window gates in [0, 1], ``[batch, heads, time, c]``; entry j of token t weighs token t - j. None: 1.
        delta: the threshold or shift of ``Huber`` and ``RobustL2``, > 0, ``[batch, heads, time]``. None: 1.
        length: ``[batch]`` int64, how many tokens of each row are real; the rest is right padding, neither written nor
            counted, its outputs undefined. None: all.
    """

    eta: Tensor
    alpha: Tensor | None = None
    theta: Tensor | None = None
    gamma: Tensor | None = None
    delta: Tensor | None = None
    length: Tensor | None = None

    def check(self, q: Tensor, size: int) -> None:
        """Raise ValueError unless the gates go with q ``[batch, heads, time, dim]`` and a window of ``size``."""
        shape = list(q.shape[:3])
        for name in ("eta", "alpha", "theta", "gamma", "delta"):
            gate = getattr(self, name)
            if gate is None and name != "eta":
                continue
            expected = [*shape, size] if name == "gamma" else shape
            per_channel = [*shape, q.shape[-1]] if name in ("eta", "alpha") else expected
            floats = isinstance(gate, Tensor) and gate.is_floating_point()
            if not floats or list(gate.shape) not in (expected, per_channel):
                got = f"{gate.dtype} of shape {list(gate.shape)}" if isinstance(gate, Tensor) else repr(gate)[:80]
                raise ValueError(
                    f"gate {name} must have shape {expected}, [batch, heads, time] as q, and floating point; got {got}"
                )
            if shape[2] > 1 and is_cheap_to_read(gate):  # in decoding the check would cost too much
                check_range(name, gate.detach())
        if self.length is not None:
            check_length(self.length, shape)

    def complete(self, q: Tensor, size: int) -> CompleteGates:
        """The gates for q ``[batch, heads, time, dim]`` and a window of ``size``, each None replaced by its meaning."""
        shape = q.shape[:3]
        ones = q.new_ones(shape)
        return CompleteGates(
            eta=self.eta,
            alpha=ones if self.alpha is None else self.alpha,
            theta=torch.zeros_like(ones) if self.theta is None else self.theta,
            gamma=ones[..., None].expand(*shape, size) if self.gamma is None else self.gamma,
            delta=ones if self.delta is None else self.delta,
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> Gates:
        """The gates with ``fn`` applied to every tensor."""

        def apply(gate: Tensor | None) -> Tensor | None:
            return None if gate is None else fn(gate)

        return Gates(fn(self.eta), *map(apply, (self.alpha, self.theta, self.gamma, self.delta, self.length)))


class CompleteGates(NamedTuple):
    """The gates of ``Gates``, none missing."""

    eta: Tensor
    alpha: Tensor
    theta: Tensor
    gamma: Tensor
    delta: Tensor

    def at(self, t: int) -> CompleteGates:
        """The gates of one token: ``[batch, heads]``, gamma ``[batch, heads, c]``, channels ``[batch, heads, dim]``."""
        return CompleteGates(*(gate[:, :, t] for gate in self))


def check_range(name: str, gate: Tensor) -> None:
    """Raise ValueError for values out of range, but for what rounding does, and NaN."""
    least, most = (x.item() for x in gate.aminmax()) if gate.numel() else (0.0, 0.0)
    if least < 0 or (name not in ("eta", "delta") and most > 1.001):
        meant = {"eta": "at least 0", "delta": "above 0"}.get(name, "from 0 to 1")
        how = "F.softplus" if name == "delta" else "torch.sigmoid"
        raise ValueError(f"gate {name} must be {meant}, got {least:.4g} to {most:.4g}: {how}(x) makes it of any x")


def check_length(length: Tensor, shape: list[int]) -> None:
    """Raise ValueError unless ``length`` counts tokens of each row of ``shape``, ``[batch, heads, time]``."""
    counts = isinstance(length, Tensor) and list(length.shape) == shape[:1] and length.dtype == torch.int64
    if not counts or (is_cheap_to_read(length) and not bool(((length >= 0) & (length <= shape[2])).all())):
        raise ValueError(f"gates.length must be {shape[0]} int64 numbers from 0 to time={shape[2]}, got {length!r}")


def rows(gate: Tensor, matrix: Tensor) -> Tensor:
    """A gate ``[...]``, or a channel-wise one, ``[..., dim]``, times a matrix ``[..., rows, columns]``."""
    if gate.dim() < matrix.dim() - 1:
        return gate[..., None, None] * matrix
    return gate.repeat_interleave(matrix.shape[-2] // gate.shape[-1], -1)[..., None] * matrix


def pick(condition: Tensor | bool, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where the condition, a bool or one a sequence ``[batch]``, holds, else ``old``."""
    if isinstance(condition, bool):
        return new if condition else old
    return torch.where(condition.view(-1, *(1,) * (new.dim() - 1)), new, old)


def half_life(alpha: Tensor, dim: int = -1) -> Tensor:
    """Tokens after which retention ``alpha`` has left half of a write, by the mean of ln(alpha) along ``dim``."""
    rate = -alpha.double().clamp(min=1e-30).log().mean(dim)
    return (math.log(2) / rate.clamp(min=math.log(2) / LONGEST_HALF_LIFE)).float()
