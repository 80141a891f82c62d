"""Feature maps phi: what the memory's first matrices see instead of the raw key or query.

ATLAS, section 3.1 and Eq. 5. A feature map is a value with two faces that agree by construction:
``expand(x)`` gives phi(x) explicitly, ``kernel(x, y)`` gives phi(x) . phi(y) without forming phi. The chunkwise form
uses the kernel inside a chunk, so its cost there does not depend on the feature dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps^2) along the last axis; zero stays zero, with a finite gradient. Any shape and float dtype."""
    scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(eps)  # squares of huge entries must not overflow
    unit = x / scale
    return unit * torch.rsqrt(unit.square().sum(-1, keepdim=True) + (eps / scale) ** 2)


@dataclass(frozen=True)
class Identity:
    """phi(x) = x."""

    def size(self, dim: int) -> int:
        """Length of phi(x) for x of length ``dim``."""
        return dim

    def initial_sqrt_a(self) -> Tensor | None:
        """The learnable degree coefficients; none here."""
        return None

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """phi(x): ``[..., dim] -> [..., size(dim)]``."""
        return x

    def kernel(self, x: Tensor, y: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """phi(x_i) . phi(y_j): ``[..., n, dim], [..., m, dim] -> [..., n, m]``."""
        return x @ y.mT

    def squared_norm(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """|phi(x)|^2: ``[..., dim] -> [...]``."""
        return x.square().sum(-1)


@dataclass(frozen=True)
class Polynomial:
    """All monomials of degree <= ``degree``, weighted so that phi(x).phi(y) = sum_j a_j (x.y)^j  (ATLAS Eq. 5).

    Each distinct monomial of degree j carries sqrt(multinomial coefficient) and sqrt(a_j); the bare monomials the paper
    prints would not give that kernel. The learnable numbers are ``sqrt_a`` (one a degree, 0..degree), so that
    a_j = sqrt_a_j^2 >= 0; they start at a_j = 1/j!, the Taylor series of exp.
    """

    degree: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"Polynomial degree must be an integer >= 1, got {self.degree!r}")

    def size(self, dim: int) -> int:
        """Number of monomials, C(dim + degree, degree)."""
        return math.comb(dim + self.degree, self.degree)

    def initial_sqrt_a(self) -> Tensor:
        """sqrt(1/j!) for j = 0..degree: ``[degree + 1]``."""
        return torch.tensor([math.factorial(j) ** -0.5 for j in range(self.degree + 1)])

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """phi(x): ``[..., dim] -> [..., C(dim + degree, degree)]``, ordered by degree."""
        a = self._coefficients(x, sqrt_a)
        block = torch.ones_like(x[..., :1])
        blocks = [a[0] * block]
        for j, (parent, variable, weight) in enumerate(_monomials(x.shape[-1], self.degree), start=1):
            block = block[..., parent.to(x.device)] * x[..., variable.to(x.device)]
            blocks.append(block * (a[j] * weight.to(x)))
        return torch.cat(blocks, -1)

    def kernel(self, x: Tensor, y: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """sum_j a_j (x_i . y_j)^j: ``[..., n, dim], [..., m, dim] -> [..., n, m]``; never forms phi."""
        return self._series(x @ y.mT, sqrt_a)

    def squared_norm(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """|phi(x)|^2 = kernel(x, x): ``[..., dim] -> [...]``."""
        return self._series(x.square().sum(-1), sqrt_a)

    def _series(self, product: Tensor, sqrt_a: Tensor | None) -> Tensor:
        a = self._coefficients(product, sqrt_a).square()
        total = a[-1] * torch.ones_like(product)
        for j in range(self.degree - 1, -1, -1):  # Horner
            total = total * product + a[j]
        return total

    def _coefficients(self, like: Tensor, sqrt_a: Tensor | None) -> Tensor:
        if sqrt_a is None:
            sqrt_a = self.initial_sqrt_a()
        if sqrt_a.shape != (self.degree + 1,):
            raise ValueError(f"sqrt_a must have shape [{self.degree + 1}] (degrees 0..{self.degree}), got {list(sqrt_a.shape)}")
        return sqrt_a.to(like)


FeatureMap = Identity | Polynomial


@lru_cache(maxsize=64)
def _monomials(dim: int, degree: int) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
    """For each degree j: (index of the parent monomial of degree j - 1, the variable it is multiplied by, sqrt of the
    multinomial coefficient)."""
    levels = []
    previous: dict[tuple[int, ...], int] = {(): 0}
    for j in range(1, degree + 1):
        monomials = list(combinations_with_replacement(range(dim), j))
        parent = torch.tensor([previous[m[:-1]] for m in monomials])
        variable = torch.tensor([m[-1] for m in monomials])
        counts = [math.prod(math.factorial(m.count(i)) for i in set(m)) for m in monomials]
        weight = torch.tensor([math.sqrt(math.factorial(j) / n) for n in counts], dtype=torch.float64)
        levels.append((parent, variable, weight))
        previous = {m: i for i, m in enumerate(monomials)}
    return tuple(levels)


class PolynomialFeatures(nn.Module):
    """Polynomial features with learnable degree coefficients, for models of your own (ATLAS Eq. 5).

    >>> phi = PolynomialFeatures(dim=4, degree=2)
    >>> x, y = torch.randn(7, 4), torch.randn(5, 4)
    >>> torch.allclose(phi(x) @ phi(y).mT, phi.kernel(x, y), atol=1e-5)
    True

    Args:
        dim: length of the inputs.
        degree: highest degree of the monomials, >= 1.

    Raises:
        ValueError: a ``dim`` or ``degree`` below 1.
    """

    def __init__(self, dim: int, degree: int = 2) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim must be >= 1, got {dim}")
        self.dim = dim
        self.map = Polynomial(degree)
        self.sqrt_a = nn.Parameter(self.map.initial_sqrt_a())

    @property
    def size(self) -> int:
        """Number of features, C(dim + degree, degree)."""
        return self.map.size(self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """phi(x): ``[..., dim] -> [..., size]``."""
        return self.map.expand(x, self.sqrt_a)

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """phi(x_i) . phi(y_j): ``[..., n, dim], [..., m, dim] -> [..., n, m]``."""
        return self.map.kernel(x, y, self.sqrt_a)
