"""The model of a run: made from its settings, saved into its folder, and loaded from there.

Loading runs no code from a folder: pickles, adapters, code and generation_config.json in it are not opened.
"""

from __future__ import annotations

import math
import re
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, TrainerState

from atlas_memory import __version__
from atlas_memory.data.tokenization import read_tokenizer
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.models import PRESETS, AtlasConfig, AtlasForCausalLM
from atlas_memory.rules.validation import check_size, suggest
from atlas_memory.train import checkpoint as checkpoints
from atlas_memory.train.config import ALIASES, ConfigError, RunConfig, load_saved
from atlas_memory.train.distributed import barrier, rank
from atlas_memory.train.run_folder import RUN_YAML, read_json
from atlas_memory.train.training_data import TrainingData

DEMO = Path(__file__).parent.parent / "demo"
"""The model that comes with the package, known as `demo`."""


@dataclass(frozen=True)
class Run:
    """A trained model, in eval mode."""

    model: Any
    tokenizer: Any
    folder: Path
    config: RunConfig | None  # None without a run.yaml
    step: float  # of the weights; infinite where it is not known


def model_folder(name: str | Path) -> Path:
    """The folder of a run; of `demo`, unless there is such a folder, the one of the model in the package."""
    folder = Path(name)
    return DEMO if folder == Path(DEMO.name) and not folder.exists() else folder


def load_run(folder: str | Path) -> Run:
    """Load what `atlas train` (or `save_pretrained`) left in `folder`, onto the GPU if there is one; `demo`: the small
    model in the package.

    A run that was stopped before it saved its last model is read from its newest intact checkpoint. ValueError for a
    missing or empty folder, a damaged file, or weights that do not fit `config.json`.
    """
    folder = model_folder(folder)
    source = _newest_model(folder)
    config = saved_config(source)
    check_fit(source, config, "its config.json")
    model = read_weights(source, config)
    try:
        tokenizer = read_tokenizer(source)
    except ValueError as error:
        raise ValueError(f"the tokenizer in {str(source)!r} {error}") from error
    is_checkpoint = (folder / checkpoints.DIGESTS).is_file() and not (folder / RUN_YAML).is_file()
    of_run = folder.resolve().parent if is_checkpoint else folder
    settings = load_saved(of_run) if (of_run / RUN_YAML).is_file() else None
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Run(model, tokenizer, folder, settings, saved_step(source))


def _newest_model(folder: Path) -> Path:
    """The folder itself, or its newest intact checkpoint where that is newer or the only one."""
    if not folder.is_dir():
        why = "it is a file" if folder.is_file() else "the folder does not exist"
        raise ValueError(f"no run at {str(folder)!r}: {why}")
    if (folder / checkpoints.DIGESTS).is_file() and (reason := checkpoints.damage(folder)):
        raise ValueError(f"the checkpoint {str(folder)!r} is damaged ({reason}): take another one")
    whole = (folder / checkpoints.WEIGHTS).is_file() or checkpoints.is_sharded(folder)
    if whole and checkpoints.newest_step(folder) <= saved_step(folder):
        return folder
    checkpoint = checkpoints.newest_checkpoint(folder)
    if whole and (checkpoint is None or checkpoints.step_of(checkpoint) <= saved_step(folder)):
        return folder
    if checkpoint is None:
        raise ValueError(f"no run at {str(folder)!r}: it holds neither {checkpoints.WEIGHTS} nor an intact checkpoint")
    return checkpoint


