"""The inner step: where its gradients are taken, how long it may be, and what every inner optimiser must say.

**Where gradients are taken.** ATLAS (Eqs. 15-16) takes the b gradients of a chunk at M_f, the memory frozen at the
chunk's start, so that they cannot see one another's writes. Titans prints the gradient at M_{t-1}, the memory just
before the token. ``online``, the default and the library's own, lies between. The pre-norm output of a memory is what
its last matrix W puts out, before the layer norm and the residual, and it is linear in W. Each error is therefore taken
at what W answers as it stands just before the token, W_{t-1}, and from there back-propagated through the frozen memory.
With W_f the last matrix of M_f, and f_t its input for the key of token t,

    error_t = d bias / d pre-norm at M_f  +  r_t (W_{t-1} - W_f) f_t,

where the number r_t says how fast the error grows with the pre-norm output. For L2 without a layer norm r_t is 2,
exactly. For the other biases, and under a layer norm, it is made of the curvature of the bias
(``NetworkBase.curvature_bound`` in networks.py). The error of the dot product is the value whatever is answered, so
there the second term is left out. Elsewhere each error of a chunk depends on the earlier ones, and together they solve
one triangular system (ops/triangular.py), as those of the delta rule do. ``online=False`` is the printed gradient, all
of it taken at M_f. With a chunk of one token the two are the same for every bias.

The steps of Muon are not sums of gradients. Under Muon the errors therefore see what the gradients of the chunk would
have changed by plain steps, of the size s_t below: -D_{t-1} f_t takes the place of (W_{t-1} - W_f) f_t, with
D_t = alpha_t D_{t-1} + s_t g_t, which is zero at the chunk's start. Where S is small against Muon's limit L, D is what
its steps add up to, whenever they are taken. Elsewhere it is an estimate, which the next frozen memory corrects.

**Normalised steps** are the default and the library's own, too. Their size s is chosen by what they change. Let f_l be
the input of matrix l, and J_l the derivative of the pre-norm output by what matrix l puts out, both at M_f for the key
of token t. When matrix l moves by its own gradient, times a small number s, the error at this key changes by at most
about s lambda_l,t times itself, with

    lambda_l,t = r_t (|J_l|^2 + FLOOR) (|f_l|^2 + FLOOR).

Matrix l therefore makes a step of the size

    s_l,t = share_l eta_t / (lambda_l,t + sum over older window tokens of gamma_i^(t) lambda_l,i),

so that the effect of a write goes to zero with eta, and eta = 1 moves the answer most of the way. Where the rows of W
have fixed sums, f_l is less its mean here and in what is written (``tangent`` in retention.py).

The share is 0.9 for the last matrix, and 0.1 for all those before it together. With these shares, tokens of equal key
and value cannot make the memory diverge, however long the chunk. For the errors see what has been written to the last
matrix, and so shrink by the factor 1 - 0.9 eta at each token: the sum of all is at most 1 / (0.9 eta) times the first.
They do not see what has been written to the matrices before it. There each error moves the answer by at most 0.1 eta of
itself, which is 0.1 eta / (0.9 eta) = 1/9 of the first error in all. (This holds to first order in the earlier
matrices, for L2 without a layer norm, and leaves aside what the delta step takes out. Elsewhere it was measured:
docs/choices.md.)

Momentum and Muon multiply s by 1 - theta, so that all steps that one gradient makes over time add up to one. Muon
divides it by b where errors see nothing of the chunk (``online=False``). ``normalised=False`` is the printed s = eta.

**Steps that are not taken at every token.** With ``every`` = n, a divisor of the chunk, a step is taken after every n
tokens, and until then the gradients are summed in S. theta is how much of S is kept from one step to the next: it acts
at the first token after a step, and is 1 at the others, so that all gradients of one step have the same weight. alpha
acts at every token. n = 1 is what is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .orthogonal import orthogonalise, saturate

FLOOR = 0.05
"""What is added to both squared lengths in lambda. Steps are then less than full where the input is shorter than about
a fifth, and where a matrix can hardly move the pre-norm output. Without it, a memory that has decayed would be written
with giant steps."""


class Rates(NamedTuple):
    """The three factors in the recurrence of optimisers.py, for one matrix: theta in front of the sum S_{t-1}, a_t
    (``write``) in front of the gradient, and e_t (``apply``) in front of the step. theta is ``[batch, heads, time]``,
    and so are the others, or ``[batch, heads, time, dim]`` where eta is channel-wise. For a single token there is no
    ``time``."""

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None = None
    """The step size s_t of plain gradient descent, for an optimiser whose errors see what plain steps would have
    changed (``Muon``)."""


class TokenGates(NamedTuple):
    """What an optimiser is told of token t, for one matrix. ``...`` are dimensions in front, such as batch and heads.

    Attributes:
        theta, write, apply, plain: as in ``Rates``: theta ``[...]``, the others ``[...]`` or a channel ``[..., dim]``.
        alpha: the retention gate, ``[...]`` or a channel ``[..., dim]``, whatever shape eta has.
        gamma: gamma_t^(t), the window gate of the token itself, ``[...]``.
        under: the function W -> W f_t f_t^T, the part of a matrix W that answers to the token's input f_t.
        orthogonalise, saturate: functions of S and of a number of iterations; see orthogonal.py.
    """

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None
    alpha: Tensor
    gamma: Tensor
    along_key: Callable[[Tensor], Tensor]
    orthogonalise: Callable[[Tensor, int], Tensor] = orthogonalise
    saturate: Callable[[Tensor, int], Tensor] = saturate


Sums = tuple[Tensor, ...]
"""What an optimiser keeps of earlier gradients of one matrix, such as the momentum S: ``[..., rows, columns]`` each."""


class InnerOptimiser:
    """What inner optimisers share.

    A new one is a frozen dataclass with a ``step``. It sets ``has_momentum`` where that step reads theta or keeps a
    sum, and it has ``rates`` of its own where the step size s_t belongs in front of the gradient and not in front of
    the step that is made. ``recurrent`` and ``fused_recurrent`` call these methods and nothing else. ``chunkwise``
    calls them token by token, unless ops/dispatch.py has a fast form of the class. ``atlas_memory.testing.check_rule``
    checks one of your own.

    ``normalised``, ``online`` and ``every`` can be fields of the dataclass. Only where a class declares them as fields,
    with their types, can a rule change them (``Rule.vary``)."""

    normalised: bool = True
    """Whether the step size is chosen by what a step changes; otherwise it is eta."""
    online: bool = True
    """Whether the errors of a chunk see what the chunk has written before."""
    has_momentum = False
    """Whether there is a running sum S, and a gate theta by which it decays."""
    every: int | None = 1
    """A step is taken after every so many tokens, a divisor of the chunk; None: at the end of a chunk."""
    erases = False
    """Whether a step also takes out what the matrix answered to the key (``TokenGates.along_key``), besides the
    gradient."""
    after_decay = False
    """Where a step ``erases``: whether it takes that out of what alpha has left of the matrix, and not of the matrix
    before it decayed."""
    estimates_change = False
    """Whether errors, where they are online, see an estimate of what the chunk has changed, since part of it still
    waits in S for a step. It is true where a class has a ``chunk_change`` of its own, and is not set by hand. The fast
    forms ask for it, and a retention with a lag token, which knows no such estimate, refuses it."""
    ends_chunk = False
    """Whether the sums are changed after the last token of a chunk. True where a class has a ``end_chunk`` of its
    own."""
    read_pending = False
    """Whether the memory answers as if the pending update S for a step had been written (``readout_weights``)."""
    mixes_rows = False
    """Whether a step mixes the rows of a matrix, as an orthogonalised one does. Gates of channels, which weigh single
    rows, then have no meaning: eta and alpha are one a head."""
    supports_infinite_features = False
    """Whether the step of W A, for any matrix A, is the step of W times A, so that no entries of W need be known: with
    ``Exponential`` features a memory holds a column for every key instead. A class with a ``step`` of its own declares
    it anew."""
    raw_eta: float | None = None
    """The value at which a layer lets the gate eta begin with ``normalised=False``, as a share of ``largest_step``.
    None: the value at which the first write of a unit key is nearly a full one, which is right for steps that grow with
    their gradient."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.ends_chunk = cls.end_chunk is not InnerOptimiser.end_chunk
        cls.estimates_change = cls.chunk_change is not InnerOptimiser.chunk_change
        if "step" in vars(cls):
            cls.supports_infinite_features = vars(cls).get("supports_infinite_features", False)

    @property
    def in_float64(self) -> bool:
        """Whether float32 inputs are computed in float64."""
        return False

    @property
    def is_online(self) -> bool:
        """Whether the errors of a chunk can see its earlier writes: ``online``, unless the steps do not allow it."""
        return self.online

    def sums(self, online: bool) -> int:
        """How many sums there are, all zero at first, for a rule whose errors are online or not."""
        return int(self.has_momentum)

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        """The sums after token t, and the step that is subtracted from the memory if one is due at this token.

        Args:
            sums: those before the token, in a tuple, as many as ``sums`` says: one with ``has_momentum``, else none.
            weights: W_{t-1}.
            g: the gradient g_t. It has the shape ``[..., rows, columns]``, as each sum and W have.
            at: the gates and rates of the token. ``rows(gate, matrix)`` of gates.py multiplies a matrix by
            one.

        Returns:
            A tuple of as many sums as were given, and the step; all ``[..., rows, columns]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method step(sums, weights, g, at)")

    def end_chunk(self, sums: Sums) -> Sums:
        """The sums after the last token of a chunk."""
        return sums

    def chunk_change(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """What the chunk has changed so far in a matrix, W_{t-1} - W_f, as the errors see it: all three arguments and
        the result are ``[..., rows, columns]``."""
        return weights - frozen

    def readout_weights(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """The matrix with which the memory answers. ``stepped`` says whether a step has just been taken: a bool for the
        whole batch, or one for each of its sequences, ``[batch]``."""
        return weights

    def largest_step(self, every: int, chunk: int) -> float:
        """The largest value that a layer gives to the gate eta."""
        return 1.0

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """The factors of one matrix. As here, without a method of the optimiser's own: theta (0 without momentum),
        a = 1 and e = s.

        Args:
            theta, eta: the gates, ``[batch, heads, time]``; eta may be ``[batch, heads, time, dim]``.
            size: what eta is divided by to make a normalised step, s = eta / size, ``[batch, heads, time]``: the
                denominator in the formula of s_l,t, over the share. None where steps are raw; then s = eta.
            every, chunk: a step is taken after every so many tokens of a chunk of so many.
        """
        return Rates(theta if self.has_momentum else torch.zeros_like(theta), torch.ones_like(eta), over(eta, size))


def over(eta: Tensor, size: Tensor | None) -> Tensor:
    """eta / size, where eta may have channels; eta itself where steps are raw."""
    if size is None:
        return eta
    return eta / (size[..., None] if eta.dim() > size.dim() else size)
