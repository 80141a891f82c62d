"""What is looked at before a run begins, so that nothing is lost: its folder, its device, its memory."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from transformers.integrations import get_reporting_integration_callbacks

from atlas_memory.console import print_line
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.models import PRESETS, AtlasConfig
from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES, read_log
from atlas_memory.train import sharded
from atlas_memory.train.checkpoints import SAVING, newest_checkpoint, number
from atlas_memory.train.config import ConfigError, DataSection, ModelSection, RunConfig, load_saved
from atlas_memory.train.examples import Text
from atlas_memory.train.plan import LOGITS, available, of_model, without_weights
from atlas_memory.train.processes import process, processes
from atlas_memory.train.settings import ABOUT
from atlas_memory.train.yaml_files import read_json

LARGE = 20_000_000  # parameters from which on memory is looked at before training
# What may differ between a run and its resumption: everything else would make it another run.
_MAY_CHANGE = frozenset(
    {
        "steps",
        "max_minutes",
        "save_every",
        "save_minutes",
        "keep_checkpoints",
        "threads",
        "device",
        "graphed",
        "evaluate_every",
        "report_to",
    }
    | {"sample_tokens", "prompt", "watch_every", "alarm_webhook"}
    | {"batch_size", "gradient_accumulation_steps"}  # whose product must stay: Text.check_same
)
_OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # where a configuration names none
_OF_A_START = ("run.yaml", ABOUT, LOG, SAMPLES, MEMORY)
"""What a run writes before its first step is finished."""


def has_bf16(config: RunConfig) -> bool:
    """Whether the run's device computes in bfloat16."""
    return config.train.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def check_run(config: RunConfig) -> None:
    """ConfigError where what a run asks for cannot be had here, or where keys contradict each other."""
    _check_device(config)
    sharded.check(config)
    config.check_lengths()


def _check_device(config: RunConfig) -> None:
    """ConfigError unless the device, bfloat16 and the programs to report to are there, and how to compute on the device
    goes together."""
    if config.train.graphed and config.train.gradient_checkpointing:
        raise ConfigError("train.graphed=true does not go with train.gradient_checkpointing=true: leave one out")
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device='cuda', but PyTorch sees no CUDA device: use auto or cpu")
    try:
        for program in get_reporting_integration_callbacks(config.train.report_to):
            program()  # which asks whether it is installed
    except (ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"train.report_to={config.train.report_to}: {error}") from error
    if config.train.bf16 and not has_bf16(config):
        raise ConfigError("train.bf16=True needs a CUDA device that computes in bfloat16: leave it out")


def check_needs(config: RunConfig, architecture: AtlasConfig, console: Console) -> None:
    """Say so where rows are asked to read on in an order in which they do not, and where a large model will not fit;
    finding that out takes seconds, so small ones are not asked. ConfigError where the logits of a pass alone do not."""
    tokens, there = config.train.batch_size * config.data.seq_len, available(config)
    if LOGITS * architecture.vocab_size * tokens > there:
        raise ConfigError(
            f"train.batch_size={config.train.batch_size} rows of data.seq_len={config.data.seq_len} tokens need "
            f"{LOGITS * architecture.vocab_size * tokens / 1e9:,.0f} GB for logits alone, and there are "
            f"{there / 1e9:,.0f}: lower one of them"
        )
    for name in ("lanes", "carry", "pass_states") if config.data.order == "crops" else ():
        if (value := getattr(config.data, name)) != DataSection.model_fields[name].default:
            print_line(console, f"warning: data.{name}={value} has no effect with data.order=crops")
    chunk = architecture.memory_rule().window.chunk if BLOCKS[architecture.block].memory else 0
    if config.data.order != "crops" and architecture.hierarchy is None and chunk > 2 * config.data.longest:
        print_line(
            console,
            f"warning: memories read chunks of {chunk} tokens, and compute whole ones for each segment of "
            f"{config.data.longest}, since rows stand at different places: model.chunk_size={config.data.longest} "
            "takes a part of the time",
        )
    if process() > 0 or without_weights(architecture).num_parameters() < LARGE:
        return
    needed = of_model(config, architecture, processes()).memory
    if needed > there:
        print_line(
            console,
            f"warning: about {needed / 1e9:.0f} GB are needed and there are {there / 1e9:.0f}: lower train.batch_size, "
            "data.seq_len or data.lanes, or take train.gradient_checkpointing=true; `atlas plan` tells what each costs",
        )


