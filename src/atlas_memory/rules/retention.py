"""Retention: how much of the old memory enters the new one (Miras's name for a forget gate).

alpha multiplies the old memory, 1 keeps everything, as in ATLAS; Titans' alpha is the amount forgotten. W is one matrix
of a memory, and ``step`` what the inner optimiser subtracts from it.

**Linear retention** (``Decay``, ``Keep``) is W_t = alpha_t W_{t-1} - step at every token.

**Non-linear retention** (Miras, section 5.2; all others here) computes W from an accumulator A of the same shape,
A_t = alpha_t A_{t-1} - step, by W_t = ``mirror_map``(A_t), at one token of each chunk, the chunk-boundary update
(section 5.4): the last, or with a ``lag`` the first. Elsewhere W_t = alpha_t W_{t-1} - step. With ``chunk=1`` this is
the paper's recurrence. The next chunk takes its gradients at ``mirror_map``(A_b), and its accumulator begins as
``restart`` says.

**Decay targets.** As printed, alpha takes W and A to zero. ``to_initial`` (ours, and the named rules') lets them decay
to what they began with, A_t = alpha_t A_{t-1} + (1 - alpha_t) A_0 - step (docs/explanation/decay-targets.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .gates import pick, rows
from .orthogonal import reciprocal_or_zero
from .validation import check_positive


class OldMatrix(NamedTuple):
    """One matrix before a token, ``[..., rows, columns]`` each: W; ``frozen``, W before the chunk; ``dual``, the
    accumulator A if there is one; M_0; and what W and A decay to, None for zero."""

    weights: Tensor
    frozen: Tensor
    dual: Tensor | None
    initial: Tensor
    decay_target: Tensor | None
    dual_target: Tensor | None


class NewMatrix(NamedTuple):
    """The matrix after the token: W; ``mirrored``, W with which a next chunk would begin; and A."""

    weights: Tensor
    mirrored: Tensor
    dual: Tensor | None


def padded_to(decay_target: Tensor, like: Tensor) -> Tensor:
    """``decay_target``, with zeros for the further columns of W (``like``), on phi* those of keys."""
    more = like.shape[-1] - decay_target.shape[-1]
    return F.pad(decay_target, (0, more)) if more else decay_target


def decayed(alpha: Tensor, matrix: Tensor, decay_target: Tensor | None) -> Tensor:
    """alpha W, or target + alpha (W - target)."""
    return rows(alpha, matrix) if decay_target is None else decay_target + rows(alpha, matrix - decay_target)


def _directed(matrix: Tensor) -> Tensor:
    """The matrix with a unit vector in place of every row of zeros."""
    count, columns = matrix.shape[-2:]
    units = F.one_hot(torch.arange(count, device=matrix.device) % columns, columns)
    return torch.where(matrix.any(-1, keepdim=True), matrix, units.to(matrix.dtype))


class AnyRetention:
    """The base class of all retentions."""

    has_mirror_map = False
    """Whether there is an accumulator A."""
    gated = True
    """Whether alpha is read."""
    lag = False
    """Whether the token of the chunk-boundary update is the chunk's first; else it is the last."""
    to_initial = False
    """Whether W and A decay to what they began with; else to zero."""
    fixed_row_sums = False
    """Whether all rows of W have one sum that no write can change, as on a simplex."""

    supports_infinite_features = False
    """As ``InnerOptimiser`` has it. A class with a ``keep`` of its own declares it anew."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "keep" in vars(cls):
            cls.supports_infinite_features = vars(cls).get("supports_infinite_features", False)

    def start(self, matrix: Tensor) -> Tensor:
        """A fresh M_0, from the network's initial matrix ``[..., rows, columns]``; by default that itself."""
        return matrix

    def tangent(self, f: Tensor) -> Tensor:
        """The part of an input f ``[..., columns]`` that a write can use: with ``fixed_row_sums`` f less its mean."""
        return f - f.mean(-1, keepdim=True) if self.fixed_row_sums else f

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor | None]:
        """W_0 and A_0 of a matrix, from its learned M_0; None: there is no A."""
        raise NotImplementedError(f"{type(self).__name__} derives from neither LinearRetention nor NonLinearRetention")

    def decay_target(self, initial: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What W and A decay to, given M_0; None for zero."""
        return None, None


class LinearRetention(AnyRetention):
    """The base class of linear retentions, which have no accumulator."""

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor | None]:
        """W_0 = M_0, and no accumulator."""
        return initial, None

    def keep(self, old: OldMatrix, step: Tensor, alpha: Tensor, first: Tensor | bool, last: Tensor | bool) -> NewMatrix:
        """One matrix after a token, the ``first`` or ``last`` of its chunk; ``alpha``: ``[batch, heads]``, or with
        ``dim``."""
        new = decayed(alpha, old.weights, old.decay_target) - step
        return NewMatrix(new, new, None)


@dataclass(frozen=True)
class Decay(LinearRetention):
    """M_t = alpha_t M_{t-1} + update, alpha_t in [0, 1] a token and head (ATLAS Eq. 32).

    ``to_initial`` lets the memory decay to M_0, M_t = alpha_t M_{t-1} + (1 - alpha_t) M_0 + update: a soft form of
    TNT's resets (TNT Eq. 6), not in ATLAS."""

    to_initial: bool = False

    gated = True
    supports_infinite_features = True

    def decay_target(self, initial: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return initial if self.to_initial else None, None


@dataclass(frozen=True)
class Keep(LinearRetention):
    """M_t = M_{t-1} + update; the gate alpha is not read."""

    gated = False
    supports_infinite_features = True


class NonLinearRetention(AnyRetention):
    """The base class of non-linear retentions: the learned M_0 is an accumulator, and W_0 = ``mirror_map``(M_0)."""

    has_mirror_map = True
    gated = True

    def decay_target(self, initial: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return self.begin(initial) if self.to_initial else (None, None)

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor | None]:
        mirrored = self.mirror_map(initial, initial, initial)
        return mirrored, self.restart(initial, mirrored)

    def keep(self, old: OldMatrix, step: Tensor, alpha: Tensor, first: Tensor | bool, last: Tensor | bool) -> NewMatrix:
        assert old.dual is not None
        linear = decayed(alpha, old.weights, old.decay_target) - step
        a = decayed(alpha, old.dual, old.dual_target) - step
        exact = self.mirror_map(a, old.frozen, old.initial)
        new = pick(first if self.lag else last, exact, linear)
        return NewMatrix(new, exact, pick(last, self.restart(a, exact), a))

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        """W from A, W before the chunk and the learned M_0; ``[..., rows, columns]`` each."""
        raise NotImplementedError(f"{type(self).__name__} has no method mirror_map(a, frozen, initial)")

    def restart(self, a: Tensor, mirrored: Tensor) -> Tensor:
        """A, with which the next chunk begins."""
        return a


@dataclass(frozen=True)
class LqNorm(NonLinearRetention):
    """W = A / |A|_q^(q-2), the L_q retention (Miras Eq. 24, Moneta's), q >= 2."""

    q: float = 4.0
    to_initial: bool = False

    def __post_init__(self) -> None:
        if not self.q >= 2:
            raise ValueError(f"LqNorm q must be >= 2, got {self.q!r}")

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        size = a.detach().abs().amax((-2, -1), keepdim=True)  # powers of huge or tiny entries must not overflow
        unit = a * reciprocal_or_zero(size)
        norm = unit.abs().pow(self.q).sum((-2, -1), keepdim=True).clamp_min(0.5).pow((2.0 - self.q) / self.q)
        return a * norm * size.clamp_min(1e-6).pow(2.0 - self.q)

    def start(self, matrix: Tensor) -> Tensor:
        """An A with |A|_q = 1, where W = A. Near A = 0, W has no bound, so that no row begins at zero."""
        matrix = _directed(matrix)
        return matrix / matrix.abs().pow(self.q).sum((-2, -1), keepdim=True).pow(1.0 / self.q)


def _as_logits(matrix: Tensor) -> Tensor:
    """The matrix with entries of variance 1; zero stays zero."""
    return matrix * matrix.square().mean((-2, -1), keepdim=True).clamp_min(1e-30).rsqrt()


@dataclass(frozen=True)
class Softmax(NonLinearRetention):
    """W = scale * columns * softmax(A / scale) along each row: the KL retention with entropy on the scaled simplex
    (Miras Eqs. 21 and 27, Memora's). A is scale log W up to a constant a row, so that with scale = 1 the paper's
    alpha_t log W_{t-1} - eta_t grad is the accumulator's recurrence. The paper leaves the simplex and its size open;
    ``scale`` is the mean of the entries. ``lag``: the chunk-boundary update is at the chunk's first token, Memora's
    "lag token"."""

    scale: float = 1.0
    lag: bool = True
    to_initial: bool = False

    fixed_row_sums = True

    def __post_init__(self) -> None:
        check_positive("Softmax scale", self.scale)

    def start(self, matrix: Tensor) -> Tensor:
        """M_0 with log W of standard deviation 1/2, which recalls best (measured)."""
        return 0.5 * self.scale * _as_logits(matrix)

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        return self.scale * a.shape[-1] * (a / self.scale).softmax(-1)


@dataclass(frozen=True)
class Sigmoid(NonLinearRetention):
    """W = scale * sigmoid(A): the Bregman retention that keeps every entry in (0, scale) (Miras, section 5.2)."""

    scale: float = 1.0
    to_initial: bool = False

    def __post_init__(self) -> None:
        check_positive("Sigmoid scale", self.scale)

    def start(self, matrix: Tensor) -> Tensor:
        return _as_logits(matrix)

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        return self.scale * a.sigmoid()


@dataclass(frozen=True)
class ElasticNet(NonLinearRetention):
    """W = soft(A, threshold) = sign(A) max(|A| - threshold, 0): many entries are exactly zero.

    With ``local``, the next chunk's A begins as W, so that what falls below the threshold is lost (Miras Eq. 22; lambda
    is our alpha, zeta our eta). Otherwise A continues, and it can come back (FTRL, Eq. 23)."""

    threshold: float = 0.01
    local: bool = True

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"ElasticNet threshold must be >= 0, got {self.threshold!r}")

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        return torch.nn.functional.softshrink(a, self.threshold)

    def restart(self, a: Tensor, mirrored: Tensor) -> Tensor:
        return mirrored if self.local else a


@dataclass(frozen=True)
class FDivergence(NonLinearRetention):
    """W = W_f * max(0, 1 + A - zeta), zeta such that the mean of each row is ``scale``: Pearson's divergence,
    f(u) = (u - 1)^2 / 2, on the scaled simplex (Miras Eq. 18, g = (f')^-1). A, minus the sum of the chunk's steps,
    starts at zero in each chunk; alpha is not read."""

    scale: float = 1.0

    gated = False
    fixed_row_sums = True

    def __post_init__(self) -> None:
        check_positive("FDivergence scale", self.scale)

    def start(self, matrix: Tensor) -> Tensor:
        return _as_logits(matrix)

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor | None]:
        """W_0 = scale * columns * softmax(M_0), A_0 = 0."""
        return self.scale * initial.shape[-1] * initial.softmax(-1), torch.zeros_like(initial)

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        # In each row, x = zeta - 1 solves sum_j w_j max(0, a_j - x) = scale * columns, w_j the entries of W_f. Each
        # number of largest a_j gives an x (``level``); the right one is the largest whose smallest a_j lies above that
        # x.
        ordered, order = a.sort(-1, descending=True)
        mass = frozen.gather(-1, order).cumsum(-1)
        level = ((frozen * a).gather(-1, order).cumsum(-1) - self.scale * a.shape[-1]) / mass.clamp_min(1e-30)
        inside = ((ordered > level) & (mass > 0)).long()
        last = (inside * torch.arange(1, a.shape[-1] + 1, device=a.device)).amax(-1, keepdim=True).clamp_min(1) - 1
        return frozen * (a - level.gather(-1, last)).clamp_min(0.0)

    def restart(self, a: Tensor, mirrored: Tensor) -> Tensor:
        return torch.zeros_like(a)


@dataclass(frozen=True)
class RowNorm(NonLinearRetention):
    """After each chunk every row of W gets the length that it has in M_0: LaCT's weight normalisation."""

    gated = False

    def start(self, matrix: Tensor) -> Tensor:
        """No row begins at zero, without a length."""
        return _directed(matrix)

    def begin(self, initial: Tensor) -> tuple[Tensor, Tensor | None]:
        return initial, initial

    def mirror_map(self, a: Tensor, frozen: Tensor, initial: Tensor) -> Tensor:
        length = initial.square().sum(-1, keepdim=True).clamp_min(1e-30).sqrt()  # with a gradient at zero, too
        return a * (length / (a.square().sum(-1, keepdim=True) + 1e-10).sqrt())

    def restart(self, a: Tensor, mirrored: Tensor) -> Tensor:
        return mirrored


Retention = Decay | Keep | LqNorm | Softmax | Sigmoid | ElasticNet | FDivergence | RowNorm
