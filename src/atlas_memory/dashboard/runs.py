"""Runs as a dashboard sees them: folders with logs that grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_memory.training.logs import LOG, MEMORY, SAMPLES, Log
from atlas_memory.training.settings import flat_settings, in_bytes


class Watched:
    """A run that may be under way.

    Attributes:
        folder: of the run.
        name: what it is called beside the others.
        config: its `run.yaml` as flat keys, such as "train.steps".
        steps, looks, samples: lines of log.jsonl, memory.jsonl and samples.jsonl, as of the last `read`.
        damaged: lines of them that could not be read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._lock = threading.Lock()  # whoever looks has a thread
        self._logs = [
            Log(folder / LOG, "loss", "elapsed"),
            Log(folder / MEMORY, "memories", "seconds"),
            Log(folder / SAMPLES, "prompt", "text"),
        ]
        self.config: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Take in what was written since the last time."""
        with self._lock:
            self.steps, self.looks, self.samples = [log.read() for log in self._logs]
            self.damaged = sum(log.damaged for log in self._logs)
            if not self.config:
                self.config = flat_settings(self.folder)

    @property
    def goal(self) -> int | None:
        """The step at which training ends, if the run says."""
        goal = self.config.get("train.steps")
        return goal if isinstance(goal, int) else None

    @property
    def bytes(self) -> bool:
        """Whether a token is a byte, so that losses are bits of a byte."""
        return in_bytes(self.config)

    @property
    def alarms(self) -> list[tuple[int, str]]:
        """Each alarm of its memories: the step of the look that raised it first, and what it says."""
        found: dict[tuple[str, str], tuple[int, str]] = {}
        for look in self.looks:
            for alarm in look.get("alarms", ()):
                found.setdefault((alarm["kind"], alarm["memory"]), (look["step"], alarm["text"]))
        return list(found.values())


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The runs among folders and in them, each once, in the order of their names; ValueError if a place has none."""
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if not place.is_dir():
            raise ValueError(f"no run at {str(place)!r}: the folder does not exist")
        inside = [place] if _is_run(place) else sorted({path.parent for path in place.rglob(LOG)})
        if not inside:
            raise ValueError(f"no run at {str(place)!r}: neither the folder nor one in it holds a {LOG}")
        found |= dict.fromkeys(folder.resolve() for folder in inside)
    return list(found)


class Runs:
    """The runs in places, as they come."""

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.places = places
        self._known: dict[Path, Watched] = {}

    def all(self) -> list[Watched]:
        """Those that are there now, under the shortest names that tell them apart."""
        folders = find_runs(self.places)
        above = Path(os.path.commonpath([folder.parent for folder in folders]))
        names = {folder: str(folder.relative_to(above)) for folder in folders}
        known = self._known
        self._known = {
            folder: known[folder] if folder in known and known[folder].name == name else Watched(folder, name)
            for folder, name in names.items()
        }
        return list(self._known.values())


def _is_run(folder: Path) -> bool:
    return (folder / LOG).is_file() or (folder / "run.yaml").is_file()
