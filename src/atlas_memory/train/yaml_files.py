"""Descriptions of runs as YAML 1.2: how they are read and written, and what is wrong where they cannot be.

Only what such a description needs is read. An alias may stand for a thousand others, and a tag asks for another type
than the one that is seen: no file of ours has any, and both are refused before anything is made of them.
"""

from __future__ import annotations

import json
import stat
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import Node

CONFIGS = Path(__file__).with_name("configs")
"""Runs of the larger presets, by their names."""
LARGEST = 2**18
"""Bytes of a file, at most: such a one is read in a second or two."""


class ConfigError(ValueError):
    """A run description that cannot be used; the message is one line."""


class _Plain(Composer):
    """Without aliases and tags."""

    def compose_node(self, parent: Any, index: int) -> Node | None:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent) or event.anchor:
            raise ComposerError(problem=f"the alias {event.anchor}: write out what it stands for", **_at(event))
        if event.tag is not None and event.tag != "!":  # that of a text in quotes
            raise ComposerError(problem=f"the tag {_short(event.tag)}: leave it out", **_at(event))
        return super().compose_node(parent, index)


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _at(event: Any) -> dict[str, Any]:
    return {"problem_mark": event.start_mark}


def parse(text: str) -> Any:
    """What a YAML text says: mappings, lists, texts, numbers, true, false and null, by the rules of YAML 1.2 (`on`,
    `1:30` and `1e` are texts, and `010` is ten); ValueError of half a sentence if it is none."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Plain
    try:
        return yaml.load(text)
    except RecursionError as error:
        raise ValueError("is not YAML (it is nested too deeply)") from error
    except (YAMLError, ValueError) as error:
        raise ValueError(f"is not YAML{_place_of(error)}") from error


def _place_of(error: Exception) -> str:
    """Where in a YAML text something is wrong, and what."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:  # of a date that is none, or of characters that are none
        return f" ({' '.join(str(error).split())})"
    return f" (line {mark.line + 1}: {problem.partition(chr(10))[0]})"


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file; ConfigError if it cannot be read."""
    try:
        tree = parse(small_text(path))
    except OSError as error:
        ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}; by name there are {ours}") from error
    except UnicodeError as error:
        raise ConfigError(f"config {str(path)!r} is not UTF-8 text: convert it with iconv, or write it anew") from error
    except ValueError as error:
        raise ConfigError(f"config {str(path)!r} {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree


def write_yaml(path: Path, tree: dict[str, Any]) -> None:
    """Write keys and values, in their order; the file is there whole or as it was."""
    yaml, made = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = LARGEST  # a key and its value stand on one line
    yaml.dump(tree, made)
    if len(made.getvalue().encode()) > LARGEST:
        raise ConfigError(
            f"{str(path)!r} would have more than the {LARGEST:,} bytes that are read again: name a folder or a "
            "pattern, where data.path names many files"
        )
    partial = path.with_name(path.name + ".partial")
    partial.write_text(made.getvalue(), encoding="utf-8")
    partial.replace(path)


def small_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a file of at most `largest` bytes.

    Raises:
        OSError: It cannot be read, is no file but a pipe or a device, from which one would wait for ever, or is larger.
        UnicodeDecodeError: It is not UTF-8.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # of which Python says what is wrong
        raise OSError(0, "it is no file, but a pipe or a device", str(path))
    if about.st_size > largest:
        raise OSError(0, f"it has {about.st_size:,} bytes, and at most {largest:,} are read", str(path))
    return path.read_text(encoding="utf-8")


def read_json(path: Path, largest: int = 16 * LARGEST) -> Any:
    """What a JSON file of so many bytes at most says; OSError if it cannot be read, ValueError if it is damaged."""
    try:
        return json.loads(small_text(path, largest))
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} is nested too deeply") from error