def saved_step(folder: Path) -> float:
    """The step at which a model was saved; infinite where that is not known."""
    try:
        return float(read_json(folder / checkpoints.STATE, checkpoints.LARGEST_STATE)["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf


def saved_config(folder: Path) -> AtlasConfig:
    """The configuration in a model's folder; ValueError if it is missing, damaged or not of a registered model."""
    path = folder / "config.json"
    try:
        saved = read_json(path)
        kind = saved["model_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is missing or damaged") from error
    if kind != AtlasConfig.model_type:
        raise ValueError(f"{str(folder)!r} holds a {kind!r} model, not an Atlas model")
    try:
        return AtlasConfig.from_dict(saved)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(path)!r} cannot be made into a model: {error}") from error


def check_fit(folder: Path, config: AtlasConfig, name_of_model: str) -> None:
    """ValueError unless the weights in `folder` have the names and shapes of a model of this configuration."""
    stored, what = checkpoints.weight_shapes(folder), f"the weights in {str(folder)!r}"
    if (layers := config.num_hidden_layers) > len(stored):  # before a million layers are made
        raise ValueError(f"{what} do not fit {name_of_model}: num_hidden_layers={layers} of {len(stored)} weights")
    with torch.device("meta"):
        model: Any = AtlasForCausalLM(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    for name in sorted(stored.keys() | wanted.keys() - tied):
        if stored.get(name) != wanted.get(name):
            both = ["absent" if shape is None else str(list(shape)) for shape in (stored.get(name), wanted.get(name))]
            raise ValueError(
                f"{what} do not fit {name_of_model}: {name} is {both[0]} in them and {both[1]} in the model"
            )


def read_weights(folder: Path, config: AtlasConfig) -> Any:
    """A model of this configuration with the weights in a folder, which fit it; ValueError if some are not finite."""
    if checkpoints.is_sharded(folder):
        model = AtlasForCausalLM(config)
        checkpoints.load_sharded_weights(folder, model)
    else:
        # Copied: products of weights at odd addresses of the file differ in the last bit.
        weights = {name: weight.clone() for name, weight in load_file(folder / checkpoints.WEIGHTS).items()}
        model = AtlasForCausalLM.from_pretrained(None, config=config, state_dict=weights)
        model.config.name_or_path = str(folder)
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(f"the weight {name} in {str(folder)!r} is not finite: take an older checkpoint")
    return model


def model_config(config: RunConfig, tokenizer: Any) -> AtlasConfig:
    """The run's `AtlasConfig`; vocabulary and special tokens are the tokenizer's unless set, or those of
    `model.init_from`."""
    known = {f"model.{name}" for name in ("preset", "init_from", *AtlasConfig.__annotations__)}
    for name, value in config.model.overrides.items():
        if f"model.{name}" not in known:
            raise ConfigError(
                f"unknown key model.{name} (={value!r}); {suggest(f'model.{name}', sorted(known), ALIASES)}"
            )
    if config.model.preset not in PRESETS:
        raise ConfigError(f"model: preset {config.model.preset!r} is unknown; {suggest(config.model.preset, PRESETS)}")
    if config.model.init_from is None:
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        fields = {"vocab_size": len(tokenizer)} | special | config.model.overrides
        remedy = "make it as large, or leave it out"
    else:
        saved = _init_from(config.model.init_from)[1]
        fields = _merge({name: getattr(saved, name) for name in AtlasConfig.__annotations__}, config.model.overrides)
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


def first_model(config: RunConfig, architecture: AtlasConfig) -> Any:
    """The model with which a run begins: new, or with the weights in `model.init_from`."""
    if config.model.init_from is None:
        return AtlasForCausalLM(architecture)
    folder = _init_from(config.model.init_from)[0]
    try:
        check_fit(folder, architecture, "the options of this run")
        return read_weights(folder, architecture)
    except ValueError as error:
        raise ConfigError(f"model.init_from: {error}") from error


def _init_from(init_from: str) -> tuple[Path, AtlasConfig]:
    """The folder of the first weights, and their configuration."""
    try:
        folder = _newest_model(Path(init_from).expanduser())
        return folder, saved_config(folder)
    except ValueError as error:
        raise ConfigError(f"model.init_from: {error}") from error


def _merge(options: Any, changes: Any) -> Any:
    if not isinstance(options, dict) or not isinstance(changes, dict):
        return changes
    return options | {name: _merge(options.get(name), value) for name, value in changes.items()}


def save_model(
    folder: Path, model: Any, state: TrainerState, data: TrainingData, bits: float | None, weights: Any = None
) -> None:
    """Save a model (`weights`: gathered, if it is sharded), its tokenizer and its model card into a run's folder, each
    file atomically. All processes must call."""
    if rank() == 0:
        made = folder / checkpoints.SAVING / "model"
        try:
            with checkpoints.writing(folder / checkpoints.WEIGHTS):
                # Some versions of Trainer add the tokenizer's end of text to it.
                model.generation_config = GenerationConfig.from_model_config(model.config)
                model.save_pretrained(made, state_dict=weights)
                with_pad_token(data.tokenizer).save_pretrained(made)
                state.save_to_json(str(made / checkpoints.STATE))
                checkpoints.make_readable(made)
                # The state comes last: it tells the step of the model.
                last = (checkpoints.WEIGHTS, checkpoints.STATE)
                for path in sorted(made.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
                    if (folder / path.name).is_dir():
                        shutil.rmtree(folder / path.name)
                    path.replace(folder / path.name)
                _write_card(folder, model, data.about, state.global_step, bits)
        finally:
            shutil.rmtree(folder / checkpoints.SAVING, ignore_errors=True)
    barrier()


def with_pad_token(tokenizer: Any) -> Any:
    """A tokenizer to be saved, with its end of text as padding token where it has none: many tools need one."""
    if tokenizer.pad_token is None:
        tokenizer = deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_final_model(folder: Path, checkpoint: Path, data: TrainingData, bits: float | None) -> None:
    """Save the model of a finished run from its last checkpoint: a kill may have come between. All processes must
    call."""
    state = checkpoints.read_trainer_state(checkpoint)
    model = read_weights(checkpoint, saved_config(checkpoint)) if rank() == 0 else None
    save_model(folder, model, state, data, bits)


_CARD = """---
library_name: transformers
tags: [{tags}]
---

# {name}

A language model of {parameters:,} parameters of the library atlas-memory (version {version}): {what}. Trained by
`atlas train`, {steps:,} steps, on: {text}. To read it, `pip install "atlas-memory[train]"`.

```python
import atlas_memory  # or trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

    atlas generate {name} --prompt "It was"
    atlas evaluate {name}
    atlas report {name}

`run.yaml` has every option of the run, `log.jsonl` a line for every step{held_out}.
"""
_FOLDERS = re.compile(r"(?<![\w./\\:])(?:[A-Za-z]:)?[/\\](?:[^/\\\n,:']*[/\\])*")
"""Folders before a file's name: a card must not tell them."""


def _write_card(folder: Path, model: Any, text: str, steps: int, bits: float | None) -> None:
    about = model.config
    memory = BLOCKS[about.block].memory
    card = _CARD.format(
        tags=", ".join(["atlas-memory", about.block] + [about.rule] * memory),
        name=folder.resolve().name,
        parameters=model.num_parameters(),
        version=__version__,
        what=f"blocks {about.block!r}" + f" with the memory {about.rule!r}" * memory,
        steps=steps,
        text=_FOLDERS.sub("", text),
        held_out="" if bits is None else f"; at the end {bits:.4f} bits a byte of held-out text",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
