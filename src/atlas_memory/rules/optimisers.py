"""The inner optimiser: how a gradient of the window's loss becomes a step of the memory.

All are instances of one recurrence, per matrix, with g_t the gradient of the windowed bias at the frozen memory:

    S_t = theta_t S_{t-1} + a_t g_t            W_t = alpha_t W_{t-1} - e_t O(S_t)

    gradient descent   theta = 0, a = 1,   e = s,    O = identity            (ATLAS Eq. 10, 19; DeltaNet)
    momentum           theta,     a = s,   e = 1,    O = identity            (ATLAS Eqs. 12-13; Titans Eqs. 13-14)
    Muon               theta,     a = s,   e = 1,    O = Newton-Schulz of [S, L I]  (ATLAS Eqs. 57-58; see ``Muon``)
    delta              theta = 0, a = 1,   e = s,    O = identity, and e_t W_{t-1} f_t f_t^T is subtracted besides
                                                     (see ``DeltaGradientDescent``)

Each optimiser says with a_t and e_t whether the step size s_t weighs a gradient as it enters the sum S or the step that
is made of S; O is what becomes of S on the way, and f_t is the input of the matrix. Gradients are added to S, and steps
subtracted from W: ATLAS's Table 1 prints signs that would climb. eta is the gate of the step size and theta the decay
of the momentum, as in ATLAS; Titans has the two letters the other way round.

Two things are the library's and no paper's: the step size s_t is bounded by what the step changes, and the errors in
g_t are taken at what the memory's last matrix answers now. ``normalised=False`` is the printed s_t = eta_t, and
``online=False`` the printed gradient at the frozen memory. step.py says how both are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gates import pick, rows
from .step import InnerOptimiser, Rates, Sums, TokenGates, over
from .validation import LARGEST, MOST, check_positive, check_size


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
    """W_t = W_{t-1} (alpha_t I - s_t f_t f_t^T) - s_t g_t, with f_t the matrix's input and g_t its gradient: what the
    matrix answered to this input is taken out before the new is written (Nested Learning, Eqs. 57 and 88).

    What is taken out is taken from the matrix as it is now, not from the frozen one. With the dot-product bias, where
    g_t = -v_t k_t^T, this is therefore the delta rule to the letter at any chunk size. With ``after_decay`` it is taken
    from what alpha has left of the matrix, W_{t-1} alpha_t (I - s_t f_t f_t^T), as in Gated DeltaNet. Only for windows
    of one token, whose gate gamma, where one is given, weighs what is taken out as it weighs g_t.

    Where steps are ``normalised``, lambda (step.py) has |f_t|^2 + FLOOR more, for what is taken out. Otherwise s = eta;
    with unit keys that is stable up to eta = 2, as long as g does not depend on the memory.
    """

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

    ATLAS prints S_t = theta_t S_{t-1} + g_t (Eq. 33) and W_t = alpha_t W_{t-1} - eta_t NS_steps(S_t) (Eq. 32). That is
    ``Muon(normalised=False)`` here. Its step has the length eta however little is left to learn. Where that is little,
    the direction of the step turns on the smallest differences: outer gradients grow with every step, and nothing but
    eta can keep a token from being written.

    ``normalised``, the default, has eta inside S, as the paper's second form has it (S_t in Eq. 58, W_t in Eq. 57). Two
    things are added to that form by the library. eta becomes the normalised step size s_t (step.py), and in place of S
    the wider matrix [S, L I] is orthogonalised, which has no singular value below the number L:

        S_t = theta_t S_{t-1} + s_t g_t,     W_t = alpha_t W_{t-1} - (S_t S_t^T / L^2 + I)^(-1/2) S_t,

    L is ``limit`` times the square root of the number of rows of the matrix, which is ``limit`` times the length of a
    column with entries of size 1. A singular value of S that is small against L is written as it is, as by momentum;
    one that is large comes to L. (Where the largest is tens of L, five iterations do not converge, and small ones are
    written smaller than they are.)

    ``steps`` are the iterations of Newton-Schulz; ``every`` says how often the memory makes a step. With ``every`` = n,
    a divisor of the chunk, it makes one only at tokens n - 1, 2n - 1, ..., counted from 0. ``every = 1`` is the paper's
    Eq. 40, Newton-Schulz after every token. None makes one step a chunk, at its end, as LaCT does. With
    ``read_pending`` the memory answers meanwhile as if the pending update S had been written without being
    orthogonalised: it is read with W_t - S_t, and just after a step with W_t.

    ``precise`` is for ``normalised=False``: float32 inputs are then computed in float64 within a call. The printed
    Newton-Schulz multiplies small directions of S by up to 3.4445^5 = 485, and rounding errors with them. In float32
    two forms that are exact in theory therefore differ by 1e-5 to 1e-3 of their output. Training does not feel that,
    and ``precise=False`` is up to three times as fast on a CPU; but two runs could not be compared to the last digits.
    Normalised steps make nothing larger, and need no more than float32.

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
        for name in ("steps", "every"):
            value = getattr(self, name)
            if not (value is None and name == "every"):
                check_size(f"Muon {name}", value, MOST if name == "steps" else LARGEST)
        check_positive("Muon limit", self.limit)
        if self.read_pending and not self.normalised:
            raise ValueError("Muon read_pending=True needs normalised=True: with raw steps S has no measure that W has")

    @property
    def in_float64(self) -> bool:
        """Where steps are raw, rounding errors would be multiplied."""
        return self.precise and not self.normalised

    @property
    def is_online(self) -> bool:
        """``online``, but only where steps are normalised: else there is no size s_t for the plain steps that errors
        see."""
        return self.online and self.normalised

    def sums(self, online: bool) -> int:
        """S; where errors are online also D, what the chunk's gradients would have changed by plain steps (step.py)."""
        return 2 if online else 1

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        changed = tuple(rows(at.alpha, d) + rows(at.plain, g) for d in sums[1:] if at.plain is not None)
        return (s, *changed), rows(at.apply, self.direction(s, at.orthogonalise, at.saturate))

    def direction(
        self, s: Tensor, orthogonalise: Callable[[Tensor, int], Tensor], saturate: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """O(S), the step for the sum S ``[..., rows, columns]``, of the same shape."""
        most = self.most(s.shape[-2])
        return most * saturate(s / most, self.steps) if self.normalised else orthogonalise(s, self.steps)

    def most(self, rows: int) -> float:
        """L, the largest singular value that a normalised step of a matrix with so many rows can have."""
        return self.limit * rows**0.5

    def end_chunk(self, sums: Sums) -> Sums:
        """S goes on, and D is zero again: no token of the next chunk has changed anything yet."""
        return (sums[0], *map(torch.zeros_like, sums[1:]))

    def readout_weights(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """W_t; or with ``read_pending`` W_t - S_t, except just after a step."""
        return pick(stepped, weights, weights - sums[0]) if self.read_pending else weights

    def chunk_change(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """-D, what the chunk's gradients would have changed by plain steps."""
        return -sums[-1]

    def largest_step(self, every: int, chunk: int) -> float:
        """1. Where steps are raw, each is as long as eta, and those of a chunk may add up to 1."""
        return 1.0 if self.normalised else min(1.0, every / chunk)

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """Normalised: theta, a = s (1 - theta) and e = 1, so that eta weighs what goes into S. Otherwise a = 1, and e
        is eta, which is the length of what comes out."""
        if size is None:
            return Rates(theta, torch.ones_like(eta), eta)
        plain = over(eta, size) if self.is_online else over(eta, size) / chunk
        return Rates(theta, plain * (1.0 - theta), torch.ones_like(eta), plain)


Optimiser = GradientDescent | DeltaGradientDescent | Momentum | Muon
