"""The settings of a run's `run.yaml`, as flat keys; read without torch, while the run goes on."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from atlas_memory.train.yaml_files import parse, read_json, small_text

ABOUT, BYTES = "data.json", "bytes"
"""The file in which a run notes what it reads, and its entry that says whether tokens are bytes."""

UNASKED_STEPS = 1000
"""The steps of a run that names neither its steps nor its minutes."""


def flat_settings(folder: Path) -> dict[str, Any]:
    """Keys such as "train.steps" with their values; none where `run.yaml` is not there. ValueError, with the reason, if
    it cannot be read, or is not whole yet."""
    try:
        found, wrong = _settings(small_text(folder / "run.yaml"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"run.yaml cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError("run.yaml is not UTF-8 text") from error
    if wrong:
        raise ValueError(f"run.yaml {wrong}")
    return found


@lru_cache(64)
def _settings(text: str) -> tuple[dict[str, Any], str]:
    """What `text` says, and what is wrong with it; kept, since whoever watches runs asks every two seconds."""
    try:
        tree = parse(text) or {}
    except ValueError as error:
        return {}, str(error)
    return (dict(_flat(tree)), "") if isinstance(tree, dict) else ({}, "has no keys and values")


def noted(folder: Path) -> dict[str, Any]:
    """What the run in `folder` noted of its text when it began; nothing where that is not there, or damaged."""
    try:
        found = read_json(folder / ABOUT)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def in_bytes(folder: Path) -> bool:
    """Whether the run in `folder` noted when it began that a token is a byte, so that its losses are of bytes."""
    return bool(noted(folder).get(BYTES))


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
