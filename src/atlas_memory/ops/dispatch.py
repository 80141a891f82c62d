"""The one table of inner optimisers that ``chunkwise`` knows how to compute chunk by chunk. A rule whose optimiser is
not in it, or whose retention has a ``keep`` of its own, is computed token by token."""

from __future__ import annotations

from ..rules.bias import DotProduct
from ..rules.features import Identity
from ..rules.networks import Linear
from ..rules.optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon
from ..rules.retention import LinearRetention, NonLinearRetention
from ..rules.rule import Rule
from .muon_steps import MuonSteps
from .plain_steps import PlainSteps

CHUNK_FORMS: dict[type, type[PlainSteps] | type[MuonSteps]] = {
    GradientDescent: PlainSteps,
    DeltaGradientDescent: PlainSteps,
    Momentum: PlainSteps,
    Muon: MuonSteps,
}
"""The steps of each optimiser over a chunk."""


def chunk_form(rule: Rule) -> type[PlainSteps] | type[MuonSteps]:
    """The steps of a rule's optimiser, if the rule ``has_chunks``."""
    return CHUNK_FORMS[type(rule.optimiser)]


def keeps_linearly(rule: Rule) -> bool:
    """Whether the retention is alpha W + (1 - alpha) target - step at every token."""
    return type(rule.retention).keep is LinearRetention.keep


def has_chunks(rule: Rule) -> bool:
    """Whether the tokens of a chunk can be read together, and not one after the other."""
    known = keeps_linearly(rule) or type(rule.retention).keep is NonLinearRetention.keep
    return known and type(rule.optimiser) in CHUNK_FORMS


def adds_gradients(rule: Rule) -> bool:
    """Whether every token adds s_t g_t to a matrix that decays linearly: gradient descent or momentum."""
    return type(rule.optimiser) in (GradientDescent, Momentum) and keeps_linearly(rule)


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
