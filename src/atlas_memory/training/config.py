"""The one description of a run: what a YAML file may say, what the command line may override, what is
saved."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from atlas_memory.data.sources import is_dataset_name
from atlas_memory.training.names import nearest
from atlas_memory.training.settings import UNASKED_STEPS
from atlas_memory.training.yaml_files import CONFIGS, ConfigError, Loader, place_of, read_yaml


def _at_home(folder: str) -> str:
    return str(Path(folder).expanduser()) if folder.startswith("~") else folder  # or a folder named ~ would be made


def _programs(names: Any) -> Any:
    return [] if names in ("none", ["none"]) else [names] if isinstance(names, str) else names


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, field: ValidationInfo) -> Any:
        kind = cls.model_fields[str(field.field_name)].annotation
        if value is True and bool not in (kind, *typing.get_args(kind)):
            raise PydanticCustomError("true", "input should not be true")
        return value


class ModelSection(_Section):
    """A preset's name, and any field of `AtlasConfig` that is to differ from it (checked when the model is
    made).

    `init_from`, the folder of a run or of `save_pretrained`: begin with that model's weights. Its options take the
    place of the preset's, of which the learning rate remains; those given here change them, within a mapping key by
    key, as long as the weights fit.
    """

    model_config = ConfigDict(extra="allow")

    preset: str = "tiny"
    init_from: str | None = Field(default=None, min_length=1)

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataSection(_Section):
    """Which text, cut how.

    `path`: a text file, a folder, a pattern, JSON lines, Parquet, a saved dataset, a dataset's name on a hub, a list of
    these, or a folder of `atlas data prepare`; None: the standard library's source. `column`: where tables have the
    text; `split`, `subset`: of a dataset; `streaming`: read a hub's dataset as it comes, not downloading it first;
    `documents`: read only the first so many; `held_out`: the share of documents that is not trained on. `tokenizer`:
    "bytes", a name or a folder; null: that of a prepared text, of any other "bytes".

    `lengths`: steps, and the tokens of a segment from that step on, such as {500: 512, 800: 2048}. A step reads as many
    tokens as before, so that as many times fewer rows. Each is a multiple of the one before, the first of `seq_len`.

    `order`, how examples of `seq_len` tokens are taken from the documents:

    * "stream": every row reads documents in order, a segment a step, and keeps what it remembers from one step to the
      next; gradients stay within a segment. `lanes`: so many steps pass until the same rows are read again, so that
      steps one after the other learn from other documents; null: 16, or fewer where the text is short. `carry`: after
      so many segments a row goes on in another place, with an empty memory; null: at the document's end.
      `pass_states`: the share of such beginnings at which the row keeps what it remembers of the place before.
    * "packed": the same segments, each of which begins with an empty memory.
    * "crops": segments at random places, over the ends of documents, each with an empty memory.
    """

    path: str | list[str] | None = None
    column: str = "text"
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    documents: int | None = Field(default=None, ge=1)
    held_out: float = Field(default=0.1, gt=0, lt=1)
    tokenizer: str | None = Field(default=None, min_length=1)
    seq_len: int = Field(default=256, ge=2)
    lengths: dict[int, int] = {}
    order: Literal["stream", "packed", "crops"] = "stream"
    lanes: int | None = Field(default=None, ge=1)
    carry: int | None = Field(default=None, ge=1)
    pass_states: float = Field(default=0.0, ge=0, le=1)

    @property
    def tokens(self) -> str:
        """What `tokenizer` says of a text that is not prepared."""
        return self.tokenizer or "bytes"

    @property
    def longest(self) -> int:
        """Tokens in the longest segments of the run."""
        return max([self.seq_len, *self.lengths.values()])

    @property
    def source(self) -> dict[str, Any]:
        """The arguments of `load_corpus`."""
        names = ("path", "column", "split", "subset", "streaming", "held_out")
        return {name: getattr(self, name) for name in names} | {"documents_at_most": self.documents}


class TrainSection(_Section):
    """How to train. The learning rate follows `schedule` over the steps or over `max_minutes`, whichever ends first:
    "cosine" down to zero, or "wsd", its peak but for a linear way to zero in the last fifth, which a run that is to be
    made longer later should take. `report_to`: programs that draw curves, by transformers' names, such as
    ["tensorboard"]; "none" is none, as there."""

    steps: int | None = Field(default=None, ge=1, le=10**12)  # None: 1,000, or as many as `max_minutes` hold
    max_minutes: float | None = Field(default=None, gt=0)
    batch_size: int = Field(default=16, ge=1)  # rows of one process in one pass
    gradient_accumulation_steps: int = Field(default=1, ge=1)  # passes a step
    optimizer: Literal["adamw", "muon", "m3"] = "adamw"
    learning_rate: float | None = Field(default=None, gt=0)  # None: the preset's
    gate_rate: float = Field(default=1.0, ge=0)  # the gates' learning rate, as a share of the others'
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=50, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    evaluate_every: int = Field(default=200, ge=0)  # steps between readings of held-out text; 0: none
    sample_tokens: int = Field(default=100, ge=0)  # that the model writes whenever it has read held-out text; 0: none
    prompt: str | None = None  # what they follow; None: the beginning of the held-out text
    watch_every: int = Field(default=100, ge=0)  # steps between looks at the memories; 0: none
    alarm_webhook: str | None = Field(default=None, pattern=r"^https?://[^\s/?#]+\S*$")  # told of bad memories
    save_every: int = Field(default=200, ge=1)  # steps between checkpoints
    save_minutes: float | None = Field(default=10.0, gt=0)  # and at most so long between them; None: by steps alone
    keep_checkpoints: int = Field(default=2, ge=1)
    gradient_checkpointing: bool = False
    compiled: bool = False  # what happens in a memory's chunk, when training begins
    graphed: bool | None = None  # record memories as CUDA graphs; None: on a GPU, if nothing is sharded or recomputed
    fsdp: bool = False  # shard weights and optimiser among the processes of torchrun
    report_to: Annotated[list[str], BeforeValidator(_programs)] = []
    seed: int = Field(default=0, ge=0, lt=2**32)
    threads: int | None = Field(default=None, ge=1, le=1024)  # None: PyTorch's default
    device: Literal["auto", "cpu", "cuda"] = "auto"
    bf16: bool | None = None  # None: on a CUDA device that has it

    @property
    def last_step(self) -> int:
        """The step at which the run ends, if it is not ended before."""
        return self.steps or (UNASKED_STEPS if self.max_minutes is None else 10_000_000)


class RunConfig(_Section):
    """Everything that a run depends on.

    `then`: keys and values of a second run, which begins with the model at the end of this one, in the folder
    `output_dir`/then. What they do not name is as it was in this one, TNT's second stage being
    {model: {hierarchy: {local_chunks: [1]}}, train: {steps: 50}}. It may have a `then` of its own.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    output_dir: Annotated[str, AfterValidator(_at_home)] = Field(default="runs/atlas", min_length=1)
    then: dict[str, Any] = {}

    def in_turn(self) -> list[RunConfig]:
        """This run, and those that come `then`."""
        after = self.next()
        return [self] if after is None else [self, *after.in_turn()]

    def next(self) -> RunConfig | None:
        """The run that `then` describes, if any; ConfigError if it is none."""
        if not self.then:
            return None
        tree = self.model_dump(exclude={"then"})
        if isinstance(self.then.get("model"), dict) and "init_from" in self.then["model"]:
            raise ConfigError("then.model.init_from: what comes then begins with the model at the end of this run")
        tree["model"] = {"preset": self.model.preset, "init_from": self.output_dir}
        tree["output_dir"] = str(Path(self.output_dir) / "then")
        for name, value in self.then.items():
            if name in ("model", "data", "train") and isinstance(value, dict):
                tree[name] |= value
            elif name == "then":
                tree[name] = value
            else:
                raise ConfigError(f"then.{name}={value!r}: then has sections model, data and train, with keys in them")
        try:
            return RunConfig.model_validate(tree)
        except ValidationError as error:
            raise ConfigError(f"then: {_explain(error)}") from error

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
        if (after := self.next()) is not None:
            after = after.resolved()
            for name in ("path", "tokenizer"):
                if name in self.then.get("data", {}):
                    copy.then["data"][name] = getattr(after.data, name)
            if after.then:
                copy.then["then"] = after.then
        return copy

    def save(self, path: Path) -> None:
        """Write it as YAML, `resolved`."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(yaml.safe_dump(self.resolved().model_dump(), sort_keys=False), encoding="utf-8")
        partial.replace(path)


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
    name, takes_text = key.split("then.")[-1], False
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
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        if takes_text:
            return text
        raise ConfigError(f"override {f'{key}={text}'!r}: the value is not YAML{place_of(error)}") from error
    return value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
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
