"""Rows of datasets: those that `datasets` has saved, and those of a hub."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atlas_memory.data.folders import first_line

SPLITS = "dataset_dict.json"


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` has written it."""
    has = {name for name in (SPLITS, "dataset_info.json", "state.json") if os.path.isfile(folder / name)}
    return SPLITS in has or len(has) == 2


def rows_of_dataset(
    place: Path | str, column: str, split: str, subset: str | None = None, streaming: bool = False
) -> Iterable[Any]:
    """Rows of a folder of `save_to_disk`, a path, or of a dataset on a hub, a name; with the column alone, where there
    is one. ValueError where it cannot be read or has no such split."""
    try:
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(logging.CRITICAL)  # what it reports, the error says
        if isinstance(place, str):
            found = datasets.load_dataset(place, subset, split=split, streaming=streaming)
        else:
            found = datasets.load_from_disk(str(folder)) if (folder := _with_rows(place, split)) else []
        # Of others pictures and sounds would be decoded.
        return found.select_columns(column) if column in (getattr(found, "column_names", None) or ()) else found
    except Exception as error:  # the loader raises a dozen different types
        what = "cannot be read" if isinstance(place, Path) else "does not exist here nor as a dataset by name"
        if isinstance(error, ModuleNotFoundError):
            what = f"is read by {error.name}, which is missing: pip install {error.name}"
        raise ValueError(f"data.path={str(place)!r} {what} ({first_line(error)})") from error


def _with_rows(folder: Path, split: str) -> Path | None:
    """The folder of the split, where there are several; None if nothing was saved to it, of which datasets makes an
    error."""
    if (several := folder / SPLITS).is_file():
        splits = json.loads(several.read_text(encoding="utf-8"))["splits"]
        if split not in splits:
            raise ValueError(f"it has no split {split!r}: set data.split to one of {', '.join(splits)}")
        folder = folder / split
    files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
    for name in (file["filename"] for file in files):
        if not os.path.isfile(folder / name):  # or a pipe, which may never end
            raise ValueError(f"{name} is missing, or no file")
    return folder if files else None
