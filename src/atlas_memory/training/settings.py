"""The settings of a run's `run.yaml`, as flat keys; read without torch, while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atlas_memory.training.yaml_files import LARGEST, parse, small_text

ABOUT, BYTES = "data.json", "bytes"
"""The file in which a run notes what it reads, and its entry that says whether tokens are bytes."""

JSON = 16 * LARGEST
"""Bytes of it, at most; JSON is read fast."""

UNASKED_STEPS = 1000
"""The steps of a run that names neither its steps nor its minutes."""


def flat_settings(folder: Path) -> dict[str, Any]:
    """Keys such as "train.steps" with their values; none where `run.yaml` is not there, or not whole yet."""
    try:
        return dict(_flat(parse(small_text(folder / "run.yaml")) or {}))
    except (OSError, ValueError):
        return {}


def in_bytes(folder: Path) -> bool:
    """Whether the run in `folder` noted when it began that a token is a byte, so that its losses are of bytes."""
    try:
        return bool(json.loads(small_text(folder / ABOUT, JSON))[BYTES])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # not there, or damaged
        return False


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
