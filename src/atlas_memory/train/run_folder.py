"""The small files of a run's folder, read without torch.

run.yaml        the settings, with every key
data.json       fingerprint of the text, and the settings that the run began with
log.jsonl, memory.jsonl, samples.jsonl          a line a step, a probe, a sample: logs.py
config.json, model.safetensors, tokenizer.json  the model as last saved: run_model.py
checkpoint-N/   what `--resume` continues from: checkpoint.py

YAML is read by version 1.2; aliases, which can expand without bound, and tags, which change types, are refused.
"""

from __future__ import annotations

import json
import stat
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import Node

RUN_YAML, DATA_JSON = "run.yaml", "data.json"
BYTE_TOKENS = "bytes"
"""Entry of `data.json`: whether tokens are bytes."""
DEFAULT_STEPS = 1000
"""Steps of a run that sets neither `train.steps` nor `train.max_minutes`."""
CONFIGS = Path(__file__).with_name("configs")
LARGEST = 2**18
"""Bytes of a YAML file, at most; they take a second or two to read."""


class ConfigError(ValueError):
    """Settings of a run that cannot be used; the message is one line."""


class _PlainComposer(Composer):
    def compose_node(self, parent: Any, index: int) -> Node | None:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent) or event.anchor:
            problem = f"the alias {event.anchor}: write out what it stands for"
            raise ComposerError(problem=problem, problem_mark=event.start_mark)
        if event.tag is not None and event.tag != "!":  # that of a text in quotes
            problem = f"the tag {event.tag.replace('tag:yaml.org,2002:', '!!')}: leave it out"
            raise ComposerError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def parse_yaml(text: str) -> Any:
    """The value of a YAML 1.2 text (`on` and `1:30` are texts, `010` is ten). ValueError if it is not
    YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _PlainComposer
    try:
        return yaml.load(text)
    except RecursionError as error:
        raise ValueError("is not YAML (it is nested too deeply)") from error
    except (YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        if mark is None or problem is None:  # an impossible date or character
            raise ValueError(f"is not YAML ({' '.join(str(error).split())})") from error
        raise ValueError(f"is not YAML (line {mark.line + 1}: {problem.partition(chr(10))[0]})") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file; ConfigError if it cannot be read."""
    try:
        tree = parse_yaml(read_small_text(path))
    except OSError as error:
        ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}; by name there are {ours}") from error
    except UnicodeError as error:
        raise ConfigError(f"config {str(path)!r} is not UTF-8 text: convert it with iconv") from error
    except ValueError as error:
        raise ConfigError(f"config {str(path)!r} {error}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} must hold keys and values, not a {type(tree).__name__}")
    return tree or {}


def write_yaml(path: Path, tree: dict[str, Any]) -> None:
    """Write keys and values in their order."""
    yaml, made = YAML(typ="safe", pure=True), StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = LARGEST  # no line breaks in values
    yaml.dump(tree, made)
    if len(made.getvalue().encode()) > LARGEST:
        raise ConfigError(
            f"{str(path)!r} would have more than {LARGEST:,} bytes, and could not be read again: name a folder or a "
            "pattern in data.path"
        )
    replace_text(path, made.getvalue())


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_small_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a file. OSError if it is a pipe or a device, or has more bytes; UnicodeDecodeError if not UTF-8."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # open refuses folders
        raise OSError(0, "it is no file, but a pipe or a device", str(path))
    if about.st_size > largest:
        raise OSError(0, f"it has {about.st_size:,} bytes, and at most {largest:,} are read", str(path))
    return path.read_text(encoding="utf-8")


def read_json(path: Path, largest: int = 16 * LARGEST) -> Any:
    """The value of a JSON file; OSError if it cannot be read, ValueError if it is damaged."""
    try:
        return json.loads(read_small_text(path, largest))
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} is nested too deeply") from error


def read_data_json(folder: Path) -> dict[str, Any]:
    """The data.json of the run in `folder`; empty if that is missing or damaged."""
    try:
        found = read_json(folder / DATA_JSON)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_byte_tokens(folder: Path) -> bool:
    """Whether the tokens of the run in `folder` are bytes."""
    return bool(read_data_json(folder).get(BYTE_TOKENS))


def flat_settings(folder: Path) -> dict[str, Any]:
    """The settings in `run.yaml`, by keys such as "train.steps"; empty if there is none, ValueError if it is not
    readable or not whole yet."""
    try:
        return _flat_yaml(read_small_text(folder / RUN_YAML))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"run.yaml cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError("run.yaml is not UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"run.yaml {error}") from error


@lru_cache(64)  # the dashboard asks every two seconds
def _flat_yaml(text: str) -> dict[str, Any]:
    tree = parse_yaml(text) or {}
    if not isinstance(tree, dict):
        raise ValueError("has no keys and values")
    return dict(_flat(tree))


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, value in tree.items() for leaf in _flat(value, f"{prefix}.{key}" if prefix else str(key))]
