"""Checkpoints of a run. A checkpoint is written whole or not at all, and read without running code in it: whatever does
not fit the run is refused before it is used.

checkpoint-N/files.json   size and SHA-256 of every other file of the checkpoint, written last
checkpoint-N/data.json    a copy of the run's own, by which a checkpoint of another run is known
checkpoint-N/shards/      with FSDP, weights and optimizer by torch.distributed.checkpoint
.saving/                  a checkpoint that is being written; the next resume deletes leftovers
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import TrainerState

from atlas_memory.console import first_line
from atlas_memory.train.distributed import all_reduce_max, rank, world_size
from atlas_memory.train.run_folder import DATA_JSON, ConfigError, read_json

logger = logging.getLogger(__name__)
WEIGHTS = "model.safetensors"
STATE, OPTIMIZER, RANDOM = "trainer_state.json", "optimizer.pt", "rng_state*.pth"
DIGESTS, SAVING, SHARDS = "files.json", ".saving", "shards"
LARGEST_STATE = 2**30
"""Bytes of Trainer's state, at most; it has a line for every step."""
_MOMENTS = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "muon": {"momentum_buffer"},
    "m3": {"fast", "slow", "slow_direction", "square"},
}
"""The tensors that each optimizer keeps for a parameter, in its shape."""


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writing a file or a checkpoint of a run: OSError of one line, with the remedy, if it failed."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # RuntimeErrors too, but of no file
    except (OSError, RuntimeError, SafetensorError) as error:
        if not path.parent.is_dir():
            reason = "its folder is gone; put a copy back"
        elif shutil.disk_usage(path.parent).free < 2**20:
            reason = "the disk is full; make room"
        else:
            reason = f"{getattr(error, 'strerror', None) or first_line(error)}; make room"
        raise OSError(
            f"{path} could not be written: {reason}, and resume from the last checkpoint with: "
            f"atlas train --resume output_dir={path.parent}"
        ) from error


