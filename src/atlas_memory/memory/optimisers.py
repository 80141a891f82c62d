"""The inner optimiser: how a gradient of the window's loss becomes a step of the memory.

All are instances of one recurrence, per matrix, with g_t the gradient of the windowed bias at the frozen memory:

    S_t = theta_t S_{t-1} + a_t g_t            W_t = alpha_t W_{t-1} - e_t O(S_t)

    gradient descent   theta = 0, a = 1,   e = eta,  O = identity            (ATLAS Eq. 10, 19; DeltaNet)
    momentum           theta,     a = eta, e = 1,    O = identity            (ATLAS Eqs. 12-13; Titans Eqs. 13-14)
    Muon               theta,     a = 1,   e = eta,  O = Newton-Schulz       (ATLAS Eqs. 32-33)
    delta              theta = 0, a = 1,   e = eta,  O = identity, and -e_t W_{t-1} f_t f_t^T besides  (see there)

S accumulates plus the gradient and W subtracts: ATLAS's Table 1 prints an ascent. Letters: eta is the step size and
theta the momentum decay, as in ATLAS; Titans swaps the two. Newton-Schulz ignores scale, so eta stands outside.

**Bounded steps.** A deep memory under plain gradient descent explodes with the usual step sizes, the more so as b
gradients are taken at one frozen memory. Gradient descent and momentum therefore use, unless ``bounded=False``,

    eta~_t = eta_t / (1 + eta_t L_t),    L_t = b lambda_t [/ (1 - theta_t + 1/b) with momentum],

where lambda_t bounds the largest eigenvalue of the Gauss-Newton Hessian of the window's loss at the frozen memory, so
that eta~ * lambda < 1/b whatever the gates, keys and weights are. It has the form of the implicit step of Nested
Learning, Eqs. 56-57. Muon's step has spectral norm about eta by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Rates(NamedTuple):
    """theta ``[batch, heads, time]``; a (write) and e (apply) of the recurrence above, shaped so too or, where eta is
    channel-wise, ``[batch, heads, time, dim]``."""

    theta: Tensor
    write: Tensor
    apply: Tensor


@dataclass(frozen=True)
class GradientDescent:
    """W_t = alpha_t W_{t-1} - eta~_t g_t."""

    bounded: bool = True

    has_momentum = False
    accumulators = 0
    every = 1

    def rates(self, theta: Tensor, eta: Tensor, curvature: Tensor, reach: Tensor, chunk: int) -> Rates:
        """``curvature`` is lambda_t, ``reach`` |f_t|^2 over all matrices, ``[batch, heads, time]``; ``chunk`` is b."""
        step = _implicit(eta, chunk * curvature) if self.bounded else eta
        return Rates(torch.zeros_like(theta), torch.ones_like(eta), step)


@dataclass(frozen=True)
class DeltaGradientDescent:
    """W_t = W_{t-1} (alpha_t I - e_t f_t f_t^T) - e_t g_t, with f_t the matrix's input and g_t its gradient: what stood
    under the key is taken out before the new is written (Nested Learning, Eqs. 57 and 88).

    The first factor acts on the memory as it is now, not on the frozen one: with the dot-product bias, where
    g_t = -v_t k_t^T, this is the delta rule to the letter at any chunk size. ``after_decay`` takes out of what alpha
    left, W_{t-1} alpha_t (I - e_t f_t f_t^T): Gated DeltaNet's order. For windows of one token.

    ``bounded``: e = eta / (1 + eta (b lambda + |f|^2)), as for gradient descent, and never beyond what stands under f
    (Eq. 57 for inputs of any length); otherwise e = eta, which unit keys keep stable up to eta = 2 where g does not
    depend on the memory.
    """

    bounded: bool = True
    after_decay: bool = False

    has_momentum = False
    accumulators = 0
    every = 1

    def rates(self, theta: Tensor, eta: Tensor, curvature: Tensor, reach: Tensor, chunk: int) -> Rates:
        """``curvature`` is lambda_t, ``reach`` |f_t|^2 over all matrices, ``[batch, heads, time]``; ``chunk`` is b."""
        step = _implicit(eta, chunk * curvature + reach) if self.bounded else eta
        return Rates(torch.zeros_like(theta), torch.ones_like(eta), step)


@dataclass(frozen=True)
class Momentum:
    """S_t = theta_t S_{t-1} + eta~_t g_t;  W_t = alpha_t W_{t-1} - S_t."""

    bounded: bool = True

    has_momentum = True
    accumulators = 1
    every = 1

    def rates(self, theta: Tensor, eta: Tensor, curvature: Tensor, reach: Tensor, chunk: int) -> Rates:
        """``curvature`` is lambda_t ``[batch, heads, time]``, ``chunk`` is b; ``reach`` plays no part."""
        step = _implicit(eta, chunk * curvature / (1.0 - theta + 1.0 / chunk)) if self.bounded else eta
        return Rates(theta, step, torch.ones_like(eta))


@dataclass(frozen=True)
class Muon:
    """S_t = theta_t S_{t-1} + g_t;  W_t = alpha_t W_{t-1} - eta_t NS_steps(S_t), a matrix at a time.

    ``every = r`` applies the step only at tokens r - 1, 2r - 1, ... of the sequence; alpha and theta act at all.
    ``every = 1`` is the paper's Eq. 40; None is once a chunk, at its end, what LaCT does.

    ``precise`` works float32 inputs in float64 within a call. Newton-Schulz multiplies small directions of S by up to
    3.4445^5 = 485, rounding errors among them, so in float32 two exact forms differ by 1e-5 to 1e-3 of their output:
    noise that training does not feel (``precise=False`` is up to three times faster on a CPU), but reproduction does.

    ``horizon="chunk"``: at a chunk's end the momentum forgets all that is older than this chunk, so that S_t sums the
    gradients of its own chunk and of the one before, weighted as ever: between b and 2 b tokens. What is cut off
    weighs at most theta^b. S_t then is a sum over few tokens at any time, and ``chunkwise`` orthogonalises in the space
    of these tokens where both sides of a matrix are longer (muon_steps.py). None, the paper's, never forgets. In the
    recurrence, with two accumulators a matrix,

        S^old_t = theta_t S^old_{t-1},   S^new_t = theta_t S^new_{t-1} + g_t,   S_t = S^old_t + S^new_t,

    and after a chunk's last token S^old = S^new, S^new = 0.
    """

    steps: int = 5
    every: int | None = 1
    precise: bool = True
    horizon: str | None = None

    has_momentum = True
    bounded = False

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            value = getattr(self, name)
            if not (value is None and name == "every") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Muon {name} must be an integer >= 1, got {value!r}")
        if self.horizon not in (None, "chunk"):
            raise ValueError(f"Muon horizon must be None or 'chunk', got {self.horizon!r}")

    @property
    def accumulators(self) -> int:
        """How many sums a matrix's momentum is kept in."""
        return 1 if self.horizon is None else 2

    def rates(self, theta: Tensor, eta: Tensor, curvature: Tensor, reach: Tensor, chunk: int) -> Rates:
        """``curvature``, ``reach`` and ``chunk`` play no part: the step's length is eta."""
        return Rates(theta, torch.ones_like(eta), eta)


def _implicit(eta: Tensor, stiffness: Tensor) -> Tensor:
    stiffness = stiffness[..., None] if eta.dim() > stiffness.dim() else stiffness
    return eta / (1.0 + eta * stiffness)


Optimiser = GradientDescent | DeltaGradientDescent | Momentum | Muon
