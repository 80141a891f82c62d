"""The file of a suite's result: what was asked of which model, every outcome, and a summary."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atlas_memory import __version__

FORMAT = 1


def begin_result(
    path: Path,
    suite: str,
    version: int,
    source: str,
    model: Any,
    settings: dict[str, Any],
    about: dict[str, Any] | None,
) -> dict[str, Any]:
    """A result with the items that `path` already has.

    Args:
        settings: `strict`, `seed`, `count`, `lengths` and `data`, the hash of what is asked.
        about: Of the model.

    Raises:
        ValueError: `path` has a result of another model, version or settings.
    """
    result: dict[str, Any] = {
        "format": FORMAT,
        "suite": suite,
        "version": version,
        "source": source,
        "library": __version__,
        "model": {"class": type(model).__name__, "parameters": model.num_parameters()} | (about or {}),
        **settings,
        "items": [],
    }
    if path.is_file():
        result["items"] = _earlier(path, result, settings)
    return result


def summary(result: dict[str, Any], scores: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of each length: the mean of each score, and of several items its standard error over them."""
    for length in result["lengths"]:
        items = [item for item in result["items"] if item["length"] == length]
        row: dict[str, Any] = {"length": length, "items": len(items)}
        for name in scores if items else ():
            values = [item["scores"][name] for item in items]
            row[name] = statistics.fmean(values)
            if len(items) > 1:
                row[f"{name} error"] = statistics.stdev(values) / math.sqrt(len(items))
        if items:
            yield row


def _earlier(path: Path, result: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        items = found["items"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is no result of a suite: choose another --out, or delete it") from error
    for name in ("format", "suite", "version", "model", *settings):
        if found.get(name) != json.loads(json.dumps(result[name])):
            raise ValueError(
                f"{str(path)!r} has a result with {name}={str(found.get(name))[:200]}, not {str(result[name])[:200]}: "
                "choose another --out, or delete it"
            )
    return list(items)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write it whole, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
