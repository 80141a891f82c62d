"""Checkpoints of a run, which are there whole or not at all: how one is written, verified, found and let go of.

checkpoint-N/files.json   size and SHA-256 of every other file of the checkpoint, written last
checkpoint-N/data.json    a copy of the run's own, by which a checkpoint of another run is known
.saving/                  where one is written before it gets its name; what a kill left here goes with the next resume
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from atlas_memory.console import first_line
from atlas_memory.train import sharded
from atlas_memory.train.config import ConfigError
from atlas_memory.train.loaded import OPTIMIZER, STATE, number
from atlas_memory.train.processes import largest, process, processes
from atlas_memory.train.settings import ABOUT
from atlas_memory.train.yaml_files import read_json

logger = logging.getLogger(__name__)
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files, as save_pretrained writes those of large models
DIGESTS = "files.json"
SAVING = ".saving"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file or a checkpoint of a run: OSError of one line if it could not be done."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # whose RuntimeErrors are of no file
    except (OSError, RuntimeError, SafetensorError) as error:  # PyTorch and safetensors have their own for a full disk
        if not path.parent.is_dir():
            raise OSError(
                f"{path} could not be written: its folder is gone; put a copy back, and the run goes on from the "
                f"checkpoint in it with: atlas train --resume output_dir={path.parent}; or begin again"
            ) from error
        full = shutil.disk_usage(path.parent).free < 2**20
        reason = "the disk is full" if full else getattr(error, "strerror", None) or first_line(error)
        raise OSError(
            f"{path} could not be written: {reason}; make room, and the run goes on from its last checkpoint with: "
            f"atlas train --resume output_dir={path.parent}"
        ) from error


def make_readable(folder: Path) -> None:
    """Give the files of weights the mode that other new files have: safetensors leaves them to their owner alone."""
    mode = next(folder.glob("*.json")).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def publish(folder: Path, step: int, keep: int) -> None:
    """Give the checkpoint in `.saving` its name, with the digests of its files, and let go of all but the newest
    `keep`; all processes must call, when each has written its files."""
    name = f"checkpoint-{step}"
    written = folder / SAVING / name
    if process() == 0:
        shutil.copyfile(folder / ABOUT, written / ABOUT)
    mine = [path for path in _files(written) if _writer(path) == process()]
    found = [dict(zip(map(str, (p.relative_to(written) for p in mine)), _digests(mine), strict=True))]
    if processes() > 1:
        found *= processes()
        torch.distributed.all_gather_object(found, found[0])
    if process() > 0:
        return
    make_readable(written)
    about = {path: digest for part in found for path, digest in part.items()}
    (written / DIGESTS).write_text(json.dumps(about, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    shutil.rmtree(folder / name, ignore_errors=True)  # a damaged one, before which the run has gone on
    written.rename(folder / name)
    # Those of later steps are damaged ones too.
    others = sorted(_all(folder), key=lambda path: (number(path) <= step, number(path)))
    for path in others[: max(0, len(others) - keep)]:
        shutil.rmtree(path, ignore_errors=True)


def _files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint, without those of reports on it (`report.folders`), which come later."""
    found = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != DIGESTS)
    return sorted(path for path in found if not re.match("[.]?report[^/]*/", path.relative_to(checkpoint).as_posix()))


def _writer(path: Path) -> int:
    """The process that wrote a file, which has it at hand: the first number in `rng_state_1.pth`, `__1_0.distcp`."""
    found = re.search(r"[_-](\d+)[_.]", path.name)
    return int(found[1]) % processes() if found else 0


