"""Checks before a run begins: its device, its memory, its folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from transformers.integrations import get_reporting_integration_callbacks

from atlas_memory.console import print_line
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.models import AtlasConfig
from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES, read_log
from atlas_memory.train.checkpoint import SAVING, newest_checkpoint, step_of
from atlas_memory.train.config import ConfigError, RunConfig, load_saved
from atlas_memory.train.distributed import rank, world_size
from atlas_memory.train.plan import LOGITS, available_memory, plan_model, without_weights
from atlas_memory.train.run_folder import DATA_JSON, RUN_YAML, read_json
from atlas_memory.train.training_data import TrainingData

LARGE = 20_000_000
"""Parameters from which on the memory needed is estimated, which takes seconds."""
_MAY_CHANGE = frozenset(
    (
        *("steps", "max_minutes", "save_every", "save_minutes", "keep_checkpoints", "threads", "device", "cuda_graphs"),
        *("evaluate_every", "report_to", "sample_tokens", "prompt", "probe_every", "alarm_webhook"),
        *("batch_size", "gradient_accumulation_steps"),  # whose product must stay: TrainingData.check_same
    )
)
"""What a resumed run may change."""
_OF_A_START = (RUN_YAML, DATA_JSON, LOG, SAMPLES, MEMORY)
"""The files of a run before its first step is finished."""


def has_bf16(config: RunConfig) -> bool:
    """Whether the run's device computes in bfloat16."""
    return config.train.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def check_environment(config: RunConfig) -> None:
    """ConfigError if the device, bfloat16, other processes or trackers are not there."""
    run = config.train
    if run.fsdp and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "train.fsdp=True shards weights among the processes of torchrun, and this one was started alone: start it "
            "with torchrun --nproc-per-node N -m atlas_memory train, or leave train.fsdp out"
        )
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device='cuda', but PyTorch sees no CUDA device: use auto or cpu")
    try:
        for program in get_reporting_integration_callbacks(run.report_to):
            program()  # raises if it is not installed
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"train.report_to={run.report_to}: {error}") from error
    if run.bf16 and not has_bf16(config):
        raise ConfigError("train.bf16=True needs a CUDA device that computes in bfloat16: leave it out")


def check_model(config: RunConfig, model: Any) -> None:
    """ConfigError for settings that the model does not support."""
    periods = model.config.continuum_periods or ()
    if config.train.fsdp and any(period > 1 for period in periods):
        raise ConfigError(
            f"model.continuum_periods={periods} sums gradients over steps (MultiPeriod), which sharded checkpoints do "
            "not save: leave train.fsdp out"
        )
    if config.data.order == "stream" and any(getattr(layer, "grows", False) for layer in model.modules()):
        raise ConfigError(
            "data.order='stream' keeps the state of rows, and that of this model grows with its input: take "
            "data.order=packed or crops"
        )
    if config.train.gate_lr_scale != 1 and not any(isinstance(module, GateProjection) for module in model.modules()):
        raise ConfigError(
            f"train.gate_lr_scale={config.train.gate_lr_scale} is the learning rate of gates, which block="
            f"{model.config.block!r} does not project: leave it out"
        )


def check_needs(config: RunConfig, architecture: AtlasConfig, console: Console) -> None:
    """Warn of too little memory; ConfigError if the logits of a pass alone do not fit."""
    data, run = config.data, config.train
    logits, there = LOGITS * architecture.vocab_size * run.batch_size * data.seq_len, available_memory(config)
    if logits > there:
        raise ConfigError(
            f"train.batch_size={run.batch_size} rows of data.seq_len={data.seq_len} tokens need {logits / 1e9:,.0f} GB "
            f"for logits alone, and there are {there / 1e9:,.0f}: lower one of them"
        )
    if rank() > 0 or without_weights(architecture).num_parameters() < LARGE:
        return
    needed = plan_model(config, architecture, world_size()).memory
    if needed > there:
        print_line(
            console,
            f"warning: about {needed / 1e9:.0f} GB are needed and there are {there / 1e9:.0f}: lower train.batch_size, "
            "data.seq_len or data.interleave, or take train.gradient_checkpointing=true; see `atlas plan`",
        )


