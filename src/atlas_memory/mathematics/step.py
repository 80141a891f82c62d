"""The inner step: where its gradients are taken, how long it may be, and what every inner optimiser must say.

**Where gradients are taken.** ATLAS (Eqs. 15-16) takes the b gradients of a chunk at the memory frozen at its start, so
that they cannot see one another's writes; Titans prints the gradient at M_{t-1}. ``live``, the default, lies between:
the body of a memory is linear in its last matrix, and each error is taken at what that matrix predicts as it stands,
W_{t-1}, and sent back through the frozen memory. With f the last matrix's input at the frozen memory,

    error_t = d bias / d body at M_f  +  r_t (W_{t-1} - W_f) f_t,

where r_t bounds how fast the error grows with the body: for L2 without a layer norm it is 2, exactly; for the other
biases and under a layer norm the bound of their curvature; 0 for the dot product, whose error is the value. The errors
of a chunk then solve one triangular system (forms/live.py), as those of the delta rule do. ``live=False`` is the frozen
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
measured, docs/choices.md.) Momentum and Muon have (1 - theta) besides, which makes the sum over time one step; Muon
1 / b where errors see nothing of the chunk (``live=False``). ``bounded=False`` is the printed s = eta.

**Steps that are not taken at every token.** ``every = r``, a divisor of the chunk, takes one after every r tokens, and
what is written waits in S. theta is the momentum from one step to the next: it acts once a step, at the token that
follows one, and is 1 at the others, so that all that waits is written alike. alpha acts at every token. r = 1 is what
is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .orthogonal import orthogonalise, saturate

FLOOR = 0.05
"""What is added to the squared lengths that bound a step: where an input, or what a matrix can do to the body, is
shorter than about a fifth, it is not written at full strength; else a memory that has faded would be written with giant
steps."""


class Rates(NamedTuple):
    """theta ``[batch, heads, time]``; a (write) and e (apply) of the recurrence in optimisers.py, for one matrix;
    shaped so too, or where eta is channel-wise, ``[batch, heads, time, dim]``."""

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
        orthogonalise, saturate: of S, and a number of steps; see orthogonal.py.
    """

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None
    alpha: Tensor
    gamma: Tensor
    under: Callable[[Tensor], Tensor]
    orthogonalise: Callable[[Tensor, int], Tensor] = orthogonalise
    saturate: Callable[[Tensor, int], Tensor] = saturate


Sums = tuple[Tensor, ...]


class InnerOptimiser:
    """What inner optimisers share. A new one is a frozen dataclass and needs ``step``, ``has_momentum`` where it reads
    theta or keeps sums, and ``rates`` where the step s, which bounds what a gradient writes, belongs elsewhere than in
    front of the step that is made. It is read token by token, unless forms/counterparts.py has a fast form of it."""

    bounded: bool = True
    """Whether the step is measured by what it changes; else it is eta."""
    live: bool = True
    """Whether errors see what the chunk has written."""
    has_momentum = False
    """Whether there is a running sum S, and a gate theta by which it fades."""
    every: int | None = 1
    """A step is taken after every so many tokens, a divisor of the chunk; None: at the end of a chunk."""
    erases = False
    """Whether a step takes out what stood under the key, besides the gradient."""
    after_decay = False
    """Whether it takes that out of what alpha left."""
    waits = False
    """Whether what is written waits in S for the next step."""
    turns = False
    """Whether the sums are others after the last token of a chunk: where there is a ``turn``."""
    shows = False
    """Whether the memory answers with what waits, too (``shown``)."""
    whole = False
    """Whether a step mixes the entries of a matrix, or needs them all: then eta and alpha are one a head, and there are
    no Exponential features, whose matrices have no entries."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.turns = cls.turn is not InnerOptimiser.turn

    @property
    def in_float64(self) -> bool:
        """Whether float32 inputs are worked in float64."""
        return False

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

    def shown(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """The matrix that answers; ``stepped``: whether a step has just been taken, of all rows or each ``[batch]``."""
        return weights

    def largest_step(self, every: int, chunk: int) -> float:
        """What the gate eta should not exceed."""
        return 1.0

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """theta (0 without momentum), a = 1 and e = s. ``size`` is the denominator of a bounded step over the matrix's
        share, ``[batch, heads, time]``, None where steps are not bounded; a step is taken after ``every`` so many
        tokens of a ``chunk``."""
        return Rates(theta if self.has_momentum else torch.zeros_like(theta), torch.ones_like(eta), over(eta, size))


def over(eta: Tensor, size: Tensor | None) -> Tensor:
    if size is None:
        return eta
    return eta / (size[..., None] if eta.dim() > size.dim() else size)
