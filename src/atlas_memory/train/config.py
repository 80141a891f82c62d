"""The one description of a run: what a YAML file may say, what the command line may override, what is
saved."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import PydanticCustomError

from atlas_memory.data.sources import is_dataset_name
from atlas_memory.train.names import nearest
from atlas_memory.train.sections import DataSection, ModelSection, Section, TrainSection
from atlas_memory.train.yaml_files import CONFIGS, ConfigError, parse, read_yaml, write_yaml

__all__ = ["ConfigError", "DataSection", "ModelSection", "RunConfig", "TrainSection", "load_config", "load_saved"]
MOST_PARTS = 32


def _at_home(folder: str) -> str:
    found = Path(folder).expanduser() if folder.startswith("~") else Path(folder)  # or a folder named ~ would be made
    try:
        found.is_dir()
    except OSError as error:
        raise PydanticCustomError("path", f"input is no name of a folder: {error.strerror}") from error
    return str(found) if folder.startswith("~") else folder


class RunConfig(Section):
    """Everything that a run depends on."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    output_dir: Annotated[str, AfterValidator(_at_home)] = Field(default="runs/atlas", min_length=1)

    def check_lengths(self) -> None:
        """ConfigError unless segments can grow as `data.lengths` says."""
        if self.data.lengths and self.data.order == "crops":
            raise ConfigError("data.lengths needs rows that read on: take data.order=stream or packed")
        before, rows = self.data.seq_len, self.train.batch_size
        for step, length in sorted(self.data.lengths.items()):
            if step < 1:
                raise ConfigError(f"data.lengths: {step} is no step after the first: set data.seq_len={length}")
            if length <= before or length % before:
                raise ConfigError(f"data.lengths: {length} from step {step} on is no multiple of {before} before it")
            if rows * self.data.seq_len % length:
                raise ConfigError(
                    f"data.lengths: train.batch_size={rows} rows of {self.data.seq_len} tokens are no whole number of "
                    f"rows of {length}: make train.batch_size a multiple of {length // self.data.seq_len}"
                )
            before = length

    def resolved(self) -> RunConfig:
        """The same with the paths that are read made absolute, so that the run can be read from anywhere."""
        copy = self.model_copy(deep=True)
        for section, name in ((copy.data, "path"), (copy.model, "init_from")):
            path = getattr(section, name)
            if path is not None:
                setattr(section, name, [_absolute(p) for p in path] if isinstance(path, list) else _absolute(path))
        if copy.data.tokens != "bytes" and Path(copy.data.tokens).expanduser().is_dir():
            copy.data.tokenizer = _absolute(copy.data.tokens)
        return copy

    def save(self, path: Path) -> None:
        """Write it as YAML, `resolved`."""
        write_yaml(path, self.resolved().model_dump())


def _absolute(path: str) -> str:
    """A path that can be read from anywhere; the name of a dataset on a hub stays as it is."""
    found = Path(path).expanduser()
    return path if is_dataset_name(path) else str(found.resolve())


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The file's values (None: the defaults) with `overrides` such as `"train.steps=500"` put on top.

    A name such as "340m", where there is no file of that name, is the configuration that comes with the library.
    Values are read as YAML. ConfigError (a ValueError of one line) names the key, the value and the remedy.
    """
    tree = {}
    if path is not None:
        ours = CONFIGS / f"{path}.yaml"
        tree = read_yaml(ours if ours.is_file() and not Path(path).exists() else Path(path))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals and (text.endswith((".yaml", ".yml")) or (CONFIGS / f"{text}.yaml").is_file()):
            raise ConfigError(f"{text!r} is a configuration, which is given by: --config {text}")
        if not equals or not key:
            raise ConfigError(f"override {text!r} is not of the form key=value, such as train.steps=500")
        _set(tree, key, _value(key, value))
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def load_saved(folder: Path) -> RunConfig:
    """What the `run.yaml` of a run says, which has every section; ConfigError for one that was cut short."""
    saved = folder / "run.yaml"
    lacking = [name for name in ("model", "data", "train", "output_dir") if name not in read_yaml(saved)]
    if lacking:
        raise ConfigError(f"{str(saved)!r} was cut short, and has no {', '.join(lacking)}: write them anew")
    return load_config(saved)


def _value(key: str, text: str) -> Any:
    """The value of an override: YAML. Of a key that takes a text, such as a path, the text as it is, unless it is
    empty, null, a list or wholly in quotes."""
    section: Any = RunConfig
    name, takes_text = key, False
    if name == "data.path" and text.strip(" '\"") == "":
        raise ConfigError("data.path is empty: name a text, or leave it out for the standard library's source")
    while isinstance(section, type) and issubclass(section, BaseModel):
        part, _, name = name.partition(".")
        section = getattr(section.model_fields.get(part), "annotation", None)
        mapping = typing.get_origin(section) is dict
        takes_text = not name and not mapping and (section is str or str in typing.get_args(section))
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if takes_text and text not in ("", "~", "null") and not text.startswith("[") and not quoted:
        return text
    try:
        return parse(text)
    except ValueError as error:
        if takes_text:
            return text
        raise ConfigError(f"override {f'{key}={text}'!r}: the value {error}") from error


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    if len(parents) > MOST_PARTS:
        raise ConfigError(f"unknown key {key}: no key has more than {MOST_PARTS} parts")
    for name in parents:
        branch = tree.get(name)
        if branch is None:
            branch = tree[name] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{key}: {name} is a value ({branch!r}), not a section")
        tree = branch
    tree[last] = value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    known = set(keys(RunConfig))
    parts = [str(part) for part in first["loc"]]
    # What stands behind a key says where in its value, or of which type, the error is.
    whole = next((n for n in range(1, len(parts)) if ".".join(parts[:n]) in known), len(parts))
    key = ".".join(parts[:whole])
    if first["type"] == "extra_forbidden":
        section, dot, name = str(first["loc"][-1]).partition(".")
        if dot:
            return f"{key} has a dot, and files have sections: write {section}: {{{name}: {first['input']}}}"
        if isinstance(first["input"], dict) and (meant := difflib.get_close_matches(key, RunConfig.model_fields, 1)):
            return f"unknown section {key}; did you mean {meant[0]}?"
        return f"unknown key {key} (={first['input']!r}){nearest(key, keys(RunConfig))}"
    if first["type"] == "model_type":
        one = next(name for name in keys(RunConfig) if name.startswith(f"{key}."))
        return f"{key} is a section, not {first['input']!r}: set its keys, such as {one}"
    message = first["msg"][0].lower() + first["msg"][1:]
    remedy = "; write {500: 512}, with a space behind the colon" if key.startswith("data.lengths") else ""
    return f"{key}={first['input']!r}: {message}{remedy}"


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The names of all keys of a section, such as `train.steps`."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name
