"""The inner step: where its gradients are taken, how long it is, and the base class of inner optimisers.

**Gradients.** ATLAS (Eqs. 15-16) takes the b gradients of a chunk at M_f, the memory at its start. ``online``, the
default and ours, corrects each token's error at the pre-norm output by what the last matrix W has changed since:

    error_t = d bias / d pre-norm at M_f  +  r_t (W_{t-1} - W_f) f_t,

with f_t the input of W for the key, and r_t a bound on how fast that error grows with the output
(``Rule.curvature_bound``; exact for L2 without a layer norm, r = 2; the dot product has no second term). Under Muon,
whose steps are no sums of gradients, -D_{t-1} stands for W_{t-1} - W_f, with D_t = alpha_t D_{t-1} + s_t g_t, zero at
the start.

**Normalised steps**, the default and ours, are sized by what they change. With f_l the input of matrix l, and J_l the
derivative of the pre-norm output by what matrix l puts out, both at M_f,

    lambda_l,t = r_t (|J_l|^2 + FLOOR) (|f_l|^2 + FLOOR)
    s_l,t = share_l eta_t / (lambda_l,t + sum over older window tokens of gamma_i^(t) lambda_l,i),

share = 0.9 for the last matrix and 0.1 for all before it together. ``normalised=False`` is the printed s = eta.
Momentum and Muon multiply s by 1 - theta; Muon divides it by b where errors are not online. Where rows of W have fixed
sums, f_l is less its mean (``AnyRetention.tangent``).

**Steps after several tokens.** With ``every`` = n, a step is taken after every n tokens, a divisor of the chunk, and
gradients are summed in S until then. theta acts at the first token after a step, and is 1 at the others.

docs/explanation/normalised-steps.md and online-gradient.md say why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .orthogonal import orthogonalise, saturate

FLOOR = 0.05
"""Added to both squared lengths in lambda. Without it, a memory that has decayed would be written with giant steps."""


class Rates(NamedTuple):
    """The factors in the recurrence of optimisers.py for one matrix: theta, a_t (``write``) and e_t (``apply``),
    ``[batch, heads, time]``, the last two perhaps with ``dim`` behind; without ``time`` for a single token."""

    theta: Tensor
    write: Tensor
    apply: Tensor
    plain: Tensor | None = None
    """s_t of gradient descent, for an optimiser that estimates what a chunk has changed (``Muon``)."""


class TokenGates(NamedTuple):
    """The rates and gates of token t, for one matrix.

    Attributes:
        theta, write, apply, plain: as in ``Rates``, without time.
        alpha: the retention gate, ``[...]`` or a channel ``[..., dim]``.
        gamma: gamma_t^(t), the window gate of the token itself, ``[...]``.
        along_key: the function W -> W f_t f_t^T, the part of a matrix W that answers to the token's input f_t.
        orthogonalise, saturate: as in orthogonal.py.
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
    """The base class of inner optimisers. One of your own is a frozen dataclass with a ``step``.

    It sets ``has_momentum`` if the step reads theta or keeps a sum, and has ``rates`` of its own if the step size
    belongs in front of the gradient. ``Rule.vary`` changes what a class declares as fields, with types. ``chunkwise``
    calls ``step`` token by token, unless ops/dispatch.py has a fast form. ``atlas_memory.testing.check_rule`` checks a
    class."""

    normalised: bool = True
    """Whether the step size is chosen by what a step changes; otherwise it is eta."""
    online: bool = True
    """Whether the errors of a chunk see what the chunk has written before."""
    has_momentum = False
    """Whether there is a sum S, and a gate theta by which it decays. For sums without theta override ``sums``."""
    every: int | None = 1
    """A step is taken after every so many tokens, a divisor of the chunk; None: at the end of a chunk."""
    erases = False
    """Whether a step also removes what the matrix answered to the key (``TokenGates.along_key``)."""
    after_decay = False
    """Where a step ``erases``: whether it removes that from what alpha has left of the matrix."""
    estimates_change = False
    """Whether the class has a ``chunk_change`` of its own, which no retention with a lag knows. Set for every class."""
    ends_chunk = False
    """Whether the class has an ``end_chunk`` of its own. Set for every class."""
    read_pending = False
    """Whether queries already see the pending update S (``readout_weights``)."""
    mixes_rows = False
    """Whether a step mixes the rows of a matrix; eta and alpha are then one a head."""
    supports_infinite_features = False
    """Whether the step of W A, for any matrix A, is the step of W times A, so that ``Exponential`` features can be
    used. A class with its own ``step`` declares it anew."""
    raw_eta: float | None = None
    """Where raw steps' eta begins in a layer, as a share of ``largest_step``. None: where a first step of gradient
    descent is a nearly full write. Set it if your steps are longer than gradients."""

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
        """Whether the errors of a chunk see its earlier writes: ``online``, unless the steps do not allow it."""
        return self.online

    def sums(self, online: bool) -> int:
        """How many sums there are, zero at first, for a rule whose errors are ``online`` or not."""
        return int(self.has_momentum)

    def step(self, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates) -> tuple[Sums, Tensor]:
        """The sums after token t, and the step that is subtracted from the memory if one is due at this token.

        Args:
            sums: a tuple of the sums before the token, as many as ``sums`` says.
            weights: W_{t-1}.
            g: the gradient g_t.
            at: the gates and rates of the token; ``rows(gate, matrix)`` of gates.py multiplies a matrix by one.

        Returns:
            A tuple of as many sums, and the step; all matrices ``[..., rows, columns]``.
        """
        raise NotImplementedError

    def end_chunk(self, sums: Sums) -> Sums:
        """The sums after the last token of a chunk."""
        return sums

    def chunk_change(self, sums: Sums, weights: Tensor, frozen: Tensor) -> Tensor:
        """What the chunk has changed so far in a matrix, W_{t-1} - W_f, as errors see it."""
        return weights - frozen

    def readout_weights(self, sums: Sums, weights: Tensor, stepped: Tensor | bool) -> Tensor:
        """The matrix that answers. ``stepped``: whether a step has just been taken, a bool or ``[batch]``."""
        return weights

    def largest_step(self, every: int, chunk: int) -> float:
        """The largest eta that a layer gives."""
        return 1.0

    def rates(self, theta: Tensor, eta: Tensor, size: Tensor | None, every: int, chunk: int) -> Rates:
        """The factors of one matrix; by default theta (0 without momentum), a = 1 and e = s.

        Args:
            theta, eta: the gates, ``[batch, heads, time]``; eta may have ``dim`` behind.
            size: the normaliser, s = eta / size, ``[batch, heads, time]``; None where steps are raw, s = eta.
            every, chunk: a step is taken after every so many tokens of a chunk of so many.
        """
        return Rates(theta if self.has_momentum else torch.zeros_like(theta), torch.ones_like(eta), over(eta, size))


def over(eta: Tensor, size: Tensor | None) -> Tensor:
    """eta / size, where eta may have channels; eta itself where steps are raw."""
    if size is None:
        return eta
    return eta / (size[..., None] if eta.dim() > size.dim() else size)
