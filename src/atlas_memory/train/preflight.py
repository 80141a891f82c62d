"""What is checked before a run begins, so that nothing is lost: its device, its memory, its folder."""

from __future__ import annotations

import errno
import json
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
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.models import PRESETS, AtlasConfig
from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES, read_log
from atlas_memory.train.checkpoint import SAVING, newest_checkpoint, step_of
from atlas_memory.train.config import ConfigError, DataSection, ModelSection, RunConfig, load_saved
from atlas_memory.train.distributed import rank, world_size
from atlas_memory.train.plan import LOGITS, available_memory, plan_model, without_weights
from atlas_memory.train.run_folder import DATA_JSON, RUN_YAML, read_json
from atlas_memory.train.training_data import TrainingData

LARGE = 20_000_000
"""Parameters from which on the memory that is needed is estimated, which takes seconds."""
_MAY_CHANGE = frozenset(
    (
        *("steps", "max_minutes", "save_every", "save_minutes", "keep_checkpoints", "threads", "device", "cuda_graphs"),
        *("evaluate_every", "report_to", "sample_tokens", "prompt", "probe_every", "alarm_webhook"),
        *("batch_size", "gradient_accumulation_steps"),  # whose product must stay: TrainingData.check_same
    )
)
"""What may differ between a run and its resumption: everything else would make it another run."""
_OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # where a configuration names none
_OF_A_START = (RUN_YAML, DATA_JSON, LOG, SAMPLES, MEMORY)
"""What a run writes before its first step is finished."""


def has_bf16(config: RunConfig) -> bool:
    """Whether the run's device computes in bfloat16."""
    return config.train.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def check_environment(config: RunConfig) -> None:
    """ConfigError if the device, bfloat16, the other processes or the programs to report to are not there."""
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
            program()  # which asks whether it is installed
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"train.report_to={run.report_to}: {error}") from error
    if run.bf16 and not has_bf16(config):
        raise ConfigError("train.bf16=True needs a CUDA device that computes in bfloat16: leave it out")


def check_model(config: RunConfig, model: Any) -> None:
    """ConfigError if settings ask of a model what it cannot do."""
    periods = model.config.continuum_periods or ()
    if config.train.fsdp and any(period > 1 for period in periods):
        raise ConfigError(
            f"model.continuum_periods={periods} sums gradients over steps (MultiPeriod), and sharded checkpoints do "
            "not hold such sums: leave train.fsdp out"
        )
    if config.data.order == "stream" and any(getattr(layer, "grows", False) for layer in model.modules()):
        raise ConfigError(
            "data.order='stream' keeps the state of rows, and the state of this model grows with what it reads: take "
            "data.order=packed or crops"
        )
    if config.train.gate_lr_scale != 1 and not any(isinstance(module, GateProjection) for module in model.modules()):
        raise ConfigError(
            f"train.gate_lr_scale={config.train.gate_lr_scale} is the learning rate of gates, and block="
            f"{model.config.block!r} has none that are learned by themselves: leave it out"
        )


def check_needs(config: RunConfig, architecture: AtlasConfig, console: Console) -> None:
    """Warn of settings without effect, of a waste of time, and where a large model will not fit into memory.
    ConfigError if the logits of a pass alone do not fit."""
    data, run = config.data, config.train
    logits, there = LOGITS * architecture.vocab_size * run.batch_size * data.seq_len, available_memory(config)
    if logits > there:
        raise ConfigError(
            f"train.batch_size={run.batch_size} rows of data.seq_len={data.seq_len} tokens need {logits / 1e9:,.0f} GB "
            f"for logits alone, and there are {there / 1e9:,.0f}: lower one of them"
        )
    for name in ("interleave", "reset_every", "pass_states") if data.order == "crops" else ():
        if (value := getattr(data, name)) != DataSection.model_fields[name].default:
            print_line(console, f"warning: data.{name}={value} has no effect with data.order=crops")
    chunk = architecture.memory_rule().window.chunk if BLOCKS[architecture.block].memory else 0
    if data.order != "crops" and architecture.hierarchy is None and chunk > 2 * data.longest:
        print_line(
            console,
            f"warning: memories read chunks of {chunk} tokens, and compute whole ones for each segment of "
            f"{data.longest}, since rows stand at different places: model.chunk_size={data.longest} takes a part of "
            "the time",
        )
    if rank() > 0 or without_weights(architecture).num_parameters() < LARGE:
        return
    needed = plan_model(config, architecture, world_size()).memory
    if needed > there:
        print_line(
            console,
            f"warning: about {needed / 1e9:.0f} GB are needed and there are {there / 1e9:.0f}: lower train.batch_size, "
            "data.seq_len or data.interleave, or take train.gradient_checkpointing=true; `atlas plan` tells what each "
            "costs",
        )


