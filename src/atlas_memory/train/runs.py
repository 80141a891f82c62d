"""A run's folder: making its model, loading it back, finding its checkpoints, reading its log.

run.yaml  config.json  model.safetensors  tokenizer.json ...   the run and its last model
checkpoint-N/                                                  what `--resume` continues from: checkpoints.py
log.jsonl, samples.jsonl                                       a line a step; a line for every text that was written
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atlas_memory.data.tokenization import read_tokenizer
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.models import PRESETS, AtlasConfig, AtlasForCausalLM
from atlas_memory.rules.names import meant
from atlas_memory.rules.validation import check_size
from atlas_memory.train import sharded
from atlas_memory.train.checkpoints import (
    DIGESTS,
    WEIGHTS,
    broken,
    has_weights,
    newest_checkpoint,
    newest_step,
    number,
)
from atlas_memory.train.config import ConfigError, RunConfig, load_saved
from atlas_memory.train.loaded import LARGEST_STATE, STATE
from atlas_memory.train.names import nearest
from atlas_memory.train.saved import (
    Refused,
    check_fit,
    read_model,
    read_weights,
    saved_config,
)
from atlas_memory.train.yaml_files import read_json


def model_config(config: RunConfig, tokenizer: Any) -> AtlasConfig:
    """The run's `AtlasConfig`; vocabulary and special tokens are the tokenizer's unless set, or those of the model to
    begin with. ConfigError if wrong."""
    known = {f"model.{name}" for name in ("preset", "init_from", *AtlasConfig.__annotations__)}
    for name, value in config.model.overrides.items():
        if f"model.{name}" not in known:
            raise ConfigError(f"unknown key model.{name} (={value!r}){nearest(f'model.{name}', known)}")
    if config.model.preset not in PRESETS:
        raise ConfigError(f"model: preset {config.model.preset!r} is unknown; {meant(config.model.preset, PRESETS)}")
    if config.model.init_from is None:
        fields = {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **config.model.overrides,
        }
        remedy = "make it as large, or leave it out"
    else:
        saved = _first(config.model.init_from)[1]
        fields = _merged({name: getattr(saved, name) for name in AtlasConfig.__annotations__}, config.model.overrides)
        remedy = "take the data.tokenizer that the model in model.init_from was trained with"
    check_size("model.vocab_size", fields["vocab_size"])
    if fields["vocab_size"] < len(tokenizer):
        raise ConfigError(
            f"model.vocab_size={fields['vocab_size']} is smaller than the tokenizer's {len(tokenizer)}; {remedy}"
        )
    try:
        if config.model.init_from is not None:
            return AtlasConfig(**fields)
        return AtlasConfig.preset(config.model.preset, **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {' '.join(str(error).split())}") from error


def check_growth(config: RunConfig, model: Any) -> None:
    """ConfigError if rows are to keep what a state that grows for ever has read."""
    if config.data.order == "stream" and any(getattr(layer, "grows", False) for layer in model.modules()):
        raise ConfigError(
            "data.order='stream' keeps what rows remember, and the state of this model grows with what it reads: "
            "take data.order=packed or crops"
        )


def check_gates(config: RunConfig, model: Any) -> None:
    """ConfigError if gates are to have a learning rate of their own, and there are none that could."""
    if config.train.gate_rate != 1 and not any(isinstance(module, GateProjection) for module in model.modules()):
        raise ConfigError(
            f"train.gate_rate={config.train.gate_rate} is the learning rate of gates, and block="
            f"{model.config.block!r} has none that are learned by themselves: leave it out"
        )


def first_model(config: RunConfig, architecture: AtlasConfig) -> Any:
    """The model with which a run begins: new, or with the weights in `model.init_from`. ConfigError if they do not
    fit."""
    if config.model.init_from is None:
        return AtlasForCausalLM(architecture)
    folder, _ = _first(config.model.init_from)
    try:
        check_fit(folder, architecture, "the options of this run")
        return read_weights(folder, architecture)
    except ValueError as error:
        raise ConfigError(f"model.init_from: {error}") from error


def _first(init_from: str) -> tuple[Path, AtlasConfig]:
    """Where the model to begin with is, and its configuration; ConfigError if there is none."""
    try:
        if Path(init_from).expanduser().is_file():
            raise ValueError(f"{init_from!r} is a file: give the folder of a run, or of save_pretrained")
        folder = _newest_model(Path(init_from).expanduser())
        return folder, saved_config(folder)
    except ValueError as error:
        raise ConfigError(f"model.init_from: {error}") from error


def _merged(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`options` with `changes`, mappings in mappings merged likewise."""
    both = options | changes
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(options.get(name), dict):
            both[name] = _merged(options[name], value)
    return both


@dataclass(frozen=True)
class Run:
    """A trained model (in eval mode), its tokenizer, its folder, the configuration of the run, if the folder or that of
    which it is a checkpoint has one, and the step that the weights are of (infinite where that is not known)."""

    model: Any
    tokenizer: Any
    folder: Path
    config: RunConfig | None
    step: float


def load_run(folder: str | Path) -> Run:
    """Load what `atlas train` (or `save_pretrained`) left in `folder`, onto the GPU if there is one.

    A run that was stopped before it saved its (last) model is read from its newest intact checkpoint. ValueError for
    a missing or empty folder, a damaged file, or weights that do not fit `config.json`.
    """
    folder = Path(folder)
    source = _newest_model(folder)
    try:
        model = read_model(source)
    except Refused:  # nothing is damaged, and a checkpoint would be refused too
        raise
    except ValueError as error:
        checkpoint = newest_checkpoint(folder) if source == folder else None
        if checkpoint is None:
            raise
        remedy = f"{checkpoint.name} is intact: move {WEIGHTS} away, and the run is read from it"
        raise ValueError(f"{error}; {remedy}") from error
    try:
        tokenizer = read_tokenizer(source)
    except ValueError as error:
        raise ValueError(f"the tokenizer in {str(source)!r} {error}") from error
    home = folder.resolve().parent if not (folder / "run.yaml").is_file() and (folder / DIGESTS).is_file() else folder
    config = load_saved(home) if (home / "run.yaml").is_file() else None
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Run(model, tokenizer, folder, config, saved_step(source))


def _newest_model(folder: Path) -> Path:
    """The folder itself, or its newest intact checkpoint where that is newer or all there is; ValueError if neither."""
    if not folder.is_dir():
        why = "it is a file" if folder.is_file() else "the folder does not exist"
        raise ValueError(f"no run at {str(folder)!r}: {why}")
    if (folder / DIGESTS).is_file() and (reason := broken(folder)):
        raise ValueError(f"the checkpoint {str(folder)!r} is damaged ({reason}): take another one")
    whole = has_weights(folder) or sharded.is_in(folder)
    if whole and newest_step(folder) <= saved_step(folder):
        return folder
    checkpoint = newest_checkpoint(folder)
    if whole and (checkpoint is None or number(checkpoint) <= saved_step(folder)):
        return folder
    if checkpoint is None:
        raise ValueError(f"no run at {str(folder)!r}: it holds neither {WEIGHTS} nor an intact checkpoint")
    return checkpoint


def saved_step(folder: Path) -> float:
    """The step at which a model was saved; a folder that does not say (no run of ours) counts as finished."""
    try:
        return float(read_json(folder / STATE, LARGEST_STATE)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
