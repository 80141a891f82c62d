"""The memory network M(W, x): explicit weights per sequence and head, with closed-form inner gradients.

A network is its matrices W_l, in the order in which they act. A *feature-mapped* matrix multiplies phi(x), the others
hidden activations. For one token dl/dW_l = delta_l f_l^T, with f_l the matrix's input and delta_l the error at its
output, to which ``pre_norm_error`` and ``back`` lead. ``jacobian_bounds`` and ``curvature_bound`` bound steps,
``shares`` divide them among matrices (step.py).

All networks end as M(x) = x + LN(pre_norm(x)), with the residual x and the layer norm LN (Miras section 5.3, TTT) if
asked for; the pre-norm output is that of the last matrix, the residual the raw key. The memories of ATLAS have no
biases (Eqs. 42-43); of TTT's, a first layer's is the constant in phi of ``Polynomial(1)``, a hidden layer's
``MLP.bias``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import Function, call, max_entry
from .initialisation import FeatureLayout, isometry, mapped_isometry, normal, on_keys
from .validation import MOST, check_size, suggest

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu}


def with_slope(activation: str, h: Tensor) -> tuple[Tensor, Tensor]:
    """sigma(h) and sigma'(h) for the exact (erf) GELU or SiLU."""
    function: type[torch.autograd.Function] = _Gelu if activation == "gelu" else _Silu
    return call(function, h)


class _WithSlope(Function):
    """Both as one function: autograd would keep a dozen intermediates of sigma'."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])


class _Gelu(_WithSlope):
    """h Phi(h), and Phi(h) + h N(h), with Phi and N the normal distribution and its density."""

    @staticmethod
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        below = torch.erf(h * math.sqrt(0.5)).add_(1.0).mul_(0.5)
        return h * below, torch.addcmul(below, h, _density(h))

    @staticmethod
    def backward(ctx: Any, to_value: Tensor, to_slope: Tensor) -> Tensor:
        h, slope = ctx.saved_tensors
        return torch.addcmul(to_value * slope, to_slope * _density(h), 2.0 - h * h)


class _Silu(_WithSlope):
    """h s(h), and s(h) (1 + h (1 - s(h))), with s the sigmoid."""

    @staticmethod
    def forward(h: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(h)
        value = h * gate
        return value, torch.addcmul(gate, value, 1.0 - gate)

    @staticmethod
    def backward(ctx: Any, to_value: Tensor, to_slope: Tensor) -> Tensor:
        h, slope = ctx.saved_tensors
        gate = torch.sigmoid(h)
        # (s + h s (1 - s))' = s (1 - s) (2 + h (1 - 2 s))
        curved = gate * (1.0 - gate) * torch.addcmul(torch.full_like(h, 2.0), h, 1.0 - 2.0 * gate)
        return torch.addcmul(to_value * slope, to_slope, curved)


def _density(h: Tensor) -> Tensor:
    return (h * h).mul(-0.5).exp() * (1.0 / math.sqrt(2.0 * math.pi))


Norm = tuple[Tensor, Tensor]
"""Gain and shift of a layer norm, ``[heads, dim]`` each."""
NORM_EPS = 1e-6

POWER_STEPS = 4


def squared_spectral_norm(matrix: Tensor, columns: int | None = None) -> Tensor:
    """The square of the largest singular value of the first ``columns`` of a matrix, ``[..., rows, all] -> [...]``, by
    power iteration from below."""
    matrix = matrix[..., :columns]
    rows, tiny = matrix.shape[-2], torch.finfo(matrix.dtype).tiny
    start = torch.arange(1, rows + 1, dtype=matrix.dtype, device=matrix.device).square().mul(0.7).cos()
    size = matrix.detach().abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    unit = (matrix / size).reshape(-1, *matrix.shape[-2:])  # squares of huge entries must not overflow
    # The gradient of a singular value needs none through u. |fixed|^2 is from 1 / rows to the columns: powers stay
    # finite.
    u, fixed = start.expand(len(unit), 1, rows), unit.detach() * rows**-0.5
    transposed = fixed.mT
    for _ in range(POWER_STEPS):
        u = u.bmm(fixed).bmm(transposed)
    u = u / u.norm(dim=-1, keepdim=True).clamp_min(tiny)
    return u.bmm(unit).square().sum((-2, -1)).view(matrix.shape[:-2]) * size.square()[..., 0, 0]


SpectralNorm = Callable[[Tensor, int], Tensor]
"""``squared_spectral_norm``, or the same from a store of known norms."""


def layer_norm(x: Tensor, norm: Norm | None) -> Tensor:
    """The layer norm of x ``[..., heads, time, dim]`` over its last dimension; norm None: gain 1, shift 0."""
    out = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return out if norm is None else out * norm[0][..., None, :] + norm[1][..., None, :]


def layer_norm_vjp(x: Tensor, norm: Norm | None, error: Tensor) -> Tensor:
    """The error at x, the input of a layer norm, from ``error``, that at its output; ``[..., time, dim]`` all."""
    error = error if norm is None else error * norm[0][..., None, :]
    centred = x - x.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit = centred * inverse
    return inverse * (error - error.mean(-1, keepdim=True) - unit * (error * unit).mean(-1, keepdim=True))


Apply = Callable[[int, Tensor], Tensor]
"""(l, u) -> W_l phi(u) where matrix l is feature-mapped, else W_l u."""

EARLIER_SHARE = 0.1
"""The share of a step of all matrices before the last one together."""

START_GATES = 1.0
"""A fresh gate of ``GatedMLP`` is 1 plus a term of x with this standard deviation over sqrt(dim)."""

MatrixInput = tuple[Tensor, tuple[Tensor, ...]]
"""A matrix's input ``[..., time, width]``, not mapped, and what ``back`` needs."""


