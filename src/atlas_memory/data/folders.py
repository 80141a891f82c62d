"""Folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(folder: Path) -> Path:
    """`folder`, made absolute. ValueError if it holds anything."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not empty: choose another folder to write to")
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, which takes its name when all is written, and is deleted on an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # hidden: not a part of the text
    try:
        yield partial
        if folder.is_dir():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
