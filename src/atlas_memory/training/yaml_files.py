"""Descriptions of runs as YAML: how they are read, and what is wrong where they cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).with_name("configs")
"""Runs of the larger presets, by their names."""


class ConfigError(ValueError):
    """A run description that cannot be used; the message is one line."""


class Loader(yaml.SafeLoader):
    """YAML in which no key stands twice; PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice: keep one", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))
"""PyYAML takes 1e-5 for a word."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file; ConfigError if it cannot be read."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}; by name there are {ours}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config {str(path)!r} is not a YAML file{place_of(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree


def place_of(error: Exception) -> str:
    """Where in a YAML text something is wrong, and what."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # of a date that is none, say
        return f" ({error})" if type(error) is ValueError else ""
    return f" (line {mark.line + 1}: {getattr(error, 'problem', None)})"