def check_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    """ConfigError unless the folder is new, empty or of a run that failed in its first step; to resume, unless it holds
    the run of `config`."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    with writable(folder), TemporaryDirectory(prefix=".atlas-", dir=there):
        pass
    if not resume:
        refuse_used(folder)
        return
    if not (folder / RUN_YAML).is_file():
        raise ConfigError(f"nothing to resume: {str(folder)!r} holds no run.yaml")
    if not (folder / DATA_JSON).is_file() and (last := newest_checkpoint(folder)) and (last / DATA_JSON).is_file():
        with writable(folder):
            shutil.copyfile(last / DATA_JSON, folder / DATA_JSON)
    _check_same_run(folder, config)


def _check_same_run(folder: Path, config: RunConfig) -> None:
    """ConfigError unless the run in the folder began with the settings of `config`, but for what may change."""
    now = config.resolved().model_dump(mode="json")
    try:  # run.yaml may have been edited since
        begun = read_json(folder / DATA_JSON)["settings"]
        before = {section: dict(begun[section]) for section in ("model", "data", "train")}
    except (OSError, ValueError, TypeError, KeyError):
        before = load_saved(folder).resolved().model_dump(mode="json")
    for section in ("model", "data", "train"):
        for key in sorted(before[section].keys() | now[section].keys()):
            old, new = before[section].get(key), now[section].get(key)
            may = section == "train" and key in _MAY_CHANGE
            moved = section == "data" and (key == "path" or (key == "tokenizer" and None in (old, new)))
            moved = moved and (folder / DATA_JSON).is_file()  # TrainingData.check_same compares the text
            if old != new and not (may or moved):
                back = f"has {old!r}: {'leave it out' if old is None else 'set it back'}"
                raise ConfigError(
                    f"{section}.{key} is {new!r}, but the run to resume {back}, or train into another output_dir"
                )


def refuse_used(folder: Path) -> None:
    """ConfigError if the folder holds anything, except for a run that failed before it finished a step."""
    if not folder.is_dir():
        return
    names = {path.name.removesuffix(".partial") for path in folder.iterdir()}
    # Without a lock, somebody else wrote the run.yaml.
    failed = {RUN_YAML, ".lock"} <= names <= {*_OF_A_START, ".lock"} and not read_log(folder)
    if names <= {".lock"} or failed:
        return
    if not (folder / RUN_YAML).is_file():
        raise ConfigError(f"output_dir={str(folder)!r} is not empty, and what it holds is no run: choose another")
    raise ConfigError(
        f"output_dir={str(folder)!r} is not empty: choose another, or continue the run in it with --resume"
    )


def clear_start(folder: Path) -> None:
    """Delete what a run left that failed in its first step; ConfigError if there is more by now."""
    refuse_used(folder)
    for name in _OF_A_START:
        (folder / name).unlink(missing_ok=True)


def write_settings(config: RunConfig, folder: Path, data: TrainingData, checkpoint: Path | None) -> None:
    """Write `run.yaml`, unless the run is finished, and `data.json`; delete what a killed process left."""
    with writable(folder):
        if checkpoint is None or step_of(checkpoint) < config.train.last_step:
            config.save(folder / RUN_YAML)
        data.save(folder, config)
    shutil.rmtree(folder / SAVING, ignore_errors=True)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Around making a run's folder and its first files: ConfigError if that fails."""
    try:
        yield
    except OSError as error:
        remedy = "make room, or " if error.errno == errno.ENOSPC else ""
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): {remedy}choose another"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, in the first process, so that no run is written twice at a time."""
    if rank() > 0:
        yield
        return
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise ConfigError(f"output_dir={str(folder)!r} is in use by another process") from error
    with lock:
        yield
