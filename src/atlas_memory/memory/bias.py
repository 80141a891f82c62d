"""Attentional bias: the inner loss l(M; k, v) that the memory minimises while it reads (Miras's name for it).

A bias is a function of the prediction M(phi(k)) and the value v alone. It gives its value (what the definition
differentiates), its derivative with respect to the prediction (what the fast forms back-propagate), and the largest
eigenvalue of its Hessian there (what bounds a step).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class L2:
    """scale * |M(phi(k)) - v|^2, the regression of the Omega rule (ATLAS Eq. 9).

    With ``scale=1`` the gradient has the factor 2 that the papers drop; DeltaNet's objective is ``scale=0.5``.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"L2 scale must be > 0, got {self.scale!r}")

    @property
    def curvature(self) -> float:
        """Largest eigenvalue of the Hessian with respect to the prediction."""
        return 2.0 * self.scale

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        """``[..., dim], [..., dim] -> [...]``."""
        return self.scale * (prediction - v).square().sum(-1)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        """d value / d prediction: ``[..., dim]``."""
        return (2.0 * self.scale) * (prediction - v)


@dataclass(frozen=True)
class DotProduct:
    """-<M(phi(k)), v>: the Hebbian write +v k^T (ATLAS Eqs. 19-20, 25, with the sign that makes it a write: printed as
    +<M, v> the same equations would erase).

    Its curvature is zero, so a bounded step does not bound it: for a deep memory use Muon, or a decay well below 1.
    """

    @property
    def curvature(self) -> float:
        """The loss is linear in the prediction."""
        return 0.0

    def value(self, prediction: Tensor, v: Tensor) -> Tensor:
        """``[..., dim], [..., dim] -> [...]``."""
        return -(prediction * v).sum(-1)

    def derivative(self, prediction: Tensor, v: Tensor) -> Tensor:
        """d value / d prediction: ``[..., dim]``."""
        return -v.expand_as(prediction)


AttentionalBias = L2 | DotProduct