# The folder


def check_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    """ConfigError unless the folder is new, empty or of a run that failed in its first step; or, where a run is to be
    resumed, holds that of `config`."""
    if os.path.exists(folder) and not folder.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} is a file: choose another")
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
    _check_same_run(_as_begun(folder), config, folder)


def _check_same_run(begun: RunConfig, config: RunConfig, folder: Path) -> None:
    """ConfigError unless a run that began with the settings `begun` can be resumed with those of `config`."""
    before, now = begun.resolved().model_dump(), config.resolved().model_dump()
    if _make_same_model(begun.model, config.model):
        now["model"] = before["model"]
    for section in ("model", "data", "train"):
        for key in sorted(before[section].keys() | now[section].keys()):
            old, new = before[section].get(key), now[section].get(key)
            may = section == "train" and key in _MAY_CHANGE
            moved = section == "data" and (key == "path" or (key == "tokenizer" and None in (old, new)))
            moved = moved and (folder / DATA_JSON).is_file()  # TrainingData.check_same compares the text
            if old != new and not (may or moved):
                raise ConfigError(
                    f"{section}.{key} is {new!r}, but the run to resume has {old!r}: "
                    "set it back, or train into another output_dir"
                )


def _as_begun(folder: Path) -> RunConfig:
    """The settings with which the run in a folder began, as `data.json` has them; of `run.yaml`, which somebody may
    have edited, only what may change."""
    saved = load_saved(folder)
    tree = saved.model_dump()
    try:
        begun = read_json(folder / DATA_JSON)["settings"]
        tree |= {"model": begun["model"], "data": begun["data"]}
        tree["train"] = begun["train"] | {name: tree["train"][name] for name in _MAY_CHANGE}
        return RunConfig.model_validate_json(json.dumps(tree))  # JSON, for the integer keys of data.seq_len_schedule
    except (OSError, ValueError, TypeError, KeyError):  # copied without it
        return saved


def _make_same_model(before: ModelSection, now: ModelSection) -> bool:
    """Whether both make the same new model, one of them naming what the preset has."""
    made = []
    for model in (before, now):
        try:
            whole = AtlasConfig.preset(model.preset, **model.overrides).to_dict()
        except (ValueError, TypeError):
            return False
        whole |= {name: model.overrides.get(name) for name in _OF_TOKENIZER} | {"init_from": model.init_from}
        made.append((whole, PRESETS[model.preset].learning_rate))
    return before.init_from is None and made[0] == made[1]


def refuse_used(folder: Path) -> None:
    """ConfigError if the folder holds anything, but for a run that failed before it finished a step."""
    if not folder.is_dir():
        return
    names = {path.name.removesuffix(".partial") for path in folder.iterdir()}
    # A run.yaml that somebody has written there has no lock beside it.
    failed = {RUN_YAML, ".lock"} <= names <= {*_OF_A_START, ".lock"} and not read_log(folder)
    if names <= {".lock"} or failed:
        return
    if not (folder / RUN_YAML).is_file():
        raise ConfigError(f"output_dir={str(folder)!r} is not empty, and what it holds is no run: choose another")
    raise ConfigError(
        f"output_dir={str(folder)!r} is not empty: choose another, or continue the run in it with --resume"
    )


def clear_start(folder: Path) -> None:
    """Delete what a run left that failed in its first step, in a locked folder; ConfigError if there is more by now."""
    refuse_used(folder)
    for name in _OF_A_START:
        (folder / name).unlink(missing_ok=True)


def write_settings(config: RunConfig, folder: Path, data: TrainingData, checkpoint: Path | None) -> None:
    """Leave `run.yaml`, unless nothing is left to do, and `data.json`; delete what a killed process has left."""
    with writable(folder):
        if checkpoint is None or step_of(checkpoint) < config.train.last_step:
            config.save(folder / RUN_YAML)
        data.save(folder, config)
    shutil.rmtree(folder / SAVING, ignore_errors=True)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Around the making of a run's folder and of its first files: ConfigError if it cannot be done."""
    try:
        yield
    except OSError as error:
        remedy = "make room, or " if error.errno == errno.ENOSPC else ""
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): {remedy}choose another"
        ) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that a run is never written twice at a time; its first process holds it."""
    if rank() > 0:
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"output_dir={str(folder)!r} is in use by another process") from error
    try:
        yield
    finally:
        lock.release()
