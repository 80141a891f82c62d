"""The logs of a run: files of JSON lines, one a step, which are read while they grow."""

from __future__ import annotations

import json
import math
import os
from operator import index
from pathlib import Path
from typing import Any

LOG, MEMORY, SAMPLES = "log.jsonl", "memory.jsonl", "samples.jsonl"


class Log:
    """A log, read as far as it is written; a line that is still being written is left for the next time.

    Attributes:
        path: of the file, which need not be there yet.
        needs: keys that a line must have.
        damaged: lines that hold no JSON object with a whole number as its `step` and what it `needs`; they are skipped.
    """

    def __init__(self, path: Path, *needs: str) -> None:
        self.path, self.needs = path, needs
        self._begin(None)

    def _begin(self, file: int | None) -> None:
        self._file, self._at, self.damaged = file, 0, 0
        self._steps: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """All lines by step, of which only those are read that came since the last time; a step that was done again
        after a resume counts once, as last done. A file that was replaced or cut is read anew."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._at:
                    self._begin(found.st_ino)
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            self._begin(None)
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.split(b"\n"):
            if line.strip():
                self._take(line)
        return [self._steps[step] for step in sorted(self._steps)]

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            step = index(entry["step"])
            if not all(key in entry for key in self.needs):
                raise KeyError(self.needs)
            self._steps[step] = entry
        except (ValueError, KeyError, TypeError):  # cut off when the process was killed, or edited
            self.damaged += 1


def read_log(folder: Path, name: str = LOG) -> list[dict[str, Any]]:
    """The lines of a log of the run in `folder`, as `Log.read` gives them."""
    return Log(folder / name).read()


def line(entry: dict[str, Any]) -> str:
    """A line of a log: JSON, which knows no NaN; what is not a finite number is null."""
    return json.dumps(_known(entry), allow_nan=False) + "\n"


def _known(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    return [_known(item) for item in value] if isinstance(value, list | tuple) else value


def cut_logs(folder: Path, step: int) -> None:
    """Drop the lines after `step` from all logs: a run resumed at `step` does those steps again, or others."""
    for name in (LOG, SAMPLES, MEMORY):
        kept = [entry for entry in read_log(folder, name) if entry["step"] <= step]
        path = folder / name
        if path.is_file():
            replacement = path.with_suffix(".tmp")
            replacement.write_text("".join(map(line, kept)), encoding="utf-8")
            replacement.replace(path)
