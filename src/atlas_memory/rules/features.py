"""Feature maps phi: what the memory's first matrices see instead of the raw key or query (ATLAS, section 3.1, Eq. 5).

``expand(x)`` is phi(x), and ``kernel(x, y)`` phi(x) . phi(y), which may be known without forming phi. ``sqrt_a`` are
coefficients that an outer model may learn; only ``Polynomial`` has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .autograd import Function, call
from .validation import MOST, check_positive, check_size

MAX_ABS = 1e7
"""About how long phi of a key may be: the product of four such lengths must be finite in float32."""


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps^2) along the last axis, of any shape; zero stays zero, with a finite gradient."""
    return call(_Normalise, x, eps)[0]


class _Normalise(Function):
    """``l2_normalise`` and its gradient, (g - y (y . g)) / sqrt(|x|^2 + eps^2), in few passes over memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(eps)  # squares of huge entries must not overflow
        unit = x / scale
        inverse = torch.rsqrt(unit.square().sum(-1, keepdim=True) + (eps / scale) ** 2)
        return unit * inverse, (inverse / scale).clamp_max(torch.finfo(x.dtype).max)  # of zero, in float16

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, to_inverse: Tensor | None) -> tuple[Tensor, None]:
        y, inverse = ctx.saved_tensors
        along = 0.0 if g is None else (y * g).sum(-1, keepdim=True)
        along = along if to_inverse is None else along + to_inverse * inverse  # only in second derivatives
        return (-along * y if g is None else g - along * y) * inverse, None


class Features:
    """The base class of feature maps. One of your own is a frozen dataclass with ``size`` and ``expand``; the other
    methods follow from these."""

    infinite = False
    """Whether phi(x) has infinitely many entries, and only a kernel; a matrix then has a column for each key."""
    horizon: int | None = None
    """Of an infinite-dimensional map: after how many tokens a key is forgotten; None: never."""
    constant: float = 1.0
    """What the entries of phi(x) before x itself are in a fresh layer (``own``)."""

    @property
    def max_abs(self) -> float | None:
        """Entries of keys are clamped to +-``max_abs``, so that nothing overflows in float32. None: |phi(k)|^2 is
        computed, and a token where it is too large counts as NaN."""
        return None

    def size(self, dim: int) -> int:
        """Length of phi(x) for x of length ``dim``."""
        raise NotImplementedError(f"{type(self).__name__} has no method size(dim)")

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """phi(x): ``[..., dim] -> [..., size(dim)]``, finite where x is zero, and so its gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no method expand(x, sqrt_a=None)")

    def own(self, dim: int) -> slice:
        """Which entries of phi(x) are x itself, in a fresh layer; those before must be ``constant``. A fresh memory
        sees these alone (initialisation.py), or all through a random matrix if there are none."""
        return slice(0, 0)

    def initial_sqrt_a(self) -> Tensor | None:
        """The learnable degree coefficients; none here."""
        return None

    def kernel(self, x: Tensor, y: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """phi(x_i) . phi(y_j): ``[..., n, dim], [..., m, dim] -> [..., n, m]``."""
        return self.expand(x, sqrt_a) @ self.expand(y, sqrt_a).mT

    def squared_norm(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """|phi(x)|^2: ``[..., dim] -> [...]``."""
        return self.expand(x, sqrt_a).square().sum(-1)

    def columns(self, x: Tensor, keys: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """What multiplies the columns of a matrix: phi(x) ``[..., size(dim)]``, whatever the ``keys``."""
        return self.expand(x, sqrt_a)


@dataclass(frozen=True)
class Identity(Features):
    """phi(x) = x."""

    @property
    def max_abs(self) -> float:
        return MAX_ABS

    def size(self, dim: int) -> int:
        return dim

    def own(self, dim: int) -> slice:
        return slice(0, dim)

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class Polynomial(Features):
    """All monomials of degree <= ``degree``, weighted so that phi(x).phi(y) = sum_j a_j (x.y)^j  (ATLAS Eq. 5).

    Each monomial of degree j carries sqrt(multinomial coefficient) and sqrt(a_j); the bare ones that the paper prints
    would not give that kernel. ``sqrt_a`` is learned, a_j = sqrt_a_j^2 >= 0. It starts at the Taylor series of exp,
    a_j = 1/j!, but for sqrt(a_0) = ``constant``, 1 in the series; Hebbian rules take less, since all keys share it.
    """

    degree: int = 2
    constant: float = 1.0

    def __post_init__(self) -> None:
        check_size("Polynomial degree", self.degree, MOST)
        check_positive("Polynomial constant", self.constant)

    @property
    def max_abs(self) -> float:
        return MAX_ABS ** (1 / self.degree)

    def size(self, dim: int) -> int:
        """Number of monomials, C(dim + degree, degree)."""
        return math.comb(dim + self.degree, self.degree)

    def own(self, dim: int) -> slice:
        return slice(1, 1 + dim)

    def initial_sqrt_a(self) -> Tensor:
        """``constant``, then sqrt(1/j!) for j = 1..degree: ``[degree + 1]`` float64."""
        higher = (math.factorial(j) ** -0.5 for j in range(1, self.degree + 1))
        return torch.tensor([self.constant, *higher], dtype=torch.float64)

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        a = self._coefficients(x, sqrt_a)
        dim = x.shape[-1]
        blocks = [a[0] * torch.ones_like(x[..., :1]), a[1] * x]
        block = x
        for j in range(2, self.degree + 1):
            if j == 2:
                # Products of 0/1 matrices pick the factors: unlike indexing, they have a fast backward pass.
                block = (x @ _selection(dim, 0, x)) * (x @ _selection(dim, 1, x))
            else:
                # Lexicographic order: x_i times the monomials of degree j - 1 in x_i, x_{i+1}, ..., which are a suffix.
                starts = (block.shape[-1] - math.comb(dim - i + j - 2, j - 1) for i in range(dim))
                block = torch.cat([x[..., i, None] * block[..., s:] for i, s in enumerate(starts)], -1)
            blocks.append(block * (a[j] * _weights(dim, j, x)))
        return torch.cat(blocks, -1)

    def kernel(self, x: Tensor, y: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """sum_j a_j (x_i . y_j)^j: ``[..., n, dim], [..., m, dim] -> [..., n, m]``; never forms phi."""
        return self._series(x @ y.mT, sqrt_a)

    def squared_norm(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
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
            raise ValueError(f"sqrt_a must have shape [{self.degree + 1}], one a degree, got {list(sqrt_a.shape)}")
        return sqrt_a.to(like)


@dataclass(frozen=True)
class Exponential(Features):
    """phi(x).phi(y) = exp(x.y): phi* of ATLAS Eqs. 22-23, all monomials of all degrees, each weighted as in Polynomial.

    A matrix W that multiplies phi*(x) is kept as attention keeps its cache: the keys x_j that were read, and a column
    of coefficients for each. The learned M_0 multiplies x itself, W phi*(x) = W_0 x + sum_j column_j exp(x_j . x). At
    the end of each chunk keys that are ``horizon`` tokens old leave the memory; None: the state grows."""

    horizon: int | None = None

    infinite = True

    def __post_init__(self) -> None:
        if self.horizon is not None:
            check_size("Exponential horizon, if not None,", self.horizon)

    def size(self, dim: int) -> int:
        """Columns before the first token: those of M_0."""
        return dim

    def own(self, dim: int) -> slice:
        return slice(0, dim)

    def expand(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        raise TypeError("Exponential features are infinitely many: they have a kernel and no phi(x)")

    def kernel(self, x: Tensor, y: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        return (x @ y.mT).exp()

    def columns(self, x: Tensor, keys: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        """x for the columns of M_0, then the kernel of x with each key: ``[..., n, dim + m]``."""
        return torch.cat([x, self.kernel(x, keys)], -1)

    def squared_norm(self, x: Tensor, sqrt_a: Tensor | None = None) -> Tensor:
        return x.square().sum(-1).exp()


FeatureMap = Identity | Polynomial | Exponential


Constant = Callable[[int, int], Tensor]


def cached_constant(
    shape: Callable[[int, int], tuple[int, ...]],
) -> Callable[[Constant], Callable[[int, int, Tensor], Tensor]]:
    """A decorator for a function of two integers that makes a constant of this ``shape``. The result takes a third
    argument, whose dtype and device the constant has, and a cache: a GPU would wait for a copy, and a CUDA graph cannot
    have one. A compiler makes a constant of its own for a CPU; elsewhere it calls a custom operator, which reads the
    cache."""

    def decorate(make: Constant) -> Callable[[int, int, Tensor], Tensor]:
        @lru_cache(maxsize=64)
        def there(dim: int, i: int, device: torch.device, dtype: torch.dtype) -> Tensor:
            with torch.inference_mode(False):  # a cached inference tensor could never be trained through
                return make(dim, i).to(device, dtype)

        @torch.library.custom_op(f"atlas_memory::constant{make.__name__}", mutates_args=())
        def operator(dim: int, i: int, like: Tensor) -> Tensor:
            return there(dim, i, like.device, like.dtype).clone(memory_format=torch.contiguous_format)

        operator.register_fake(lambda dim, i, like: like.new_empty(shape(dim, i)))

        def found(dim: int, i: int, like: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return make(dim, i).to(like) if like.device.type == "cpu" else operator(dim, i, like.detach())
            if type(like) is not Tensor:  # a fake one perhaps, of which nothing may be kept
                return make(dim, i).to(like)
            return there(dim, i, like.device, like.dtype)

        return found

    return decorate


@cached_constant(lambda dim, degree: (math.comb(dim + degree - 1, degree),))
def _weights(dim: int, degree: int) -> Tensor:
    """sqrt of the multinomial coefficient of every monomial of one degree, in lexicographic order: float64."""
    return torch.tensor(_multinomials(dim, degree), dtype=torch.float64, device="cpu").sqrt()


def _multinomials(dim: int, degree: int) -> list[float]:
    monomials = combinations_with_replacement(range(dim), degree)
    repeats = (math.prod(math.factorial(n) for n in Counter(m).values()) for m in monomials)
    return [math.factorial(degree) / n for n in repeats]


# What torch.compiler.assume_constant_result sets, which would import the compiler; it cannot trace itertools.
_multinomials._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cached_constant(lambda dim, factor: (dim, dim * (dim + 1) // 2))
def _selection(dim: int, factor: int) -> Tensor:
    """0/1 matrix ``[dim, dim (dim + 1) / 2]`` picking the first (0) or second (1) factor of every pair i <= j."""
    return F.one_hot(torch.triu_indices(dim, dim, device="cpu")[factor], dim).mT.double()


class PolynomialFeatures(nn.Module):
    """Polynomial features with learnable degree coefficients, for models of your own (ATLAS Eq. 5).

    Examples:
        >>> phi = PolynomialFeatures(dim=4, degree=2)
        >>> x, y = torch.randn(7, 4), torch.randn(5, 4)
        >>> torch.allclose(phi(x) @ phi(y).mT, phi.kernel(x, y), atol=1e-5)
        True

    Args:
        dim: length of the inputs.
        degree: highest degree of the monomials, >= 1; ValueError for another.
    """

    def __init__(self, dim: int, degree: int = 2) -> None:
        super().__init__()
        check_size("dim", dim)
        self.dim = dim
        self.map = Polynomial(degree)
        self.sqrt_a = nn.Parameter(self.map.initial_sqrt_a().to(torch.get_default_dtype()))

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
