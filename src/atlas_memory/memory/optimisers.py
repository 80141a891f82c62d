"""The inner optimiser: how a gradient of the window's loss becomes a step of the memory.

All are instances of one recurrence, per matrix, with g_t the gradient of the windowed bias at the frozen memory:

    S_t = theta_t S_{t-1} + a_t g_t            W_t = alpha_t W_{t-1} - e_t O(S_t)

    gradient descent   theta = 0, a = 1,   e = s,    O = identity            (ATLAS Eq. 10, 19; DeltaNet)
    momentum           theta,     a = s,   e = 1,    O = identity            (ATLAS Eqs. 12-13; Titans Eqs. 13-14)
    Muon               theta,     a = s,   e = 1,    O = Newton-Schulz at the length of S  (ATLAS Eqs. 57-58)
    delta              theta = 0, a = 1,   e = s,    O = identity, and -e_t W_{t-1} f_t f_t^T besides  (see there)

S accumulates plus the gradient and W subtracts: ATLAS's Table 1 prints an ascent. Letters: eta is the step size and
theta the momentum decay, as in ATLAS; Titans swaps the two.

**Where gradients are taken.** ATLAS (Eqs. 15-16) takes the b gradients of a chunk at the memory frozen at its start, so
that they cannot see one another's writes; Titans prints the gradient at M_{t-1}. ``live``, the default, lies between:
the body of a memory is linear in its last matrix, and each error is taken at what that matrix predicts as it stands,
W_{t-1}, and sent back through the frozen memory. With f the last matrix's input at the frozen memory,

    error_t = d bias / d body at M_f  +  r_t (W_{t-1} - W_f) f_t,

where r_t bounds how fast the error grows with the body: for L2 without a layer norm it is 2, exactly; for the other
biases and under a layer norm the bound of their curvature; 0 for the dot product, whose error is the value. The errors
of a chunk then solve one triangular system (live.py), as those of the delta rule do. ``live=False`` is the frozen
gradient. With chunk = 1 the two are one for every bias.

The steps of Muon are no sums of writes. Under it the errors see what the chunk's gradients would have changed by plain
steps, D_t = alpha_t D_{t-1} + s_t g_t from zero at the chunk's start: -D_{t-1} f_t in place of (W_{t-1} - W_f) f_t. For
one key that is what Muon's steps come to, whenever they are taken.

**Bounded steps.** A step is measured by what it changes. With lambda_l,t a bound on how far a unit step of matrix l
moves the error at the token's own key, r_t (|J_l|^2 + FLOOR) (|f_l|^2 + FLOOR), matrix l makes the step

    s_l,t = share_l eta_t / (lambda_l,t + sum over older window tokens of gamma_i^(t) lambda_l,i),

so that the effect of a write goes to zero with eta, and eta = 1 moves the answer most of the way. The shares are 0.9
for the last matrix and 0.1 for those before together. Equal keys then cannot diverge, at any chunk: the last matrix's
writes see one another, and so its errors shrink by 1 - 0.9 eta at each; their sum is at most 1 / (0.9 eta) errors, of
which the other matrices, which do not see theirs, make at most 0.1 eta / (0.9 eta) = 1/9. (To first order in the
earlier matrices, for L2 without a layer norm and without what the delta step takes out; what is left elsewhere was
measured, docs/choices.md.) Momentum has (1 - theta) besides, which makes its sum over time one step. Muon has
1 - theta^r, for a step every r tokens; and 1 / b with a horizon, where errors see nothing of the chunk.
``bounded=False`` is the printed s = eta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .gates import rows
from .orthogonal import kept_length, orthogonalise

FLOOR = 0.05
"""What is added to the squared lengths that bound a step: where an input, or what a matrix can do to the body, is
shorter than about a fifth, it is not written at full strength; else a memory that has faded would be written with giant
steps."""


class Rates(NamedTuple):
    """theta ``[batch, heads, time]``; a (write) and e (apply) of the recurrence above for one matrix, shaped so too or,
    where eta is channel-wise, ``[batch, heads, time, dim]``."""

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None = None
    """The step s_t of gradient descent, where the errors of the chunk see what that would have changed (``Muon``)."""


class At(NamedTuple):
    """Token t, as one matrix of the memory meets it; leading dimensions, if there are any, are carried along.

    Attributes:
        theta, write, apply, plain: of ``Rates``, ``[...]`` or a channel ``[..., dim]``.
        alpha: the retention gate, shaped as eta.
        gamma: the window gate of the token itself, ``[...]``.
        under: W -> W f_t f_t^T, what a matrix holds under the token's input.
        orthogonalise: S, steps -> NS(S).
    """

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None
    alpha: Tensor
    gamma: Tensor
    under: Callable[[Tensor], Tensor]
    orthogonalise: Callable[[Tensor, int], Tensor] = orthogonalise


Sums = tuple[Tensor, ...]


class InnerOptimiser:
    """What inner optimisers share. A new one needs ``step``, and ``has_momentum`` where it reads theta."""

    bounded: bool
    live: bool

    has_momentum = False
    """Whether there is a running sum S, and a gate theta by which it fades."""
    every: int | None = 1
    """A step is taken after every so many tokens; None: at the end of a chunk."""
    erases = False
    """Whether a step takes out what stood under the key, besides the gradient."""
    waits = False
    """Whether what is written waits in S for the next step."""
    turns = False
    """Whether the sums are others after the last token of a chunk (``turn``)."""
    whole = False
    """Whether matrices are stepped whole, so that gates are one a head and what is orthogonalised has entries."""
    precise = False
    """Whether float32 inputs are worked in float64."""

    @property
    def sees(self) -> bool:
        """Whether the errors of a chunk see its earlier writes."""
        return self.live

    def sums(self, live: bool) -> int:
        """In how many sums S is kept, all zero at first, for a rule whose errors are live or not."""
        return int(self.has_momentum)

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """The sums after token t, and the step that the memory makes if one is due.

        Args:
            sums: before the token, and weights: W_{t-1}; each ``[..., rows, columns]``, as is the gradient g.
        """
        raise NotImplementedError

    def turn(self, sums: Sums) -> Sums:
        """The sums after the last token of a chunk."""
        return sums

    def written(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """What the chunk has changed so far, as its errors see it."""
        return weights - frozen

    def largest_step(self, every: int, chunk: int) -> float:
        """What the gate eta should not exceed."""
        return 1.0

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """``size`` is the denominator of a bounded step over the matrix's share, ``[batch, heads, time]``; a step is
        taken after ``every`` so many tokens of a ``chunk``."""
        return Rates(torch.zeros_like(theta), torch.ones_like(eta), _over(eta, size))


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
        step = _over(eta, None if size is None else size / (1.0 - theta).clamp_min(1e-6))
        return Rates(theta, step, torch.ones_like(eta))


@dataclass(frozen=True)
class Muon(InnerOptimiser):
    """S_t = theta_t S_{t-1} + g_t;  W_t = alpha_t W_{t-1} - eta_t NS_steps(S_t), a matrix at a time, is what ATLAS
    prints in Eqs. 32-33, and ``bounded=False`` here. Its step has length eta whatever is left to learn: where that is
    little its direction is chaos, outer gradients grow with every step, and nothing but eta can keep a token from being
    written.

    ``bounded``, the default, has eta inside, as the paper's Eqs. 57-58 have, where it is a step of the length described
    above, and gives the orthogonalised S the length that S has along it:

        S_t = theta_t S_{t-1} + s_t g_t,     W_t = alpha_t W_{t-1} - c_t NS(S_t),   c_t = <S_t, NS(S_t)> / |NS(S_t)|^2.

    The factor of s_t beside the bounded step is 1 - theta_t^r, for steps after every r tokens.

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
    bounded: bool = True
    live: bool = True

    has_momentum = True
    waits = True
    turns = True
    whole = True

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            value = getattr(self, name)
            if not (value is None and name == "every") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Muon {name} must be an integer >= 1, got {value!r}")
        if self.horizon not in (None, "chunk"):
            raise ValueError(f"Muon horizon must be None or 'chunk', got {self.horizon!r}")

    @property
    def sees(self) -> bool:
        """Whether errors see the chunk: not with a horizon, whose fast form has no room for a window's pairs."""
        return self.live and self.bounded and self.horizon is None

    def sums(self, live: bool) -> int:
        """With a horizon S is kept as S^old and S^new. Where errors are live the second is no part of S: it is what
        the chunk's gradients would have changed by plain steps."""
        return 2 if self.horizon is not None or live else 1

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: At) -> tuple[Sums, Tensor]:
        """See ``InnerOptimiser``."""
        if self.horizon is not None:
            old, new = rows(at.theta, sums[0]), rows(at.theta, sums[1]) + rows(at.write, g)
            return (old, new), rows(at.apply, self._direction(old + new, at))
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        changed = tuple(rows(at.alpha, d) + rows(at.plain, g) for d in sums[1:] if at.plain is not None)
        return (s, *changed), rows(at.apply, self._direction(s, at))

    def _direction(self, s: Tensor, at: At) -> Tensor:
        return self.direction(s, at.orthogonalise(s, self.steps))

    def direction(self, s: Tensor, orthogonal: Tensor) -> Tensor:
        """O(S) of S and NS(S), ``[..., rows, columns]``."""
        return kept_length(s, orthogonal) * orthogonal if self.bounded else orthogonal

    def turn(self, sums: Sums) -> Sums:
        """With a horizon S^new takes the place of S^old; and no chunk has changed anything yet."""
        if len(sums) == 1:
            return sums
        s, new = sums
        return new if self.horizon is not None else s, torch.zeros_like(s)

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
        plain = _over(eta, size) if self.sees else _over(eta, size) / chunk
        return Rates(theta, plain * (1.0 - theta**every), torch.ones_like(eta), plain)


def _over(eta: Tensor, size: Tensor | None) -> Tensor:
    if size is None:
        return eta
    return eta / (size[..., None] if eta.dim() > size.dim() else size)


Optimiser = GradientDescent | DeltaGradientDescent | Momentum | Muon
