"""The one table of inner optimisers that ``chunkwise`` knows how to compute chunk by chunk. A rule whose optimiser is
not in it, or whose retention has a ``keep`` of its own, is computed token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..rules.bias import DotProduct
from ..rules.features import Identity
from ..rules.networks import Linear
from ..rules.optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon
from ..rules.retention import LinearRetention, NonLinearRetention
from ..rules.rule import Rule
from .chunk_context import MatrixContext
from .fast_weight import ChunkSteps, Updates, identity_steps, last_momentum
from .muon_steps import muon_steps, muon_sums
from .work import Count, Work, muon_work, plain_work

Sums = tuple[Tensor, ...]


class ChunkForm(NamedTuple):
    """The fast form of one inner optimiser.

    Attributes:
        steps: the function that gives the steps of one matrix over a chunk.
        sums: the function that gives the matrix's sums after the chunk.
        work: the function that counts the multiply-adds of both.
    """

    steps: Callable[[MatrixContext, Updates], ChunkSteps]
    sums: Callable[[MatrixContext, Updates], Sums]
    work: Callable[[Work], Count]


def plain_steps(part: MatrixContext, tokens: Updates) -> ChunkSteps:
    """The steps of gradient descent, the delta step and momentum."""
    sums = part.held.sums
    return identity_steps(part.held.weights, sums[0] if sums else None, tokens, part.masks)


def plain_sums(part: MatrixContext, tokens: Updates) -> Sums:
    """The momentum S after the chunk, where there is one."""
    return tuple(last_momentum(s, tokens, part.masks) for s in part.held.sums)


PLAIN = ChunkForm(plain_steps, plain_sums, plain_work)

CHUNK_FORMS: dict[type, ChunkForm] = {
    GradientDescent: PLAIN,
    DeltaGradientDescent: PLAIN,
    Momentum: PLAIN,
    Muon: ChunkForm(muon_steps, muon_sums, muon_work),
}


def chunk_form(rule: Rule) -> ChunkForm:
    """The fast form of a rule's optimiser, if the rule ``has_chunks``."""
    return CHUNK_FORMS[type(rule.optimiser)]


def has_chunks(rule: Rule) -> bool:
    """Whether the tokens of a chunk can be read together, and not one after the other."""
    keep = type(rule.retention).keep
    return type(rule.optimiser) in CHUNK_FORMS and keep in (LinearRetention.keep, NonLinearRetention.keep)


SCANNED: dict[str, type] = {
    "features": Identity,
    "network": Linear,
    "bias": DotProduct,
    "optimiser": DeltaGradientDescent,
}
"""The parts of a rule whose chunks delta_scan.py can read all at once: those of the delta rule."""


def has_scan(rule: Rule) -> bool:
    """Whether all chunks of a sequence can be read at once."""
    parts = all(type(getattr(rule, part)) is kind for part, kind in SCANNED.items()) and has_chunks(rule)
    plain = not (rule.network.norm or rule.optimiser.normalised or rule.retention.has_mirror_map)
    return parts and plain and rule.window.read == "after"
