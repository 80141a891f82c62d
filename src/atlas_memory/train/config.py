"""The settings of a run, from a YAML file and the command line. The docstring below each key is its description.

Limits are far beyond what anybody trains: a slip must not ask for gigabytes, or for years.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from atlas_memory.data.sources import is_dataset_name
from atlas_memory.rules.validation import suggest
from atlas_memory.train.run_folder import (
    CONFIGS,
    DEFAULT_STEPS,
    RUN_YAML,
    ConfigError,
    parse_yaml,
    read_yaml,
    write_yaml,
)

__all__ = ["ConfigError", "DataSection", "ModelSection", "RunConfig", "TrainSection", "load_config", "load_saved"]
LARGEST_COUNT = 10**9
Tokens = Annotated[int, Field(ge=2, le=2**20)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Minutes = Annotated[float, Field(gt=0, le=LARGEST_COUNT)]


def _expand_home(folder: str) -> str:
    found = Path(folder).expanduser() if folder.startswith("~") else Path(folder)
    try:
        found.is_dir()
    except OSError as error:
        raise PydanticCustomError("path", f"input is no name of a folder: {error.strerror}") from error
    return str(found) if folder.startswith("~") else folder


def _as_list(names: Any) -> Any:
    return [] if names in ("none", ["none"]) else [names] if isinstance(names, str) else names


class Section(BaseModel):
    """Keys with values of exactly their types: an integer is not 3.0, and true is not 1."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and re.search("[\0\ud800-\udfff]", text):  # surrogates: not UTF-8
                raise PydanticCustomError("text", "input should be UTF-8 text without the character NUL")
        return value


class ModelSection(Section):
    """The model: a preset, and any field of `AtlasConfig` that differs from it (checked when the model is made)."""

    model_config = ConfigDict(extra="allow")

    preset: str = "tiny"
    """The preset whose options and learning rate are taken: nano, tiny, mini, 50m, 170m, 340m, 400m, 760m or 1.3b."""
    init_from: str | None = Field(default=None, min_length=1)
    """Folder of a run, a checkpoint or `save_pretrained` whose weights the run starts from. That model's options
    replace the preset's; options given here change them, key by key within a mapping, as long as the weights fit."""

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class DataSection(Section):
    """The text, and how examples are taken from it."""

    path: str | Annotated[list[str], Field(max_length=1000)] | None = None
    """A text file, a folder, a pattern, JSON lines, Parquet, a saved dataset, the name of a dataset on a hub, a list of
    these, or a folder made by `atlas data prepare`. Null: the source of Python's standard library."""
    column: str = "text"
    """The column of tables that holds the text."""
    split: str = "train"
    """The split of a dataset."""
    subset: str | None = None
    """The subset (configuration) of a dataset."""
    streaming: bool = False
    """Read a dataset on a hub as it arrives, without downloading it first."""
    max_documents: Count | None = None
    """Read only the first so many documents. Null: all."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """The share of documents that is kept for evaluation."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """"bytes", a name or a folder. Null: the tokenizer of a prepared text, otherwise "bytes"."""
    seq_len: Tokens = 256
    """Tokens of a training segment; gradients stay within it."""
    seq_len_schedule: Annotated[dict[int, Tokens], Field(max_length=64)] = {}
    """Longer segments from given steps on, such as {500: 512, 800: 2048}. Each length is a multiple of the one before.
    A step keeps its number of tokens, and so has fewer rows."""
    order: Literal["stream", "packed", "crops"] = "stream"
    """How segments are taken from documents. "stream": each row reads documents in order and keeps its memory state
    from one step to the next (truncated backpropagation through time). "packed": the same segments, each with an empty
    memory. "crops": segments at random places, across the ends of documents, each with an empty memory."""
    interleave: int | None = Field(default=None, ge=1, le=2**16)
    """With "stream" or "packed": so many groups of rows take turns, one group a step, so that consecutive steps learn
    from different documents. Null: 16, or fewer where the text is short."""
    reset_every: Count | None = None
    """With "stream" or "packed": after so many segments a row moves to another place in the text, with an empty memory.
    Null: rows read documents to their ends."""
    pass_states: float = Field(default=0.0, ge=0, le=1)
    """The share of documents (or places, with `reset_every`) that a row begins with the state of the one before instead
    of an empty memory."""

    @property
    def tokens(self) -> str:
        return self.tokenizer or "bytes"

    @property
    def longest(self) -> int:
        """Tokens of the longest segments."""
        return max([self.seq_len, *self.seq_len_schedule.values()])

    @property
    def source(self) -> dict[str, Any]:
        """The arguments of `load_corpus`."""
        names = ("path", "column", "split", "subset", "streaming", "held_out")
        return {name: getattr(self, name) for name in names} | {"documents_at_most": self.max_documents}


