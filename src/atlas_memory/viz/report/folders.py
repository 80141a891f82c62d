"""Where reports are written: a folder for each text that is read."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        raise OSError(f"{str(target)!r} could not be written: {str(target.parent)!r} is not to be written to")


def folder_for(above: Path, name: str, data: str | Path | None) -> Path:
    """The folder in `above` for what `name` is (a report, a comparison) of the text that `data` names: `name-TEXT`, and
    `name-TEXT-2` and so on where that is of another text that is called the same; without `data`, `name`."""
    if data is None:
        return above / name
    stem = re.sub(r"[^\w.+=-]+", "_", Path(data).stem).strip("_.") or "text"
    first, number = above / f"{name}-{stem}", 1
    target = first
    while _text_in(target, name) not in (None, place(data)):
        number += 1
        target = first.with_name(f"{first.name}-{number}")
    return target


def place(data: str | Path | None) -> str | None:
    """What tells a text from others: where it stands; of what is no file or folder here, its name."""
    if data is None:
        return None
    path = Path(data).expanduser()
    return str(path.resolve()) if path.exists() else str(data)


def _text_in(folder: Path, name: str) -> str | None:
    """Of which text a folder is; None where it does not say, which may be written anew."""
    try:
        found = json.loads((folder / f"{name}.json").read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
