"""The memory network M(W, x): explicit weights per sequence and head, with closed-form inner gradients.

A network is described by its matrices, in the order in which they act. A *lifted* matrix multiplies phi(x); the others
multiply hidden activations. Every loss gradient is an outer product a token, dl/dW_l = delta_l f_l^T, with f_l the
matrix's input and delta_l the error at its output. Each network therefore gives

* ``forward(apply, x)``: the prediction, with ``apply(l, u)`` supplying W_l phi(u) or W_l u. The chunkwise form passes
  an ``apply`` whose weights differ at every token, so the reading path is written once;
* ``trace`` and ``deltas``: the pass at fixed weights that yields f_l, and the back-propagation that yields delta_l;
* ``gains``: per token and matrix an upper bound on the squared spectral norm of d prediction / d (W_l f_l).

Biases: none (ATLAS Eqs. 42-43). Where keys are lifted, the residual is the un-lifted key, so that dimensions match.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Apply = Callable[[int, Tensor], Tensor]


def gelu_slope(h: Tensor) -> Tensor:
    """Derivative of the exact (erf) GELU: Phi(h) + h * N(h)."""
    return 0.5 * (1.0 + torch.erf(h * math.sqrt(0.5))) + h * torch.exp(-0.5 * h * h) / math.sqrt(2.0 * math.pi)


@dataclass(frozen=True)
class Trace:
    """One pass at fixed weights. ``inputs[l]``: what matrix l multiplies (un-lifted where it is lifted); ``hidden``:
    the pre-activations, all ``[..., time, width]``; ``prediction`` ``[..., time, dim]``."""

    prediction: Tensor
    inputs: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True)
class Linear:
    """M(x) = W phi(x), a matrix memory."""

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x)."""
        return (True,)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        return ((dim, features),)

    def forward(self, apply: Apply, x: Tensor) -> Tensor:
        """Prediction ``[..., time, dim]`` for x ``[..., time, dim]``."""
        return apply(0, x)

    def trace(self, apply: Apply, x: Tensor) -> Trace:
        """As ``forward``, keeping what the gradients need."""
        return Trace(apply(0, x), (x,), ())

    def deltas(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """dl / d (W_l f_l) for every matrix, from ``error`` = dl / d prediction ``[..., time, dim]``."""
        return (error,)

    def gains(self, weights: Sequence[Tensor], trace: Trace) -> tuple[Tensor, ...]:
        """Bounds on |d prediction / d (W_l f_l)|^2, each ``[..., time]``."""
        return (torch.ones_like(trace.prediction[..., 0]),)


@dataclass(frozen=True)
class MLP:
    """M(x) = x + W_L gelu(... gelu(W_1 phi(x))): ``depth`` matrices of width ``expansion * dim``.

    ATLAS Eq. 42 is depth 2, with our W_1 and W_2 called W_2 and W_1.
    """

    depth: int = 2
    expansion: int = 4
    residual: bool = True

    def __post_init__(self) -> None:
        _positive(self, "depth", "expansion")

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x): the first."""
        return (True,) + (False,) * (self.depth - 1)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        widths = [features] + [self.expansion * dim] * (self.depth - 1) + [dim]
        return tuple((widths[i + 1], widths[i]) for i in range(self.depth))

    def forward(self, apply: Apply, x: Tensor) -> Tensor:
        """Prediction ``[..., time, dim]`` for x ``[..., time, dim]``."""
        return self.trace(apply, x).prediction

    def trace(self, apply: Apply, x: Tensor) -> Trace:
        """As ``forward``, keeping what the gradients need."""
        inputs, hidden = [x], []
        out = apply(0, x)
        for layer in range(1, self.depth):
            hidden.append(out)
            inputs.append(F.gelu(out))
            out = apply(layer, inputs[-1])
        return Trace(x + out if self.residual else out, tuple(inputs), tuple(hidden))

    def deltas(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """dl / d (W_l f_l) for every matrix, from ``error`` = dl / d prediction ``[..., time, dim]``."""
        out = [error]
        for layer in range(self.depth - 1, 0, -1):
            out.append((out[-1] @ weights[layer]) * gelu_slope(trace.hidden[layer - 1]))
        return tuple(reversed(out))

    def gains(self, weights: Sequence[Tensor], trace: Trace) -> tuple[Tensor, ...]:
        """Bounds on |J_l|^2 = |d prediction / d (W_l f_l)|^2, each ``[..., time]``.

        |J_l|^2 <= |W_{l+1} diag(slope_l)|_F^2 |J_{l+1}|^2.
        """
        out = [torch.ones_like(trace.prediction[..., 0])]
        for layer in range(self.depth - 1, 0, -1):
            columns = weights[layer].square().sum(-2)  # squared column norms: [..., width]
            slope = gelu_slope(trace.hidden[layer - 1])
            out.append(out[-1] * (slope.square() @ columns[..., None]).squeeze(-1))
        return tuple(reversed(out))


@dataclass(frozen=True)
class GatedMLP:
    """M(x) = x + W_2 (gelu(W_0 phi(x)) * (W_1 phi(x))), hidden width ``expansion * dim`` (ATLAS++, Eq. 43,
    where W_0, W_1, W_2 are called W_2, W_3, W_1)."""

    expansion: int = 4
    residual: bool = True

    def __post_init__(self) -> None:
        _positive(self, "expansion")

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x): both of the hidden layer."""
        return (True, True, False)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        width = self.expansion * dim
        return ((width, features), (width, features), (dim, width))

    def forward(self, apply: Apply, x: Tensor) -> Tensor:
        """Prediction ``[..., time, dim]`` for x ``[..., time, dim]``."""
        return self.trace(apply, x).prediction

    def trace(self, apply: Apply, x: Tensor) -> Trace:
        """As ``forward``, keeping what the gradients need."""
        gate, value = apply(0, x), apply(1, x)
        inner = F.gelu(gate) * value
        out = apply(2, inner)
        return Trace(x + out if self.residual else out, (x, x, inner), (gate, value))

    def deltas(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """dl / d (W_l f_l) for every matrix, from ``error`` = dl / d prediction ``[..., time, dim]``."""
        gate, value = trace.hidden
        inner = error @ weights[2]
        return inner * value * gelu_slope(gate), inner * F.gelu(gate), error

    def gains(self, weights: Sequence[Tensor], trace: Trace) -> tuple[Tensor, ...]:
        """Bounds on |d prediction / d (W_l f_l)|^2, each ``[..., time]``."""
        gate, value = trace.hidden
        columns = weights[2].square().sum(-2)[..., None]
        to_gate = ((value * gelu_slope(gate)).square() @ columns).squeeze(-1)
        to_value = (F.gelu(gate).square() @ columns).squeeze(-1)
        return to_gate, to_value, torch.ones_like(to_gate)


def _positive(network: object, *names: str) -> None:
    for name in names:
        value = getattr(network, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(network).__name__} {name} must be an integer >= 1, got {value!r}")


Network = Linear | MLP | GatedMLP