class TrainSection(Section):
    """How to train."""

    steps: Count | None = None
    """Optimizer steps. Null: 1,000, or as many as `max_minutes` hold."""
    max_minutes: Minutes | None = None
    """End after so many minutes, if `steps` do not end the run before."""
    batch_size: int = Field(default=16, ge=1, le=2**16)
    """Rows of one process in one forward pass."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=2**12)
    """Forward and backward passes per optimizer step."""
    optimizer: Literal["adamw", "muon", "m3"] = "adamw"
    """AdamW; PyTorch's Muon with AdamW for what is no matrix; or M3 of Nested Learning."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate. Null: that of the preset."""
    gate_lr_scale: float = Field(default=1.0, ge=0)
    """Learning rate of the memories' gates, as a multiple of the others'."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate over the steps or minutes, whichever end first. "cosine": down to zero. "wsd": constant, then
    linear to zero over the last fifth; take it for a run that is to be made longer later."""
    warmup_steps: CountOrZero = 50
    """Steps over which the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Of the weights of linear layers; nothing else decays."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    evaluate_every: CountOrZero = 200
    """Steps between evaluations on held-out text. 0: never."""
    sample_tokens: int = Field(default=100, ge=0, le=10**5)
    """Tokens to generate after each evaluation. 0: none."""
    prompt: str | None = None
    """What generated samples begin with. Null: the beginning of the held-out text."""
    probe_every: CountOrZero = 100
    """Steps between probes of the memories (memory.jsonl, alarms). 0: never."""
    alarm_webhook: str | None = Field(default=None, pattern=r"^https?://[^\s/?#]+\S*$")
    """URL that receives a POST when a memory has become useless."""
    save_every: Count = 200
    """Steps between checkpoints."""
    save_minutes: Minutes | None = 10.0
    """The most minutes between checkpoints. Null: steps alone decide."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints are kept."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass, to save memory."""
    compile: bool = False
    """Compile the memories' chunk computation with torch.compile at the first step."""
    cuda_graphs: bool | None = None
    """Record memories as CUDA graphs. Null: on a GPU, unless `fsdp` or `gradient_checkpointing` is on."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer states among the processes of torchrun (FSDP2)."""
    report_to: Annotated[list[str], Field(max_length=16), BeforeValidator(_as_list)] = []
    """Experiment trackers, by transformers' names, such as ["tensorboard"]; "none" is none."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of weights, order and dropout."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads. Null: PyTorch's default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU if there is one."""
    bf16: bool | None = None
    """Autocast to bfloat16. Null: on a GPU that supports it."""

    @property
    def last_step(self) -> int:
        """The step at which the run ends, unless the clock ends it before."""
        return self.steps or (DEFAULT_STEPS if self.max_minutes is None else 10_000_000)