@dataclass(frozen=True)
class ForwardCache:
    """One forward pass at fixed weights, ``[..., time, width]`` all: ``prediction``, M(x); ``inputs[l]`` of matrix l, x
    itself where it is feature-mapped; ``hidden``, what ``back`` needs; ``pre_norm``, the last matrix's output."""

    prediction: Tensor
    inputs: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    pre_norm: Tensor


@dataclass(frozen=True, kw_only=True)
class NetworkBase:
    """The base class of networks: x + LN(pre_norm(x))."""

    residual: bool = True
    norm: bool = False

    def forward(self, apply: Apply, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Prediction ``[..., time, dim]`` for x ``[..., time, dim]``; ``norm``: gain and shift ``[heads, dim]``."""
        return self.end(x, self.pre_norm(apply, x), norm)

    def pre_norm(self, apply: Apply, x: Tensor) -> Tensor:
        """What the last matrix puts out, ``[..., time, dim]``: before norm and residual."""
        outputs: list[Tensor] = []
        for i in range(len(self.feature_mapped)):
            outputs.append(apply(i, self.matrix_input(i, x, outputs)[0]))
        return outputs[-1]

    def forward_cache(self, apply: Apply, x: Tensor, norm: Norm | None = None) -> ForwardCache:
        """As ``forward``, keeping what the gradients need."""
        outputs: list[Tensor] = []
        matrix_inputs: list[MatrixInput] = []
        for i in range(len(self.feature_mapped)):
            matrix_inputs.append(self.matrix_input(i, x, outputs, slopes=True))
            outputs.append(apply(i, matrix_inputs[-1][0]))
        return self.make_cache(x, matrix_inputs, outputs[-1], norm)

    def make_cache(
        self, x: Tensor, matrix_inputs: Sequence[MatrixInput], pre_norm: Tensor, norm: Norm | None
    ) -> ForwardCache:
        hidden = tuple(part for _, parts in matrix_inputs for part in parts)
        return ForwardCache(self.end(x, pre_norm, norm), tuple(u for u, _ in matrix_inputs), hidden, pre_norm)

    def end(self, x: Tensor, pre_norm: Tensor, norm: Norm | None) -> Tensor:
        """The prediction x + LN(pre_norm), each term if the network has it."""
        out = layer_norm(pre_norm, norm) if self.norm else pre_norm
        return x + out if self.residual else out

    def pre_norm_error(self, cache: ForwardCache, error: Tensor, norm: Norm | None = None) -> Tensor:
        """dl / d pre-norm from ``error`` = dl / d prediction, both ``[..., time, dim]``."""
        return layer_norm_vjp(cache.pre_norm, norm, error) if self.norm else error

    def curvature_bound(
        self, cache: ForwardCache, curvature: Tensor, slope: Tensor | None, norm: Norm | None = None
    ) -> Tensor:
        """A bound on how fast the error at the pre-norm output grows with that output, ``[..., time]``.

        ``curvature`` ``[..., time]`` is that of the loss, and ``slope`` ``[..., time, dim]`` its derivative by the
        prediction if the loss is quadratic, else None. A layer norm keeps z = (output - mean) / std on a sphere. Along
        the error, a tangent of it, the second derivative of a quadratic loss is at most

            (curvature gain^2 - <slope, gain z> / dim) / std^2.

        At least half of the first term counts, since the sphere's bend, the second, changes along a step. A std above 1
        counts as 1: steps that grow with a memory would let it grow without end.
        """
        if not self.norm:
            return curvature
        centred = cache.pre_norm - cache.pre_norm.mean(-1, keepdim=True)
        variance = centred.square().mean(-1) + NORM_EPS
        gain = None if norm is None else norm[0][..., None, :]
        first = curvature if gain is None else curvature * gain.abs().amax(-1).square()
        if slope is not None:
            bend = ((slope if gain is None else slope * gain) * centred).mean(-1) * variance.rsqrt()
            first = torch.maximum(first - bend, 0.5 * first)
        return first / variance.clamp_max(1.0)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of a step that each matrix has; they sum to 1."""
        earlier = len(self.feature_mapped) - 1
        return (EARLIER_SHARE / earlier,) * earlier + (1.0 - EARLIER_SHARE,) if earlier else (1.0,)

    bias = False
    """Whether the inputs of the matrices after the first end in a constant 1."""

    @property
    def feature_mapped(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x)."""
        raise NotImplementedError

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        raise NotImplementedError

    def start(self, heads: int, dim: int, phi: FeatureLayout) -> tuple[Tensor, ...]:
        """A fresh M_0, one ``[heads, rows, columns]`` a matrix, for heads of ``dim``; see initialisation.py."""
        raise NotImplementedError

    def matrix_input(self, i: int, x: Tensor, outputs: Sequence[Tensor], slopes: bool = False) -> MatrixInput:
        """The input of matrix i, given x ``[..., time, dim]`` and the ``outputs`` of the matrices before it; with
        ``slopes``, also its part of ``ForwardCache.hidden``."""
        raise NotImplementedError

    def back(self, weights: Sequence[Tensor], cache: ForwardCache, error: Tensor) -> tuple[Tensor, ...]:
        """delta_l of every matrix, from dl / d pre-norm ``[..., time, dim]``."""
        raise NotImplementedError

    def jacobian_bounds(
        self, weights: Sequence[Tensor], cache: ForwardCache, spectral_norm: SpectralNorm = squared_spectral_norm
    ) -> tuple[Tensor, ...]:
        """Bounds on |d pre-norm / d (W_l f_l)|^2, each ``[..., time]``; 1 for the last matrix."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(NetworkBase):
    """M(x) = W phi(x), a matrix memory."""

    residual: bool = False

    @property
    def feature_mapped(self) -> tuple[bool, ...]:
        return (True,)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        return ((dim, features),)

    def start(self, heads: int, dim: int, phi: FeatureLayout) -> tuple[Tensor, ...]:
        """Zero; under a layer norm random, since zero has no direction."""
        if self.norm:
            return (on_keys(normal(heads, dim, dim), phi),)
        return (torch.zeros(heads, dim, phi.size),)

    def matrix_input(self, i: int, x: Tensor, outputs: Sequence[Tensor], slopes: bool = False) -> MatrixInput:
        return x, ()

    def back(self, weights: Sequence[Tensor], cache: ForwardCache, error: Tensor) -> tuple[Tensor, ...]:
        return (error,)

    def jacobian_bounds(
        self, weights: Sequence[Tensor], cache: ForwardCache, spectral_norm: SpectralNorm = squared_spectral_norm
    ) -> tuple[Tensor, ...]:
        return (torch.ones_like(cache.pre_norm[..., 0]),)


@dataclass(frozen=True)
class MLP(NetworkBase):
    """M(x) = x + W_L sigma(... sigma(W_1 phi(x))): ``depth`` matrices of width ``expansion * dim``.

    ATLAS Eq. 42 is depth 2 (our W_1 and W_2 are its W_2 and W_1). ``bias``: later matrices' last column is one.
    """

    depth: int = 2
    expansion: int = 4
    bias: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        _check(self, "depth", "expansion")

    @property
    def feature_mapped(self) -> tuple[bool, ...]:
        return (True,) + (False,) * (self.depth - 1)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        width = self.expansion * dim
        rows = [width] * (self.depth - 1) + [dim]
        columns = [features] + [width + self.bias] * (self.depth - 1)
        return tuple(zip(rows, columns, strict=True))

    def start(self, heads: int, dim: int, phi: FeatureLayout) -> tuple[Tensor, ...]:
        """Hidden units that are an isometry of x, and a random last matrix. Biases are zero."""
        if self.depth == 1:
            return Linear(residual=self.residual, norm=self.norm).start(heads, dim, phi)
        width = self.expansion * dim
        first = mapped_isometry(heads, width, dim, phi)
        middle = [isometry(heads, width, width) for _ in range(self.depth - 2)]
        return (first, *(F.pad(m, (0, int(self.bias))) for m in (*middle, normal(heads, dim, width))))

    def matrix_input(self, i: int, x: Tensor, outputs: Sequence[Tensor], slopes: bool = False) -> MatrixInput:
        if i == 0:
            return x, ()
        u, kept = _activate(self.activation, outputs[-1], slopes)
        return F.pad(u, (0, 1), value=1.0) if self.bias else u, kept

    def back(self, weights: Sequence[Tensor], cache: ForwardCache, error: Tensor) -> tuple[Tensor, ...]:
        out = [error]
        for layer in range(self.depth - 1, 0, -1):
            slope = cache.hidden[layer - 1]
            out.append((out[-1] @ weights[layer][..., : slope.shape[-1]]) * slope)
        return tuple(reversed(out))

    def jacobian_bounds(
        self, weights: Sequence[Tensor], cache: ForwardCache, spectral_norm: SpectralNorm = squared_spectral_norm
    ) -> tuple[Tensor, ...]:
        """|J_l|^2 <= |W_{l+1}|^2 max slope_l^2 |J_{l+1}|^2, J_l = d pre-norm / d (W_l f_l), spectral norms."""
        out = [torch.ones_like(cache.pre_norm[..., 0])]
        for layer in range(self.depth - 1, 0, -1):
            slope = cache.hidden[layer - 1]
            through = spectral_norm(weights[layer], slope.shape[-1])
            out.append(out[-1] * max_entry(slope.square()) * through[..., None])
        return tuple(reversed(out))


@dataclass(frozen=True)
class GatedMLP(NetworkBase):
    """M(x) = x + W_2 (sigma(W_0 phi(x)) * (W_1 phi(x))), hidden width ``expansion * dim`` (ATLAS++, Eq. 43,
    where W_0, W_1, W_2 are called W_2, W_3, W_1; LaCT's SwiGLU memory with SiLU and no residual)."""

    expansion: int = 4
    activation: str = "gelu"

    def __post_init__(self) -> None:
        _check(self, "expansion")

    @property
    def feature_mapped(self) -> tuple[bool, ...]:
        return (True, True, False)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        width = self.expansion * dim
        return ((width, features), (width, features), (dim, width))

    def start(self, heads: int, dim: int, phi: FeatureLayout) -> tuple[Tensor, ...]:
        """Where phi has a constant, it opens all gates alike, and the rest is as in ``MLP``. Elsewhere, under a layer
        norm and without a residual, gates and values are isometries of x with entries of variance 1."""
        width = self.expansion * dim
        last = normal(heads, dim, width)
        if not (phi.own.start and self.residual) or self.norm:
            gate, value = (on_keys(isometry(heads, width, dim) * dim**0.5, phi) for _ in range(2))
            return gate, value, last
        gate = on_keys(isometry(heads, width, dim) * START_GATES, phi)
        gate[..., 0] = 1.0 / phi.constant
        return gate, mapped_isometry(heads, width, dim, phi), last

    def matrix_input(self, i: int, x: Tensor, outputs: Sequence[Tensor], slopes: bool = False) -> MatrixInput:
        if i < 2:
            return x, ()
        gate, value = outputs
        opened, slope = _activate(self.activation, gate, slopes)
        return opened * value, (slope[0] * value, opened) if slope else ()

    def back(self, weights: Sequence[Tensor], cache: ForwardCache, error: Tensor) -> tuple[Tensor, ...]:
        to_gate, to_value = cache.hidden
        inner = error @ weights[2]
        return inner * to_gate, inner * to_value, error

    def jacobian_bounds(
        self, weights: Sequence[Tensor], cache: ForwardCache, spectral_norm: SpectralNorm = squared_spectral_norm
    ) -> tuple[Tensor, ...]:
        through = spectral_norm(weights[2], weights[2].shape[-1])[..., None]
        to_gate, to_value = (max_entry(x.square()) * through for x in cache.hidden)
        return to_gate, to_value, torch.ones_like(through.expand(to_gate.shape))


Network = Linear | MLP | GatedMLP


def _activate(activation: str, h: Tensor, slopes: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    if not slopes:
        return ACTIVATIONS[activation](h), ()
    u, slope = with_slope(activation, h)
    return u, (slope,)


def _check(network: MLP | GatedMLP, *sizes: str) -> None:
    for name in sizes:
        check_size(f"{type(network).__name__} {name}", getattr(network, name), MOST)
    if network.activation not in ACTIVATIONS:
        raise ValueError(f"activation {network.activation!r}: {suggest(network.activation, ACTIVATIONS)}")
