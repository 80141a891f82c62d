"""Folders of runs and of reports."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atlas_memory.monitor.logs import LOG
from atlas_memory.viz.labels import legible

SIGNS = (LOG, "run.yaml")  # of a run: either


def find_runs(places: Sequence[str | Path], closed: list[str] | None = None) -> list[Path]:
    """The runs among folders and in them, each once; ValueError if a place has none. Folders that cannot be read are
    named in `closed`."""
    closed = [] if closed is None else closed
    return list(dict.fromkeys(run for place in places for run in _runs_in(Path(place), closed)))


def _runs_in(place: Path, closed: list[str]) -> list[Path]:
    if not os.path.isdir(place):
        raise ValueError(f"no run at {str(place)!r}: the folder does not exist")
    refused: list[OSError] = []
    walked = os.walk(place, onerror=refused.append)
    inside = sorted(Path(at) for at, folders, files in walked if {*folders, *files} & {*SIGNS})
    closed += [f"{str(error.filename)!r} cannot be read: {error.strerror}" for error in refused]
    if not inside:
        found = f"neither the folder nor one in it holds a {' or a '.join(SIGNS)}"
        raise ValueError(f"no run at {str(place)!r}: {', '.join([found, *closed])}")
    return [folder.resolve() for folder in inside]


def common_folder(runs: Sequence[Path]) -> tuple[Path, dict[Path, str]]:
    """The innermost folder that contains all runs, and their names in it."""
    above = Path(os.path.commonpath([run.parent for run in runs] or [Path("/")]))
    return above, {run: legible(run.relative_to(above), 1 << 16) for run in runs}


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """A folder to write files in, moved to `target` when all are written; OSError of one line if that fails."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        target.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, target / path.name)
    except OSError as error:
        raise OSError(
            f"{str(target)!r} could not be written: {error.strerror or error}; the one before is as it was"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_writable(target: Path) -> None:
    """OSError if `target` cannot be written, before minutes of reading."""
    if not os.access(target.parent, os.W_OK):
        raise OSError(f"{str(target)!r} could not be written: {str(target.parent)!r} is not writable")


def report_folder(above: Path, name: str, data: str | Path | None) -> Path:
    """The folder in `above` for a report or a comparison: `name`, or of a text that `data` names, `name-TEXT`."""
    stem = "" if data is None else "-" + (re.sub(r"[^\w.+=-]+", "_", Path(data).stem).strip("_.") or "text")
    return above / f"{name}{stem}"