def check_folder(folder: Path, config: RunConfig, resume: bool) -> None:
    """ConfigError unless the folder is new, empty or of a run that failed in its first step; or, where a run is to be
    resumed, holds that of `config`."""
    if os.path.exists(folder) and not folder.is_dir():
        raise ConfigError(f"output_dir={str(folder)!r} is a file: choose another")
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    with usable(folder), TemporaryDirectory(prefix=".atlas-", dir=there):
        pass
    if not resume:
        refuse_what_is_there(folder)
        return
    if not (folder / "run.yaml").is_file():
        raise ConfigError(f"nothing to resume: {str(folder)!r} holds no run.yaml")
    if not (folder / ABOUT).is_file() and (last := newest_checkpoint(folder)) and (last / ABOUT).is_file():
        with usable(folder):
            shutil.copyfile(last / ABOUT, folder / ABOUT)
    _compare(_as_begun(folder), config, folder)


def _compare(begun: RunConfig, config: RunConfig, folder: Path) -> None:
    """ConfigError unless a run that began with the settings `begun` can go on with those of `config`."""
    before, now = begun.resolved().model_dump(), config.resolved().model_dump()
    if _one_model(begun.model, config.model):
        now["model"] = before["model"]
    for section in ("model", "data", "train"):
        for key in sorted(before[section].keys() | now[section].keys()):
            old, new = before[section].get(key), now[section].get(key)
            may = section == "train" and key in _MAY_CHANGE
            moved = section == "data" and (key == "path" or (key == "tokenizer" and None in (old, new)))
            moved = moved and (folder / ABOUT).is_file()  # Text.check_same compares
            if old != new and not (may or moved):
                raise ConfigError(
                    f"{section}.{key} is {new!r}, but the run to resume has {old!r}: "
                    "set it back, or train into another output_dir"
                )


def _as_begun(folder: Path) -> RunConfig:
    """The settings of the run in a folder: of its run.yaml, which somebody may have changed by hand, what may change,
    and otherwise what was noted when it began."""
    saved = load_saved(folder)
    tree = saved.model_dump()
    try:
        noted = read_json(folder / ABOUT)["settings"]
        tree |= {"model": noted["model"], "data": noted["data"]}
        tree["train"] = noted["train"] | {name: tree["train"][name] for name in _MAY_CHANGE}
        return RunConfig.model_validate_json(json.dumps(tree))  # whose keys are texts, also those of data.lengths
    except (OSError, ValueError, TypeError, KeyError):  # copied without it
        return saved


def _one_model(before: ModelSection, now: ModelSection) -> bool:
    """Whether both make the same model, one of them naming what is the preset's; false where they begin with another's
    or make none."""
    made = []
    for model in (before, now):
        try:
            whole = AtlasConfig.preset(model.preset, **model.overrides).to_dict()
        except (ValueError, TypeError):
            return False
        whole |= {name: model.overrides.get(name) for name in _OF_TOKENIZER} | {"init_from": model.init_from}
        made.append((whole, PRESETS[model.preset].learning_rate))
    return before.init_from is None and made[0] == made[1]


def refuse_what_is_there(folder: Path) -> None:
    """ConfigError if the folder holds anything, but for a run that failed before it finished a step."""
    if not folder.is_dir() or not any(path.name != ".lock" for path in folder.iterdir()) or _never_trained(folder):
        return
    if not (folder / "run.yaml").is_file():
        raise ConfigError(f"output_dir={str(folder)!r} is not empty, and what it holds is no run: choose another")
    raise ConfigError(
        f"output_dir={str(folder)!r} is not empty: choose another, or continue the run in it with --resume"
    )


def _never_trained(folder: Path) -> bool:
    """Whether a folder holds what a run leaves that fails in its first step, and nothing else. A run.yaml that somebody
    has written there has no lock beside it."""
    names = {path.name.removesuffix(".partial") for path in folder.iterdir()}
    return {"run.yaml", ".lock"} <= names <= {*_OF_A_START, ".lock"} and not read_log(folder)


def clear_start(folder: Path) -> None:
    """Make room for a new run, in a folder that is held: away with what a run left that failed in its first step.

    Raises:
        ConfigError: there is something else in it now.
    """
    refuse_what_is_there(folder)
    for name in _OF_A_START:
        (folder / name).unlink(missing_ok=True)


def describe(config: RunConfig, folder: Path, text: Text, checkpoint: Path | None) -> None:
    """Leave the settings of a run in its folder, unless nothing is left to do, and its text; and away with what a
    process has left that was killed."""
    with usable(folder):
        if checkpoint is None or number(checkpoint) < config.train.last_step:
            config.save(folder / "run.yaml")
        text.save(folder, config)
    shutil.rmtree(folder / SAVING, ignore_errors=True)


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Around the making of a run's folder and of its first files: ConfigError if it cannot be done."""
    try:
        yield
    except OSError as error:
        remedy = "make room, or " if error.errno == errno.ENOSPC else ""
        raise ConfigError(
            f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): {remedy}choose another"
        ) from error


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that a run is never written twice at a time; its first process holds it."""
    if process() > 0:
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
