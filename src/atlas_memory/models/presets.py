"""Named model sizes: the rows of ATLAS Table 7, one between them, and small ones for laptops."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # which loads torch
    from ..memory import Rule


@dataclass(frozen=True)
class Preset:
    """A model size.

    Attributes:
        config: Arguments of `AtlasConfig`.
        learning_rate: Peak learning rate for training it.
        feature_map_heads: Heads of a memory with a feature map, if different: its matrices grow with the square of a
            head's width.
    """

    config: dict[str, Any]
    learning_rate: float
    feature_map_heads: int | None = None


# What two cores can afford of any rule: a memory no wider than its head, and one Newton-Schulz step a chunk, with
# reads of the pending update. `to_initial` lets a memory that was trained on short windows read on past them.
LAPTOP = {
    "network": {"expansion": 1},
    "retention": {"to_initial": True},
    "optimiser": {"every": None, "read_pending": True},
}


def _paper(layers: int, dim: int, heads: int, hidden: int, tied: bool = False) -> dict[str, Any]:
    return {
        "vocab_size": 32000,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "tie_word_embeddings": tied,
    }


def _bytes(layers: int, dim: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 258,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "rule_options": LAPTOP,
        "window": 4,
        "chunk_size": 16,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 257,
    }


# Heads of bytes are 64 wide, which remember more than heads of 16 (docs/results/settings.md); with a feature map they
# are narrower. Table 7 gives blocks, width, heads and learning rate; the MLPs are as wide as the parameters in the
# name need, without the initial memories M_0, which depend on the rule.
PRESETS: dict[str, Preset] = {
    "nano": Preset(_bytes(2, 64, 1), 3e-3, feature_map_heads=2),
    "tiny": Preset(_bytes(2, 128, 2), 3e-3, feature_map_heads=4),
    "mini": Preset(_bytes(4, 256, 4), 3e-3, feature_map_heads=8),
    "50m": Preset(_paper(8, 512, 8, 1856, tied=True), 3e-3),
    "170m": Preset(_paper(12, 768, 16, 3072), 3e-3),
    "340m": Preset(_paper(24, 1024, 16, 2048), 1.5e-3),
    "400m": Preset(_paper(24, 1024, 16, 2752), 1.5e-3),
    "760m": Preset(_paper(24, 1536, 16, 3456), 1.25e-3),
    "1.3b": Preset(_paper(18, 2048, 8, 7168), 7e-4),
}
PRESETS |= {"small": PRESETS["170m"], "medium": PRESETS["400m"], "large": PRESETS["760m"]}


def fitting_options(
    options: dict[str, dict[str, Any]], rule: Rule, chosen: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The chosen options on top of a preset's; of those, the fields that the rule's parts have and that are not of a
    part of another kind."""
    known = {part: {field.name for field in fields(getattr(rule, part))} for part in options}
    fit = {
        part: {name: value for name, value in changes.items() if name in known[part]}
        for part, changes in options.items()
        if "kind" not in chosen.get(part, {})
    }
    fit = {part: changes for part, changes in fit.items() if changes}
    return fit | {part: fit.get(part, {}) | changes for part, changes in chosen.items()}
