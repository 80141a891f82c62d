"""The folders of runs, and those in which reports are written."""

from __future__ import annotations

import json
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
    """The runs among folders and in them, each once, in the order of their names; ValueError if a place has none. Those
    that cannot be read are named in `closed`."""
    return list(
        dict.fromkeys(run for place in places for run in _runs_in(Path(place), [] if closed is None else closed))
    )


def _runs_in(place: Path, closed: list[str]) -> list[Path]:
    if not os.path.isdir(place):
        raise ValueError(f"no run at {str(place)!r}: the folder does not exist")
    refused: list[OSError] = []
    walked = os.walk(place, onerror=refused.append)
    inside = sorted(Path(at) for at, folders, files in walked if {*folders, *files} & {*SIGNS})
    closed += [f"no way into {str(error.filename)!r}: {error.strerror}" for error in refused]
    if not inside:
        found = f"neither the folder nor one in it holds a {' or a '.join(SIGNS)}"
        raise ValueError(f"no run at {str(place)!r}: {', '.join([found, *closed])}")
    return [folder.resolve() for folder in inside]


def common_folder(runs: Sequence[Path]) -> tuple[Path, dict[Path, str]]:
    """The innermost folder that holds all runs, and their names in it."""
    above = Path(os.path.commonpath([run.parent for run in runs] or [Path("/")]))
    return above, {run: legible(run.relative_to(above), 1 << 16) for run in runs}


@contextmanager
def written(target: Path) -> Iterator[Path]:
    """A folder to write files in, which take their places in `target` when all of them are written: a report that could
    not be written leaves the one before as it was.

    Raises:
        OSError: They could not be written, in one line.
    """
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
    """OSError where `target` cannot be written: to be asked before minutes of reading go into what it is to hold."""
    if not os.access(target.parent, os.W_OK):
        raise OSError(f"{str(target)!r} could not be written: {str(target.parent)!r} is not writable")


def report_folder(above: Path, name: str, data: str | Path | None) -> Path:
    """The folder in `above` for what `name` is (a report, a comparison) of the text that `data` names: `name-TEXT`, and
    `name-TEXT-2` and so on where that is of another text that is called the same; without `data`, `name`."""
    if data is None:
        return above / name
    stem = re.sub(r"[^\w.+=-]+", "_", Path(data).stem).strip("_.") or "text"
    first, number = above / f"{name}-{stem}", 1
    target = first
    while _text_in(target, name) not in (None, identity(data)):
        number += 1
        target = first.with_name(f"{first.name}-{number}")
    return target


def identity(data: str | Path | None) -> str | None:
    """What tells a text from others: its path; the name of what is no file or folder here."""
    if data is None:
        return None
    path = Path(data).expanduser()
    return str(path.resolve()) if path.exists() else str(data)


def _text_in(folder: Path, name: str) -> str | None:
    """Of which text a folder is; None where it does not say, which may be overwritten."""
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