def make_readable(folder: Path) -> None:
    """Give weights the mode of other new files: safetensors leaves them to their owner alone."""
    mode = next(folder.glob("*.json")).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def publish(folder: Path, step: int, keep: int) -> None:
    """Move the checkpoint in `.saving` to its place, with digests, and delete all but the newest `keep`. All processes
    must call, when each has written its files."""
    name = f"checkpoint-{step}"
    written = folder / SAVING / name
    if rank() == 0:
        shutil.copyfile(folder / DATA_JSON, written / DATA_JSON)
    mine = [path for path in checkpoint_files(written) if _writer(path) == rank()]
    found = [dict(zip((str(path.relative_to(written)) for path in mine), digests(mine), strict=True))] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(found, found[0])
    if rank() > 0:
        return
    make_readable(written)
    known = {path: digest for part in found for path, digest in part.items()}
    (written / DIGESTS).write_text(json.dumps(known, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder / name, ignore_errors=True)  # a damaged one, before which the run was resumed
    written.rename(folder / name)
    others = sorted(_all(folder), key=lambda path: (step_of(path) <= step, step_of(path)))  # later ones are damaged
    for path in others[: max(0, len(others) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def _writer(path: Path) -> int:
    """The process that wrote a file: the first number in `rng_state_1.pth`, `__1_0.distcp`."""
    found = re.search(r"[_-](\d+)[_.]", path.name)
    return int(found[1]) % world_size() if found else 0


def checkpoint_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint, without its digests and reports on it."""
    found = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != DIGESTS)
    return sorted(path for path in found if not re.match("[.]?report[^/]*/", path.relative_to(checkpoint).as_posix()))


def digests(paths: list[Path]) -> list[tuple[int, str]]:
    """Sizes and SHA-256 of files."""
    found = [path.stat() for path in paths]
    with ThreadPoolExecutor(4) as pool:
        hashes = pool.map(_sha256, paths, *zip(*((s.st_ino, s.st_size, s.st_mtime_ns) for s in found), strict=True))
        return [(about.st_size, digest) for about, digest in zip(found, hashes, strict=True)]


@lru_cache(maxsize=4096)  # a checkpoint is verified several times
def _sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _all(folder: Path) -> list[Path]:
    """Newest first."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]{1,15}", p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, intact or damaged; -1 if there is none."""
    return max(map(step_of, _all(folder)), default=-1)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint; a warning names damaged ones."""
    for path in _all(folder):
        reason = damage(path)
        if reason is None:
            return path
        logger.warning("skipping %s: %s", path, reason)
    return None


def checkpoint_to_resume(folder: Path) -> Path | None:
    """The checkpoint to resume from, as the first process finds it; None: none yet. ConfigError if all are damaged, or
    if there is only a model, which would be overwritten. All processes must call."""
    found = newest_checkpoint(folder) if rank() == 0 else None
    step, there = all_reduce_max(-1 if found is None else step_of(found), newest_step(folder))
    if step < 0 <= there:
        reasons = "; ".join(f"{path.name}: {damage(path)}" for path in _all(folder))
        raise ConfigError(
            f"output_dir={str(folder)!r} has no intact checkpoint to resume from ({reasons}): put a copy of one back, "
            "or train into another output_dir"
        )
    if step < 0 and (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"output_dir={str(folder)!r} has a model and no checkpoint to resume from: put one back, or start another "
            f"run from the model: atlas train model.init_from={folder} output_dir=..."
        )
    return None if step < 0 else folder / f"checkpoint-{int(step)}"


def damage(checkpoint: Path) -> str | None:
    """Which file of a checkpoint is missing or is not what was written; None if it is intact."""
    if not (checkpoint / DIGESTS).is_file():
        return f"{DIGESTS} is missing"
    try:
        known = {name: (int(size), str(digest)) for name, (size, digest) in read_json(checkpoint / DIGESTS).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{DIGESTS} is damaged"
    try:
        files = {str(path.relative_to(checkpoint)) for path in checkpoint_files(checkpoint)}
        optimizer = f"{SHARDS}/.metadata" if is_sharded(checkpoint) else OPTIMIZER
        for name in (*sorted(files - {".DS_Store"}), "config.json", STATE, optimizer):
            if name not in known:
                return f"{DIGESTS} does not name {name}"
        for name, (size, _) in known.items():
            if name not in files:
                return f"{name} is missing"
            if (there := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {there:,} of {size:,} bytes"
        found = digests([checkpoint / name for name in known])
    except OSError as error:
        return f"a file is damaged ({first_line(error)})"
    for name, digest in zip(known, found, strict=True):
        if digest != known[name]:
            return f"{name} is damaged: its bytes are not those that were written"
    both = checkpoint / DATA_JSON, checkpoint.resolve().parent / DATA_JSON
    if all(path.is_file() for path in both) and both[0].read_bytes() != both[1].read_bytes():
        return f"it is of another run: its {DATA_JSON} is not that of the run"
    return None


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a folder; FileNotFoundError or ValueError if they are not whole."""
    if is_sharded(folder):
        return _sharded_shapes(folder)
    path = folder / WEIGHTS
    found: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                weight = file.get_slice(name)
                if (kind := weight.get_dtype()) not in ("F64", "F32", "BF16", "F16"):  # loading would round it
                    raise ValueError(
                        f"the weight {name} in {str(path)!r} is {kind}: weights are floating-point, >= 16 bits"
                    )
                found[name] = tuple(weight.get_shape())
    except SafetensorError as error:
        remedy = "move it away, and the newest checkpoint is taken"
        raise ValueError(f"{str(path)!r} is damaged or cut short ({first_line(error)}): {remedy}") from error
    return found


@contextmanager
def checking(path: Path) -> Iterator[None]:
    """Around reading a file of a checkpoint: ConfigError that names it if it does not fit the run."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # readers of pickles, JSON and random states raise a dozen types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{str(path)!r} does not fit this run ({reason[:200]}): delete {path.parent.name}, and --resume continues "
            "from the checkpoint before"
        ) from error


def read_trainer_state(checkpoint: Path) -> TrainerState:
    """The state of transformers' Trainer; ConfigError if it is damaged, or of another step than the checkpoint."""
    with checking(checkpoint / STATE):
        saved = read_json(checkpoint / STATE, LARGEST_STATE)
        state, usual = TrainerState(**saved), TrainerState()
        for name, value in saved.items():
            if not _same_kind(value, getattr(usual, name)):
                raise ValueError(f"{name} is {value!r}")
        if state.global_step != step_of(checkpoint):
            raise ValueError(f"it is of step {state.global_step}")
        if state.best_model_checkpoint is not None or not all(isinstance(line, dict) for line in state.log_history):
            raise ValueError("no run of this library writes such a state")
    return state


def _same_kind(value: Any, usual: Any) -> bool:
    if usual is None:
        return value is None or isinstance(value, bool | int | float | str)
    if type(usual) in (int, float):
        return type(value) in (int, float) and 0 <= value < 2**63
    return isinstance(value, type(usual))


def read_optimizer(checkpoint: Path, optimizer: Optimizer, kind: str) -> dict[str, Any]:
    """The state in `optimizer.pt`, for an `optimizer` of a `kind` ("adamw", "muon", "m3"); ConfigError if it does not
    fit: PyTorch checks no shapes, and a wrong one would overwrite foreign memory."""
    path, steps = checkpoint / OPTIMIZER, step_of(checkpoint)
    with checking(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        ours = optimizer.state_dict()
        if ours.keys() != state.keys():
            raise ValueError(f"it has {list(state)}, and the optimizer {list(ours)}")
        check_groups(state["param_groups"], ours["param_groups"])
        # Options that are new in this version of PyTorch keep their values.
        state["param_groups"] = [b | a for a, b in zip(state["param_groups"], ours["param_groups"], strict=True)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = [kind if group.get(kind) else "adamw" for group in optimizer.param_groups for _ in group["params"]]
        sums = state.get("accumulated", {})
        for i in (*state["state"], *sums):
            if type(i) is not int or not 0 <= i < len(parameters):
                raise ValueError(f"there is no parameter {i!r}")
        for i, moments in state["state"].items():
            _check_moments(moments, parameters[i], kinds[i], steps, f"parameter {i}")
        _check_count("steps", state.get("steps", 0), steps)
        for i, total in sums.items():
            _check_tensor(total, parameters[i], f"the sum of gradients of parameter {i}")
    return state


def check_groups(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """ValueError unless two lists of parameter groups have the same parameters and settings, but for the rate."""
    for n, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        for name in sorted(a.keys() | {"params"}):
            if name != "lr" and (name not in b or type(a.get(name)) is not type(b[name]) or a[name] != b[name]):
                raise ValueError(f"{name} of group {n} is {a.get(name)!r}, and this run has {b.get(name)!r}")


def _check_moments(saved: dict[str, Any], parameter: Tensor, kind: str, steps: int, where: str) -> None:
    if saved.keys() != _MOMENTS[kind] | ({"step"} if kind != "muon" else set()):
        raise ValueError(f"{where} has {list(saved)}")
    for name in _MOMENTS[kind]:
        _check_tensor(saved[name], parameter, f"{name} of {where}")
    count = saved.get("step", 0)
    if kind == "adamw" and (count.shape != () or count.dtype != torch.float32):
        raise ValueError(f"step of {where} is of shape {list(count.shape)} and {count.dtype}")
    _check_count(f"step of {where}", count.item() if kind == "adamw" else count, steps)


def _check_tensor(value: Any, parameter: Tensor, where: str) -> None:
    if value.shape != parameter.shape or value.dtype != parameter.dtype or value.layout != parameter.layout:
        wanted = f"{list(parameter.shape)} of {parameter.dtype}"
        raise ValueError(f"{where} is {list(value.shape)} of {value.dtype}, and the parameter {wanted}")
    if not value.isfinite().all():
        raise ValueError(f"{where} is not finite")


def _check_count(where: str, count: Any, steps: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count <= steps or count != int(count):
        raise ValueError(f"{where} is {count!r} after {steps} steps")


@contextmanager
def restoring_random_state(checkpoint: Path) -> Iterator[None]:
    """Around restoring random states from a checkpoint: ConfigError if they are damaged."""
    with checking(checkpoint / RANDOM):
        yield
        position = np.random.get_state(legacy=False)["state"]["pos"]  # NumPy does not check it
        if not 0 <= position <= 624:
            raise ValueError(f"NumPy's random state is at position {position} of 624")


_PLAIN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""The classes in `.metadata`, a pickle; any other is refused."""


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / SHARDS).is_dir()


def save_shards(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a sharded model and its optimizer; all processes must call."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=checkpoint / SHARDS)


def load_sharded_weights(checkpoint: Path, model: nn.Module) -> None:
    """Read sharded weights into a model, which is sharded (then all processes must call) or not."""
    weights = get_model_state_dict(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load_shards({"model": weights}, checkpoint, no_dist=not isinstance(model, FSDPModule))
    set_model_state_dict(model, weights)


def load_sharded_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read the optimizer's state of a sharded model; all processes must call."""
    state = get_optimizer_state_dict(model, optimizer)
    groups = cast(list[dict[str, Any]], state["param_groups"])
    before = [dict(group) for group in groups]
    load_shards({"optimizer": state}, checkpoint)
    with checking(checkpoint / SHARDS):
        check_groups(cast(list[dict[str, Any]], state["param_groups"]), before)
    set_optimizer_state_dict(model, optimizer, state)


def load_shards(state: dict[str, Any], checkpoint: Path, no_dist: bool = False) -> None:
    """Read `state` from a sharded checkpoint, in place; ConfigError if it does not fit."""
    with checking(checkpoint / SHARDS):
        try:
            dcp.load(state, storage_reader=_Reader(checkpoint / SHARDS), planner=_Planner(), no_dist=no_dist)
        except CheckpointException as error:  # not an Exception
            raise ValueError(str(next(iter(error.failures.values()))[0])) from error


def _sharded_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    try:
        about = _Reader(checkpoint / SHARDS).read_metadata()
        found = about.state_dict_metadata.items()
        weights = {name.removeprefix("model."): what for name, what in found if name.startswith("model.")}
        tensors = {name: what for name, what in weights.items() if isinstance(what, TensorStorageMetadata)}
        integers = [name for name, what in tensors.items() if not what.properties.dtype.is_floating_point]
        sizes = {name: tuple(what.size) for name, what in tensors.items()}
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged pickles raise many types
        raise ValueError(f"{SHARDS}/.metadata is damaged ({type(error).__name__})") from error
    if integers:
        raise ValueError(f"the weight {integers[0]} in {SHARDS} is not floating-point")
    return sizes


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """PyTorch's own calls whatever `.metadata` names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            _Unpickler(file).load()
        return super().read_metadata(*args, **kwargs)


class _Planner(dcp.DefaultLoadPlanner):
    """PyTorch's own calls whatever a value that is not a tensor names."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
