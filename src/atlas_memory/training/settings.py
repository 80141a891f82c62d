"""The settings of a run's `run.yaml`, as flat keys; read without torch, while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ABOUT, BYTES = "data.json", "bytes"
"""The file in which a run notes what it reads, and its entry that says whether tokens are bytes."""

UNASKED_STEPS = 1000
"""The steps of a run that names neither its steps nor its minutes."""


def flat_settings(folder: Path) -> dict[str, Any]:
    """Keys such as "train.steps" with their values; none where `run.yaml` is not there, or not whole yet."""
    try:
        text = (folder / "run.yaml").read_text(encoding="utf-8")
        return dict(_flat(yaml.safe_load(text) or {}))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def in_bytes(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether a token of the run in `folder`, with these `flat_settings`, is surely a byte, so that its losses are of
    bytes.

    A run notes it when it begins. Of one that has not, or not yet, the settings say it while its text is there: a
    prepared folder has a tokenizer of its own, whatever `data.tokenizer` says.
    """
    tokenizer, path = settings.get("data.tokenizer", "bytes"), settings.get("data.path")
    try:
        if (noted := folder / ABOUT).is_file() and BYTES in (about := json.loads(noted.read_text(encoding="utf-8"))):
            return bool(about[BYTES])
        if isinstance(path, str):
            text = Path(path).expanduser()
            if (text / "prepared.json").is_file():
                tokenizer = json.loads((text / "prepared.json").read_text(encoding="utf-8"))["name_of_tokenizer"]
            elif text.is_absolute() and not text.exists():
                return False
    except (OSError, ValueError, TypeError, KeyError):  # damaged
        return False
    return bool(tokenizer == "bytes")


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
