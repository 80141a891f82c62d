"""The model at the end of a run: saved into the run's folder, or from the last checkpoint where a kill came between."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TrainerState

from atlas_memory.train.card import write_card
from atlas_memory.train.checkpoints import DIGESTS, SAVING, WEIGHTS, make_readable, shapes, writing
from atlas_memory.train.examples import Text
from atlas_memory.train.loaded import STATE, read_state
from atlas_memory.train.processes import largest, process, processes
from atlas_memory.train.runs import saved_step
from atlas_memory.train.saved import read_weights, saved_config


def save_model(
    folder: Path, model: Any, state: TrainerState, text: Text, bits: float | None, weights: dict[str, Any] | None = None
) -> None:
    """Leave a model (`weights`: its own, if it is sharded), its tokenizer and its card in a run's folder, each file
    whole or as it was. All processes must call, and return when it is there."""
    if process() == 0:
        made = folder / SAVING / "model"
        with writing(folder / WEIGHTS), _removed(folder / SAVING):
            # As that of a model which was loaded: some versions of Trainer add the tokenizer's end of text to it.
            model.generation_config = GenerationConfig.from_model_config(model.config)
            model.save_pretrained(made, state_dict=weights)
            padded(text.tokenizer).save_pretrained(made)
            state.save_to_json(str(made / STATE))
            make_readable(made)
            # How old the saved model is, as load_run asks, comes after the model.
            for path in sorted(made.iterdir(), key=lambda path: (path.name == STATE, path.name == WEIGHTS)):
                if (folder / path.name).is_dir():
                    shutil.rmtree(folder / path.name)
                path.replace(folder / path.name)
            write_card(folder, model, text.about, state.global_step, bits)
    if processes() > 1:
        torch.distributed.barrier()


def padded(tokenizer: Any) -> Any:
    """A tokenizer to be saved. Many tools ask for a token to pad with: where it has none, that is its end of text. No
    id changes, and the run's own tokenizer stays as it is."""
    if tokenizer.pad_token is None:
        tokenizer = deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Without the folder behind it, also where what was to be made in it is only half there: the disk may be full."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_again(folder: Path, checkpoint: Path, text: Text, bits: float | None) -> bool:
    """Save the model of a finished run from its last checkpoint, unless it is there; whether that was needed. All
    processes must call."""
    state = read_state(checkpoint)
    # The first process decides for all: another one might look when it has been saved again, and never wait.
    if not largest(process() == 0 and not _is_saved(folder, checkpoint, state.global_step))[0]:
        return False
    model = read_weights(checkpoint, saved_config(checkpoint)) if process() == 0 else None
    save_model(folder, model, state, text, bits)
    return True


def _is_saved(folder: Path, checkpoint: Path, step: int) -> bool:
    names = {path.name for path in checkpoint.glob("*.json")} - {DIGESTS} | {"README.md"}
    if saved_step(folder) != step or not all((folder / name).is_file() for name in names):
        return False
    try:
        return bool(shapes(folder))
    except (OSError, ValueError):
        return False
