"""The inner optimisers: how a gradient of the window's loss becomes a step of the memory.

All are one recurrence, per matrix, with g_t the gradient (step.py) and f_t the input of the matrix:

    S_t = theta_t S_{t-1} + a_t g_t            W_t = alpha_t W_{t-1} - e_t O(S_t)

    gradient descent   theta = 0, a = 1,   e = s,    O = identity            (ATLAS Eq. 10, 19; DeltaNet)
    momentum           theta,     a = s,   e = 1,    O = identity            (ATLAS Eqs. 12-13; Titans Eqs. 13-14)
    Muon               theta,     a = s,   e = 1,    O = Newton-Schulz of [S, L I]  (ATLAS Eqs. 57-58)
    delta              theta = 0, a = 1,   e = s,    O = identity, and e_t W_{t-1} f_t f_t^T is subtracted as well

Gradients are added to S, and steps subtracted from W: ATLAS's Table 1 prints signs that would climb. eta is the gate of
the step size and theta the decay of the momentum, as in ATLAS; Titans has the two letters the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gates import pick, rows
from .step import InnerOptimiser, Rates, Sums, TokenGates, over
from .validation import MOST, check_positive, check_size


@dataclass(frozen=True)
class GradientDescent(InnerOptimiser):
    """W_t = alpha_t W_{t-1} - s_t g_t."""

    normalised: bool = True
    online: bool = True

    supports_infinite_features = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        return sums, rows(at.apply, g)


@dataclass(frozen=True)
class DeltaGradientDescent(InnerOptimiser):
    """W_t = W_{t-1} (alpha_t I - s_t f_t f_t^T) - s_t g_t: the answer of the matrix to f_t is removed before the new is
    written (Nested Learning, Eqs. 57 and 88). Only for windows of one token.

    It is removed from W_{t-1}, not from the frozen matrix: with the dot-product bias this is the delta rule to the
    letter at any chunk size. With ``after_decay`` it is removed from what alpha has left, W_{t-1} alpha_t (I - s_t f_t
    f_t^T), as in Gated DeltaNet. A gate gamma weighs it as it weighs g_t. Normalised steps have |f_t|^2 + FLOOR more in
    lambda (step.py). Raw ones are stable up to eta = 2 with unit keys and a g that does not depend on the memory."""

    normalised: bool = True
    after_decay: bool = False
    online: bool = True

    erases = True
    supports_infinite_features = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        old = rows(at.alpha, weights) if self.after_decay else weights
        return sums, rows(at.apply, g + rows(at.gamma, at.along_key(old)))


@dataclass(frozen=True)
class Momentum(InnerOptimiser):
    """S_t = theta_t S_{t-1} + s_t g_t;  W_t = alpha_t W_{t-1} - S_t."""

    normalised: bool = True
    online: bool = True

    has_momentum = True
    supports_infinite_features = True

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        return (s,), s

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """theta, a = s and e = 1; where steps are normalised, s is multiplied by 1 - theta."""
        s = over(eta, None if size is None else size / (1.0 - theta).clamp_min(1e-6))
        return Rates(theta, s, torch.ones_like(eta))


@dataclass(frozen=True)
class Muon(InnerOptimiser):
    """Momentum whose steps are orthogonalised, a matrix at a time.

    ATLAS prints S_t = theta_t S_{t-1} + g_t (Eq. 33) and W_t = alpha_t W_{t-1} - eta_t NS_steps(S_t) (Eq. 32), here
    ``Muon(normalised=False)``. Its step has the length eta however little is left to learn, and outer gradients grow.
    ``normalised``, the default, has eta inside S (Eqs. 57-58), as a normalised step size s_t, and orthogonalises the
    wider matrix [S, L I], which has no singular value below L (both ours):

        S_t = theta_t S_{t-1} + s_t g_t,     W_t = alpha_t W_{t-1} - (S_t S_t^T / L^2 + I)^(-1/2) S_t,

    with L = ``limit`` times the square root of the number of rows. A singular value of S that is small against L is
    written as it is, one that is large comes to L.

    Args:
        steps: iterations of Newton-Schulz.
        every: a step is taken after every so many tokens, a divisor of the chunk: 1 is the paper's Eq. 40; None, one at
            the chunk's end, is LaCT's.
        precise: with ``normalised=False``, compute float32 inputs in float64: the printed Newton-Schulz multiplies
            rounding errors by up to 485. False is up to three times as fast on a CPU.
        normalised, online: see step.py.
        limit: L, over the root of the number of rows.
        read_pending: with ``every`` above 1, answer with W_t - S_t, except just after a step.

    Raises:
        ValueError: ``steps`` or ``every`` below 1 or not whole, a ``limit`` that is not above 0, or ``read_pending``
            where steps are raw.
    """

    steps: int = 5
    every: int | None = 1
    precise: bool = True
    normalised: bool = True
    online: bool = True
    limit: float = 1.0
    read_pending: bool = False

    has_momentum = True
    mixes_rows = True
    raw_eta = 0.25

    def __post_init__(self) -> None:
        check_size("Muon steps", self.steps, MOST)
        check_positive("Muon limit", self.limit)
        if self.read_pending and not self.normalised:
            raise ValueError("Muon read_pending=True needs normalised=True: with raw steps S has no measure that W has")

    @property
    def in_float64(self) -> bool:
        """Where steps are raw: rounding errors would be multiplied."""
        return self.precise and not self.normalised

    @property
    def is_online(self) -> bool:
        """``online``, where steps are normalised and D has a size s_t."""
        return self.online and self.normalised

    def sums(self, online: bool) -> int:
        """S; where errors are online also D, what gradient descent would have changed (step.py)."""
        return 2 if online else 1

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        changed = tuple(rows(at.alpha, d) + rows(at.plain, g) for d in sums[1:] if at.plain is not None)
        return (s, *changed), rows(at.apply, self.direction(s, at.orthogonalise, at.saturate))

    def direction(
        self, s: Tensor, orthogonalise: Callable[[Tensor, int], Tensor], saturate: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """O(S), shaped as S, ``[..., rows, columns]``."""
        most = self.most(s.shape[-2])
        return most * saturate(s / most, self.steps) if self.normalised else orthogonalise(s, self.steps)

    def most(self, rows: int) -> float:
        """L, the largest singular value of a normalised step of a matrix with so many rows."""
        return self.limit * rows**0.5

    def end_chunk(self, sums: Sums) -> Sums:
        """S, and D at zero again."""
        return (sums[0], *map(torch.zeros_like, sums[1:]))

    def readout_weights(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """W_t; or with ``read_pending`` W_t - S_t, except just after a step."""
        return pick(stepped, weights, weights - sums[0]) if self.read_pending else weights

    def chunk_change(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """-D (step.py)."""
        return -sums[-1]

    def largest_step(self, every: int, chunk: int) -> float:
        """1; where steps are raw, as long as eta each, those of a chunk add up to 1."""
        return 1.0 if self.normalised else min(1.0, every / chunk)

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """Normalised: a = s (1 - theta) and e = 1. Raw: a = 1 and e = eta."""
        if size is None:
            return Rates(theta, torch.ones_like(eta), eta)
        plain = over(eta, size) if self.is_online else over(eta, size) / chunk
        return Rates(theta, plain * (1.0 - theta), torch.ones_like(eta), plain)


Optimiser = GradientDescent | DeltaGradientDescent | Momentum | Muon
