"""Attentional bias: the inner loss l(M; k, v) that the memory minimises while it reads (Miras's name for it).

A bias is a function of the prediction M(phi(k)) and the value v; e = M(phi(k)) - v is the error. Its derivatives must
be finite where e is zero, as at padding, so |e| is smoothed (``SMOOTH``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .autograd import max_entry
from .validation import check_positive

SMOOTH = 1e-6
"""Miras's epsilon: |x| is taken as sqrt(x^2 + SMOOTH)."""

MAX_ABS = 1e9
"""``Lp`` clamps errors to it, since it raises them to a power; ``Huber`` and ``RobustL2`` clamp them to its square."""


class Bias:
    """The base class of attentional biases. One of your own is a frozen dataclass with the first three methods, which
    keep the dtype, float32 or float64; ``...`` is any dimensions in front."""

    has_delta = False
    """Whether a gate delta is read, one number a token: the last entry of ``v``, ``[..., dim + 1]``."""
    is_linear = False
    """Whether the derivative does not depend on the prediction."""
    is_quadratic = False
    """Whether the derivative is ``curvature`` times the error; see ``NetworkBase.curvature_bound``."""

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        """The loss of each token, summed over its coordinates: ``[..., dim], [..., dim] -> [...]``."""
        raise NotImplementedError

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        """The derivative of ``value`` by the prediction, ``[..., dim]``."""
        raise NotImplementedError

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        """A bound on the second derivative by the prediction, ``[...]``; or, where a full step meets another one, on
        |derivative| / |error|. It bounds the step (step.py)."""
        raise NotImplementedError

    def start_delta(self, dim: int) -> float:
        """Where the gate delta begins in a layer, for heads of ``dim``."""
        return 1.0


@dataclass(frozen=True)
class L2(Bias):
    """scale * |M(phi(k)) - v|^2, the regression of the Omega rule (ATLAS Eq. 9).

    With ``scale=1`` the gradient has the factor 2 that the papers drop; DeltaNet's objective is ``scale=0.5``.
    """

    scale: float = 1.0

    is_quadratic = True

    def __post_init__(self) -> None:
        check_positive("L2 scale", self.scale)

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        return self.scale * (prediction - v).square().sum(-1)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        return (2.0 * self.scale) * (prediction - v)

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        return torch.full_like(prediction[..., 0], 2.0 * self.scale)


@dataclass(frozen=True)
class DotProduct(Bias):
    """``-<M(phi(k)), v>``: the Hebbian write +v k^T (ATLAS Eqs. 19-20, 25; with the printed sign they would erase).

    It has no minimum. Its curvature counts as 1, so that a deep memory grows at most linearly.
    """

    is_linear = True

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        return -(prediction * v).sum(-1)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        return -v.expand_as(prediction)

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        return torch.ones_like(prediction[..., 0])


@dataclass(frozen=True)
class Lp(Bias):
    """sum_j |M(phi(k)) - v|_j^p (Miras Eq. 11), p >= 1."""

    p: float = 3.0

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ValueError(f"Lp p must be >= 1, got {self.p!r}")

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        return (self._error(prediction, v).square() + SMOOTH).pow(0.5 * self.p).sum(-1)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        e = self._error(prediction, v)
        slope = self.p * e * (e.square() + SMOOTH).pow(0.5 * self.p - 1.0)
        return torch.where((prediction - v).abs() <= MAX_ABS, slope, 0.0)

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        """The largest over the coordinates: up to p = 3 of |derivative| / |error|, so that a full step takes no
        coordinate beyond its value; above 3 of half the second derivative, which is more."""
        weight = (self._error(prediction, v).square() + SMOOTH).pow(0.5 * self.p - 1.0)
        return self.p * max(1.0, 0.5 * (self.p - 1.0)) * max_entry(weight)

    def _error(self, prediction: Tensor, v: Tensor) -> Tensor:
        # Errors beyond MAX_ABS count as that, with a derivative of zero: their powers would overflow.
        return (prediction - v).clamp(-MAX_ABS, MAX_ABS)


