"""The settings of a run's `run.yaml`, as flat keys; read without torch, while the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def flat_settings(folder: Path) -> dict[str, Any]:
    """Keys such as "train.steps" with their values; none where `run.yaml` is not there, or not whole yet."""
    try:
        text = (folder / "run.yaml").read_text(encoding="utf-8")
        return dict(_flat(yaml.safe_load(text) or {}))
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def in_bytes(settings: dict[str, Any]) -> bool:
    """Whether a token of the run is surely a byte, so that its losses are of bytes: a prepared folder has a tokenizer
    of its own, whatever `data.tokenizer` says."""
    tokenizer, path = settings.get("data.tokenizer", "bytes"), settings.get("data.path")
    if isinstance(path, str) and (prepared := Path(path).expanduser() / "prepared.json").is_file():
        try:
            tokenizer = json.loads(prepared.read_text(encoding="utf-8"))["name_of_tokenizer"]
        except (OSError, ValueError, TypeError, KeyError):  # damaged
            return False
    return bool(tokenizer == "bytes")


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