class RunConfig(Section):
    """Everything that a run depends on."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    output_dir: Annotated[str, AfterValidator(_expand_home)] = Field(default="runs/atlas", min_length=1)
    """The folder of the run; a new or an empty one."""

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        run = self.train
        if run.cuda_graphs and run.gradient_checkpointing:
            raise ValueError("train.cuda_graphs=true does not go with train.gradient_checkpointing=true: drop one")
        if run.fsdp and run.optimizer != "adamw":
            raise ValueError(
                f"train.optimizer={run.optimizer!r} needs whole matrices, which train.fsdp=true shards: take "
                "train.optimizer=adamw, or leave train.fsdp out"
            )
        schedule, before, tokens = "data.seq_len_schedule", self.data.seq_len, run.batch_size * self.data.seq_len
        if self.data.seq_len_schedule and self.data.order == "crops":
            raise ValueError(f"{schedule} needs rows that read on: take data.order=stream or packed")
        for step, length in sorted(self.data.seq_len_schedule.items()):
            if step < 1:
                raise ValueError(f"{schedule}: {step} is no step after the first: set data.seq_len={length}")
            if length <= before or length % before:
                raise ValueError(f"{schedule}: {length} from step {step} on is no multiple of {before} before it")
            if tokens % length:
                raise ValueError(
                    f"{schedule}: train.batch_size={run.batch_size} rows of {self.data.seq_len} tokens do not divide "
                    f"into rows of {length}: make train.batch_size a multiple of {length // self.data.seq_len}"
                )
            before = length
        return self

    def resolved(self) -> RunConfig:
        """A copy with absolute paths, so that the run can be read from anywhere."""
        copy = self.model_copy(deep=True)
        for section, name in ((copy.data, "path"), (copy.model, "init_from")):
            path = getattr(section, name)
            if path is not None:
                setattr(section, name, [_absolute(p) for p in path] if isinstance(path, list) else _absolute(path))
        if copy.data.tokens != "bytes" and Path(copy.data.tokens).expanduser().is_dir():
            copy.data.tokenizer = _absolute(copy.data.tokens)
        return copy

    def save(self, path: Path) -> None:
        write_yaml(path, self.resolved().model_dump())


def _absolute(path: str) -> str:
    return path if is_dataset_name(path) else str(Path(path).expanduser().resolve())


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings in a YAML file (None: the defaults), changed by `overrides` such as `"train.steps=500"`.

    A name such as "340m", where there is no file of that name, is a configuration of the library. ConfigError (a
    ValueError of one line) names the key, the value and the remedy.
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
    """The settings in the `run.yaml` of a run; ConfigError if it is damaged."""
    saved = folder / RUN_YAML
    if read_yaml(saved).keys() != RunConfig.model_fields.keys():
        raise ConfigError(f"{str(saved)!r} was cut short: it needs {', '.join(RunConfig.model_fields)}")
    return load_config(saved)


def _value(key: str, text: str) -> Any:
    """The value of an override, YAML; text as it is for keys that take text, unless it is a list, null or quoted."""
    if key == "data.path" and text.strip(" '\"") == "":
        raise ConfigError("data.path is empty: name a text, or leave it out for the standard library's source")
    found: Any = RunConfig
    for name in key.split("."):
        field = found.model_fields.get(name) if isinstance(found, type) and issubclass(found, BaseModel) else None
        found = getattr(field, "annotation", None)
    takes_text = found is str or (typing.get_origin(found) is not dict and str in typing.get_args(found))
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if takes_text and text not in ("", "~", "null") and not text.startswith("[") and not quoted:
        return text
    try:
        return parse_yaml(text)
    except ValueError as error:
        if takes_text:
            return text
        raise ConfigError(f"override {f'{key}={text}'!r}: the value {error}") from error


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    if len(parents) > 32:
        raise ConfigError(f"unknown key {key}: no key has so many parts")
    for name in parents:
        branch = tree.get(name)
        if branch is None:
            branch = tree[name] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{key}: {name} is a value ({branch!r}), not a section")
        tree = branch
    tree[last] = value


def _explain(error: ValidationError) -> str:
    """The first error in one line: key, value, remedy."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    known = set(keys(RunConfig))
    parts = [str(part) for part in first["loc"]]
    # pydantic appends the index or the type to the key.
    whole = next((n for n in range(1, len(parts)) if ".".join(parts[:n]) in known), len(parts))
    key = ".".join(parts[:whole])
    if first["type"] == "extra_forbidden":
        section, dot, name = str(first["loc"][-1]).partition(".")
        if dot:
            return f"{key} has a dot, and files have sections: write {section}: {{{name}: {first['input']}}}"
        if isinstance(first["input"], dict) and (meant := difflib.get_close_matches(key, RunConfig.model_fields, 1)):
            return f"unknown section {key}; did you mean {meant[0]}?"
        return f"unknown key {key} (={first['input']!r}); {suggest(key, sorted(known), ALIASES)}"
    if first["type"] == "model_type":
        one = next(name for name in keys(RunConfig) if name.startswith(f"{key}."))
        return f"{key} is a section, not {first['input']!r}: set its keys, such as {one}"
    message = first["msg"][0].lower() + first["msg"][1:]
    remedy = "; write {500: 512}, with a space behind the colon" if key == "data.seq_len_schedule" else ""
    return f"{key}={first['input']!r}: {message}{remedy}"


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The names of all keys, such as `train.steps`."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


ALIASES = {
    "train.steps": ("epochs", "num_epochs", "num_train_epochs", "max_steps"),
    "train.learning_rate": ("lr", "max_lr"),
    "train.grad_clip": ("max_grad_norm", "max_norm"),
    "train.evaluate_every": ("eval_steps", "eval_interval"),
    "train.schedule": ("lr_scheduler_type", "lr_scheduler"),
    "data.path": ("dataset", "file"),
    "model.num_hidden_layers": ("layers", "num_layers", "n_layer", "depth"),
    "model.num_attention_heads": ("heads", "num_heads", "n_head"),
    "model.hidden_size": ("dim", "width", "d_model", "n_embd"),
    "output_dir": ("out", "output"),
}
"""Names of keys in other programs."""