def _digests(paths: list[Path]) -> list[tuple[int, str]]:
    """Sizes and SHA-256, of several files at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> tuple[int, str]:
    about = path.stat()
    return about.st_size, _sha256(path, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4096)  # a checkpoint is asked for several times
def _sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _all(folder: Path) -> list[Path]:
    """All of a run's `checkpoint-N`, newest first."""
    found = [p for p in folder.glob("checkpoint-*") if re.fullmatch("checkpoint-[0-9]{1,15}", p.name) and p.is_dir()]
    return sorted(found, key=number, reverse=True)


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, intact or not; -1 where there is none."""
    return max(map(number, _all(folder)), default=-1)


def newest_checkpoint(folder: Path) -> Path | None:
    """The intact `checkpoint-N` with the largest N; broken ones are named in a warning and left alone."""
    for path in _all(folder):
        reason = broken(path)
        if reason is None:
            return path
        logger.warning("skipping %s: %s", path, reason)
    return None


def checkpoint_to_resume(folder: Path) -> Path | None:
    """The checkpoint from which a run goes on, as the first process finds it; None: from the beginning, where there is
    neither one nor a model that would be written over. ConfigError if all are damaged, or a model is all there is. All
    processes must ask."""
    found = newest_checkpoint(folder) if process() == 0 else None
    step, there = largest(-1 if found is None else number(found), newest_step(folder))
    if step < 0 <= there:
        reasons = "; ".join(f"{path.name}: {broken(path)}" for path in _all(folder))
        raise ConfigError(
            f"output_dir={str(folder)!r} has no checkpoint to go on from ({reasons}): put an intact copy of one back, "
            "or train into another output_dir"
        )
    if step < 0 and (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"output_dir={str(folder)!r} has a model and no checkpoint to go on from: put one back, or begin "
            f"another run with the model: atlas train model.init_from={folder} output_dir=..."
        )
    return None if step < 0 else folder / f"checkpoint-{int(step)}"


def broken(checkpoint: Path) -> str | None:
    """Which file of a checkpoint is missing or not what was written, so that nothing goes on from it; None: none is."""
    if not (checkpoint / DIGESTS).is_file():
        return f"{DIGESTS} is missing"
    try:
        said = read_json(checkpoint / DIGESTS)
        known = {name: (int(size), str(digest)) for name, (size, digest) in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{DIGESTS} is damaged"
    try:
        held = {str(path.relative_to(checkpoint)) for path in _files(checkpoint)}
        optimizer = f"{sharded.SHARDS}/.metadata" if sharded.is_in(checkpoint) else OPTIMIZER
        for name in (*sorted(held - {".DS_Store"}), "config.json", STATE, optimizer):
            if name not in known:
                return f"{DIGESTS} does not name {name}"
        for name, (size, _) in known.items():
            if name not in held:
                return f"{name} is missing"
            if (there := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {there:,} of {size:,} bytes"
        found = _digests([checkpoint / name for name in known])
    except OSError as error:
        return f"a file is damaged ({first_line(error)})"
    for name, digest in zip(known, found, strict=True):
        if digest != known[name]:
            return f"{name} is damaged: its bytes are not those that were written"
    return None if _of_this_run(checkpoint) else f"it is of another run: its {ABOUT} is not that of the run"


def _of_this_run(checkpoint: Path) -> bool:
    """Whether a checkpoint is of the run in whose folder it lies, as far as both say."""
    both = checkpoint / ABOUT, checkpoint.resolve().parent / ABOUT
    return not all(path.is_file() for path in both) or both[0].read_bytes() == both[1].read_bytes()


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a folder; FileNotFoundError or ValueError if they are not whole."""
    if sharded.is_in(folder):
        return sharded.shapes(folder)
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise FileNotFoundError(2, "no such file", str(path))
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is damaged or cut short ({first_line(error)})") from error
        for name, weight in stored.items():
            if (kind := weight.get_dtype()) not in ("F64", "F32", "BF16", "F16"):  # which would be cut without a word
                raise ValueError(
                    f"the weight {name} in {str(path)!r} is {kind}: weights are floating-point numbers of 16 bits or "
                    "more"
                )
            found[name] = tuple(weight.get_shape())
    return found


def has_weights(folder: Path) -> bool:
    """Whether `save_pretrained` has left weights in a folder, in one file or in several."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights in a folder; ValueError if the list of several is damaged."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    try:
        names = read_json(folder / INDEX)["weight_map"].values()
        paths = [folder / name for name in sorted(set(names))]
        if any(path.parent != folder for path in paths):
            raise ValueError("a file elsewhere")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(folder / INDEX)!r} is damaged") from error
    if lacking := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{str(folder)!r} lacks {', '.join(lacking)}, which {INDEX} names: bring its files together")
    return paths
