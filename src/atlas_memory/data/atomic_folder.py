"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from atlas_memory.console import first_line


def check_new(folder: Path) -> Path:
    """`folder`, made absolute. ValueError if it holds anything, or is a file."""
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is a file: choose a folder to write to")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} is not empty: choose another folder to write to")
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, renamed to it at the end, or deleted on an error; leftovers of a killed process
    are deleted first. OSError where it cannot be written; ValueError where another process writes it."""
    partial = folder.with_name(f".{folder.name}.atlas-partial")  # hidden, so that it is not read as text
    lock = FileLock(partial / ".lock", timeout=0)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        for path in partial.iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield partial
        (partial / ".lock").unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()
        os.replace(partial, folder)
    except Timeout as error:
        raise ValueError(
            f"{str(folder)!r} is being written by another process: wait for it, or choose another"
        ) from error
    except Exception as error:
        if not isinstance(error, OSError) and type(error) is not Exception:  # tokenizers raises a bare one
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"{str(folder)!r} could not be written: {reason}; make room, or choose another folder") from error
    finally:
        if lock.is_locked:
            shutil.rmtree(partial, ignore_errors=True)  # nothing after the rename
            lock.release()
