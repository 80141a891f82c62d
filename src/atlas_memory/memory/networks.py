"""The memory network M(W, x): explicit weights per sequence and head, with closed-form inner gradients.

A network is described by its matrices, in the order in which they act. A *lifted* matrix multiplies phi(x); the others
multiply hidden activations. Every loss gradient is an outer product a token, dl/dW_l = delta_l f_l^T, with f_l the
matrix's input and delta_l the error at its output. Each network therefore gives

* ``trace``: the pass that yields the prediction and every f_l, with ``apply(l, u)`` supplying W_l phi(u) or W_l u. The
  chunkwise form passes an ``apply`` whose weights differ at every token, so the reading path is written once;
* ``deltas``: the back-propagation that yields delta_l;
* ``gains``: per token and matrix an upper bound on the squared spectral norm of d prediction / d (W_l f_l).

All end in the same way: M(x) = x + LN(body(x)), the residual x and the layer norm LN (Miras section 5.3, TTT; its gain
and shift are outer parameters) each if asked for. Where keys are lifted, the residual is the un-lifted key, so that
dimensions match. The memories of ATLAS have no biases (Eqs. 42-43); TTT's have: a first layer's is the constant in
phi of ``Polynomial(1)``, a hidden layer's is ``MLP.bias``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import ACTIVATIONS, with_slope

Apply = Callable[[int, Tensor], Tensor]
Norm = tuple[Tensor, Tensor]
Run = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]
NORM_EPS = 1e-6

Activate = Callable[[str, Tensor], tuple[Tensor, Tensor | None]]
"""An activation by name and the pre-activations: the hidden units and, where they are asked for, their slopes."""


def _without_slope(activation: str, h: Tensor) -> tuple[Tensor, None]:
    return ACTIVATIONS[activation](h), None


@dataclass(frozen=True)
class Trace:
    """One pass at fixed weights. ``inputs[l]``: what matrix l multiplies (un-lifted where it is lifted); ``hidden``:
    what ``back`` needs of the hidden units, as the network says; ``body``: before norm and residual; all
    ``[..., time, width]``; ``prediction`` ``[..., time, dim]``."""

    prediction: Tensor
    inputs: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    body: Tensor


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What all networks share: x + LN(body(x))."""

    residual: bool = True
    norm: bool = False

    def forward(self, apply: Apply, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Prediction ``[..., time, dim]`` for x ``[..., time, dim]``; ``norm``: gain and shift ``[heads, dim]``."""
        return self._end(x, self.run(apply, x, _without_slope)[0], norm)

    def trace(self, apply: Apply, x: Tensor, norm: Norm | None = None) -> Trace:
        """As ``forward``, keeping what the gradients need."""
        body, inputs, hidden = self.run(apply, x, with_slope)
        return Trace(self._end(x, body, norm), inputs, hidden, body)

    def _end(self, x: Tensor, body: Tensor, norm: Norm | None) -> Tensor:
        out = _layer_norm(body, norm) if self.norm else body
        return x + out if self.residual else out

    def deltas(
        self, weights: Sequence[Tensor], trace: Trace, error: Tensor, norm: Norm | None = None
    ) -> tuple[Tensor, ...]:
        """dl / d (W_l f_l) for every matrix, from ``error`` = dl / d prediction ``[..., time, dim]``."""
        return self.back(weights, trace, _layer_norm_vjp(trace.body, norm, error) if self.norm else error)

    def gains(self, weights: Sequence[Tensor], trace: Trace, norm: Norm | None = None) -> tuple[Tensor, ...]:
        """Bounds on |d prediction / d (W_l f_l)|^2, each ``[..., time]``."""
        end = torch.ones_like(trace.body[..., 0])
        if self.norm:  # the Jacobian of a layer norm is gain / std times a projection
            end = 1.0 / (trace.body.var(-1, correction=0) + NORM_EPS)
            if norm is not None:
                end = end * norm[0].square().amax(-1)[..., None]
        return self.reach(weights, trace, end)

    def run(self, apply: Apply, x: Tensor, activate: Activate) -> Run:
        """body(x), the inputs of the matrices, and ``Trace.hidden`` where ``activate`` gives slopes."""
        raise NotImplementedError

    def back(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """``deltas`` from the error at the body."""
        raise NotImplementedError

    def reach(self, weights: Sequence[Tensor], trace: Trace, end: Tensor) -> tuple[Tensor, ...]:
        """``gains`` from that of the ending."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(Ending):
    """M(x) = W phi(x), a matrix memory."""

    residual: bool = False

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x)."""
        return (True,)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        return ((dim, features),)

    def run(self, apply: Apply, x: Tensor, activate: Activate) -> Run:
        """See ``Ending``."""
        return apply(0, x), (x,), ()

    def back(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """See ``Ending``."""
        return (error,)

    def reach(self, weights: Sequence[Tensor], trace: Trace, end: Tensor) -> tuple[Tensor, ...]:
        """See ``Ending``."""
        return (end,)


@dataclass(frozen=True)
class MLP(Ending):
    """M(x) = x + W_L sigma(... sigma(W_1 phi(x))): ``depth`` matrices of width ``expansion * dim``.

    ATLAS Eq. 42 is depth 2, with our W_1 and W_2 called W_2 and W_1. ``bias``: the hidden layers' outputs are followed
    by a constant 1, so that the matrices after the first carry a bias as their last column.
    """

    depth: int = 2
    expansion: int = 4
    bias: bool = False
    activation: str = "gelu"

    def __post_init__(self) -> None:
        _check(self, "depth", "expansion")

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x): the first."""
        return (True,) + (False,) * (self.depth - 1)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        width = self.expansion * dim
        rows = [width] * (self.depth - 1) + [dim]
        columns = [features] + [width + self.bias] * (self.depth - 1)
        return tuple(zip(rows, columns, strict=True))

    def run(self, apply: Apply, x: Tensor, activate: Activate) -> Run:
        """See ``Ending``; the slopes of every hidden layer."""
        inputs, hidden = [x], []
        out = apply(0, x)
        for layer in range(1, self.depth):
            u, slope = activate(self.activation, out)
            hidden += [] if slope is None else [slope]
            inputs.append(F.pad(u, (0, 1), value=1.0) if self.bias else u)
            out = apply(layer, inputs[-1])
        return out, tuple(inputs), tuple(hidden)

    def back(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """See ``Ending``."""
        out = [error]
        for layer in range(self.depth - 1, 0, -1):
            slope = trace.hidden[layer - 1]
            out.append((out[-1] @ weights[layer][..., : slope.shape[-1]]) * slope)
        return tuple(reversed(out))

    def reach(self, weights: Sequence[Tensor], trace: Trace, end: Tensor) -> tuple[Tensor, ...]:
        """|J_l|^2 <= |W_{l+1} diag(slope_l)|_F^2 |J_{l+1}|^2, J_l = d prediction / d (W_l f_l)."""
        out = [end]
        for layer in range(self.depth - 1, 0, -1):
            slope = trace.hidden[layer - 1]
            columns = weights[layer][..., : slope.shape[-1]].square().sum(-2)  # squared column norms
            out.append(out[-1] * (slope.square() * columns[..., None, :]).sum(-1))
        return tuple(reversed(out))


@dataclass(frozen=True)
class GatedMLP(Ending):
    """M(x) = x + W_2 (sigma(W_0 phi(x)) * (W_1 phi(x))), hidden width ``expansion * dim`` (ATLAS++, Eq. 43,
    where W_0, W_1, W_2 are called W_2, W_3, W_1; LaCT's SwiGLU memory with SiLU and no residual)."""

    expansion: int = 4
    activation: str = "gelu"

    def __post_init__(self) -> None:
        _check(self, "expansion")

    @property
    def lifted(self) -> tuple[bool, ...]:
        """Which matrices multiply phi(x): both of the hidden layer."""
        return (True, True, False)

    def shapes(self, features: int, dim: int) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of every matrix, for phi of length ``features`` and heads of ``dim``."""
        width = self.expansion * dim
        return ((width, features), (width, features), (dim, width))

    def run(self, apply: Apply, x: Tensor, activate: Activate) -> Run:
        """See ``Ending``; slope * value, and the activated gate."""
        gate, value = apply(0, x), apply(1, x)
        opened, slope = activate(self.activation, gate)
        inner = opened * value
        return apply(2, inner), (x, x, inner), () if slope is None else (slope * value, opened)

    def back(self, weights: Sequence[Tensor], trace: Trace, error: Tensor) -> tuple[Tensor, ...]:
        """See ``Ending``."""
        to_gate, to_value = trace.hidden
        inner = error @ weights[2]
        return inner * to_gate, inner * to_value, error

    def reach(self, weights: Sequence[Tensor], trace: Trace, end: Tensor) -> tuple[Tensor, ...]:
        """See ``Ending``."""
        columns = weights[2].square().sum(-2)[..., None, :]
        to_gate, to_value = ((x.square() * columns).sum(-1) for x in trace.hidden)
        return end * to_gate, end * to_value, end


Network = Linear | MLP | GatedMLP


def _layer_norm(x: Tensor, norm: Norm | None) -> Tensor:
    out = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    return out if norm is None else out * norm[0][..., None, :] + norm[1][..., None, :]


def _layer_norm_vjp(x: Tensor, norm: Norm | None, error: Tensor) -> Tensor:
    """The error at the input of a layer norm from that at its output."""
    error = error if norm is None else error * norm[0][..., None, :]
    centred = x - x.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    unit = centred * inverse
    return inverse * (error - error.mean(-1, keepdim=True) - unit * (error * unit).mean(-1, keepdim=True))


def _check(network: MLP | GatedMLP, *sizes: str) -> None:
    for name in sizes:
        value = getattr(network, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(network).__name__} {name} must be an integer >= 1, got {value!r}")
    if network.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"{type(network).__name__} activation must be one of {known}, got {network.activation!r}")