@dataclass(frozen=True)
class Huber(Bias):
    """Quadratic for errors up to delta_t, linear beyond, delta_t a gate of the token. ``over`` says of what:

    * "coordinates": each coordinate of the error (Miras Eqs. 13-14);
    * "norm": the length of the error (Miras Eq. 15);
    * "mixture": 1/2 |e|_2^2 where |e|_2 <= delta_t, else delta_t |e|_1 (Miras Eq. 16, Yaad's; printed so, not
      continuous).

    Beyond delta the printed mixture passes on signs alone, so that coordinates near zero make the memory chaotic.
    ``corner`` (ours) rounds its absolute values, |e_j| = sqrt(e_j^2 + (corner delta)^2 / d) with d coordinates: smaller
    ones than corner delta / sqrt(d) are written in proportion. 0 is as printed, but for ``SMOOTH``.
    """

    over: str = "norm"
    corner: float = 0.0

    has_delta = True

    def __post_init__(self) -> None:
        if self.over not in ("coordinates", "norm", "mixture"):
            raise ValueError(f"Huber over must be 'coordinates', 'norm' or 'mixture', got {self.over!r}")
        if not self.corner >= 0:
            raise ValueError(f"Huber corner must be >= 0, got {self.corner!r}")

    def start_delta(self, dim: int) -> float:
        """About twice the usual error, so that outliers alone meet the linear part; in the mixture four times that."""
        usual = 1.0 if self.over == "coordinates" else dim**0.5
        return (8.0 if self.over == "mixture" else 2.0) * usual

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        e, delta = _error(prediction, v)
        size = self._absolute(e, delta)
        if self.over == "coordinates":
            return torch.where(e.abs() <= delta, 0.5 * e.square(), delta * (size - 0.5 * delta)).sum(-1)
        inside, delta = e.norm(dim=-1) <= delta[..., 0], delta[..., 0]
        length = _smooth_norm(e)[..., 0] - 0.5 * delta
        outside = delta * (length if self.over == "norm" else size.sum(-1))
        return torch.where(inside, 0.5 * e.square().sum(-1), outside)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        e, delta = _error(prediction, v)
        if self.over == "coordinates":
            return torch.where(e.abs() <= delta, e, delta * e / _smooth(e))
        outside = delta * e / (_smooth_norm(e) if self.over == "norm" else self._absolute(e, delta))
        return torch.where(e.norm(dim=-1, keepdim=True) <= delta, e, outside)

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        """1; in the mixture beyond delta as the ``corner`` bounds it, or |derivative| / |error|."""
        if self.over != "mixture":
            return torch.ones_like(prediction[..., 0])
        e, delta = _error(prediction, v)
        length, root = e.norm(dim=-1), e.shape[-1] ** 0.5
        outside = delta[..., 0] * root / length.clamp_min(SMOOTH)
        if self.corner:
            outside = torch.full_like(outside, root / self.corner)
        return torch.where(length <= delta[..., 0], 1.0, outside)

    def _absolute(self, e: Tensor, delta: Tensor) -> Tensor:
        if self.over != "mixture" or not self.corner:
            return _smooth(e)
        return (e.square() + (self.corner * delta).square() / e.shape[-1] + SMOOTH).sqrt()


@dataclass(frozen=True)
class RobustL2(Bias):
    """max over |dv| <= delta_t of 1/2 |M(phi(k)) - (v + dv)|^2 = 1/2 (|e| + delta_t)^2: regression against the worst
    shift of the value (Miras, section 5.1)."""

    has_delta = True

    def start_delta(self, dim: int) -> float:
        return 0.1 * dim**0.5

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        e, delta = _error(prediction, v)
        return (0.5 * e.square().sum(-1, keepdim=True) + delta * (_smooth_norm(e) + 0.5 * delta))[..., 0]

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        e, delta = _error(prediction, v)
        return e * (1.0 + delta / _smooth_norm(e))

    def curvature(self, prediction: Tensor, v: Tensor) -> Tensor:
        e, delta = _error(prediction, v)
        return (1.0 + delta / _smooth_norm(e))[..., 0]


AttentionalBias = L2 | DotProduct | Lp | Huber | RobustL2


def _error(prediction: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # The square of anything larger overflows in float32, with a gradient of 0 x infinity.
    return (prediction - v[..., :-1]).clamp(-MAX_ABS * MAX_ABS, MAX_ABS * MAX_ABS), v[..., -1:]


def _smooth(e: Tensor) -> Tensor:
    return (e.square() + SMOOTH).sqrt()


def _smooth_norm(e: Tensor) -> Tensor:
    return (e.square().sum(-1, keepdim=True) + SMOOTH).sqrt()
