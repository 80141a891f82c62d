"""The inner optimiser: how a gradient of the window's loss becomes a step of the memory.

All are instances of one recurrence, per matrix, with g_t the gradient of the windowed bias at the frozen memory:

    S_t = theta_t S_{t-1} + a_t g_t            W_t = alpha_t W_{t-1} - e_t O(S_t)

    gradient descent   theta = 0, a = 1,   e = s,    O = identity            (ATLAS Eq. 10, 19; DeltaNet)
    momentum           theta,     a = s,   e = 1,    O = identity            (ATLAS Eqs. 12-13; Titans Eqs. 13-14)
    Muon               theta,     a = s,   e = 1,    O = Newton-Schulz of [S, L I]  (ATLAS Eqs. 57-58; see there)
    delta              theta = 0, a = 1,   e = s,    O = identity, and -e_t W_{t-1} f_t f_t^T besides  (see there)

S accumulates plus the gradient and W subtracts: ATLAS's Table 1 prints an ascent. Letters: eta is the step size and
theta the momentum decay, as in ATLAS; Titans swaps the two.

Where gradients are taken, and how s bounds a step: step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gates import pick, rows
from .step import At, InnerOptimiser, Rates, Sums, over


@dataclass(frozen=True)
class GradientDescent(InnerOptimiser):
    """W_t = alpha_t W_{t-1} - s_t g_t."""

    bounded: bool = True
    live: bool = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """See ``InnerOptimiser``."""
        return sums, rows(at.apply, g)


@dataclass(frozen=True)
class DeltaGradientDescent(InnerOptimiser):
    """W_t = W_{t-1} (alpha_t I - s_t f_t f_t^T) - s_t g_t, with f_t the matrix's input and g_t its gradient: what stood
    under the key is taken out before the new is written (Nested Learning, Eqs. 57 and 88).

    The first factor acts on the memory as it is now, not on the frozen one: with the dot-product bias, where
    g_t = -v_t k_t^T, this is the delta rule to the letter at any chunk size. ``after_decay`` takes out of what alpha
    left, W_{t-1} alpha_t (I - s_t f_t f_t^T): Gated DeltaNet's order. For windows of one token.

    ``bounded``: lambda has |f_t|^2 besides, for what is taken out; otherwise s = eta, which unit keys keep stable up to
    eta = 2 where g does not depend on the memory.
    """

    bounded: bool = True
    after_decay: bool = False
    live: bool = True

    erases = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """See ``InnerOptimiser``."""
        stands = rows(at.alpha, weights) if self.after_decay else weights
        return sums, rows(at.apply, g + rows(at.gamma, at.under(stands)))


@dataclass(frozen=True)
class Momentum(InnerOptimiser):
    """S_t = theta_t S_{t-1} + s_t g_t;  W_t = alpha_t W_{t-1} - S_t."""

    bounded: bool = True
    live: bool = True

    has_momentum = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """See ``InnerOptimiser``."""
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        return (s,), s

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """As for all; bounded, with 1 - theta besides."""
        step = over(eta, None if size is None else size / (1.0 - theta).clamp_min(1e-6))
        return Rates(theta, step, torch.ones_like(eta))


@dataclass(frozen=True)
class Muon(InnerOptimiser):
    """S_t = theta_t S_{t-1} + g_t;  W_t = alpha_t W_{t-1} - eta_t NS_steps(S_t), a matrix at a time, is what ATLAS
    prints in Eqs. 32-33, and ``bounded=False`` here. Its step has length eta whatever is left to learn: where that is
    little its direction is chaos, outer gradients grow with every step, and nothing but eta can keep a token from being
    written.

    ``bounded``, the default, has eta inside, as the paper's Eqs. 57-58 have, within the bounded step s (step.py), and a
    floor under the singular values of S: [S, L I] is orthogonalised in place of S,

        S_t = theta_t S_{t-1} + s_t g_t,     W_t = alpha_t W_{t-1} - (S_t S_t^T / L^2 + I)^(-1/2) S_t,

    with L the ``limit`` times the root of a matrix's rows: the length of a vector of entries of size 1. A singular
    value of S that is small against L is written as it is, as by momentum; one that is large comes to L. (Where the
    largest is tens of L, five steps do not converge, and small ones are written smaller.)

    ``every = r``, a divisor of the chunk, applies the step only at tokens r - 1, 2r - 1, ... of the sequence.
    ``every = 1`` is the paper's Eq. 40, Newton-Schulz after every token; None is once a chunk, at its end, what LaCT
    does. ``shows``: what waits for its step answers meanwhile, as if it were written as it is: what is read is
    W_t - S_t, and W_t after a step.

    ``precise``, for ``bounded=False``, works float32 inputs in float64 within a call. The printed Newton-Schulz
    multiplies small directions of S by up to 3.4445^5 = 485, rounding errors among them, so in float32 two exact forms
    differ by 1e-5 to 1e-3 of their output: noise that training does not feel (``precise=False`` is up to three times
    faster on a CPU), but reproduction does. Bounded steps make nothing larger, and need no more than float32.
    """

    steps: int = 5
    every: int | None = 1
    precise: bool = True
    bounded: bool = True
    live: bool = True
    limit: float = 1.0
    shows: bool = False

    has_momentum = True
    waits = True
    whole = True

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            value = getattr(self, name)
            if not (value is None and name == "every") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Muon {name} must be an integer >= 1, got {value!r}")
        if not self.limit > 0:
            raise ValueError(f"Muon limit must be > 0, got {self.limit!r}")
        if self.shows and not self.bounded:
            raise ValueError("Muon shows=True is for bounded steps: where they are not, S has no measure that W has")

    @property
    def in_float64(self) -> bool:
        """Where rounding errors would be multiplied."""
        return self.precise and not self.bounded

    @property
    def sees(self) -> bool:
        """Where steps are bare, what they change has no measure that an error could see."""
        return self.live and self.bounded

    def sums(self, live: bool) -> int:
        """S; and where errors are live what the chunk's gradients would have changed by plain steps."""
        return 2 if live else 1

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """See ``InnerOptimiser``."""
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        changed = tuple(rows(at.alpha, d) + rows(at.plain, g) for d in sums[1:] if at.plain is not None)
        return (s, *changed), rows(at.apply, self.direction(s, at.orthogonalise, at.saturate))

    def direction(
        self, s: Tensor, orthogonalise: Callable[[Tensor, int], Tensor], saturate: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """O(S), ``[..., rows, columns]``."""
        most = self.most(s.shape[-2])
        return most * saturate(s / most, self.steps) if self.bounded else orthogonalise(s, self.steps)

    def most(self, rows: int) -> float:
        """L of a matrix with so many rows."""
        return self.limit * rows**0.5

    def turn(self, sums: Sums) -> Sums:
        """No token of the next chunk has changed anything yet."""
        return (sums[0], *map(torch.zeros_like, sums[1:]))

    def shown(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """W_t, or with ``shows`` W_t - S_t, but where a step has been taken."""
        return pick(stepped, weights, weights - sums[0]) if self.shows else weights

    def written(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """What the chunk's gradients would have changed by plain steps."""
        return -sums[-1]

    def largest_step(self, every: int, chunk: int) -> float:
        """Bare steps have the length eta each: those of a chunk then add up to at most about 1."""
        return 1.0 if self.bounded else min(1.0, every / chunk)

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """As for the others. Bounded, eta weighs what goes into S; else it is the length of what comes out."""
        if size is None:
            return Rates(theta, torch.ones_like(eta), eta)
        plain = over(eta, size) if self.sees else over(eta, size) / chunk
        return Rates(theta, plain * (1.0 - theta), torch.ones_like(eta), plain)


Optimiser = GradientDescent | DeltaGradientDescent | Momentum | Muon
