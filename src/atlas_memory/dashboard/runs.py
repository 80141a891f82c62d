"""Runs as a dashboard sees them: folders with logs that grow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas_memory.training.logs import LOG, MEMORY, SAMPLES, Log
from atlas_memory.training.settings import flat_settings


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
        self._logs = [Log(folder / log) for log in (LOG, MEMORY, SAMPLES)]
        self.config: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Take in what was written since the last time."""
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
        return self.config.get("data.tokenizer", "bytes") == "bytes"

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


def watch(folders: Sequence[Path]) -> list[Watched]:
    """Runs under the shortest names that tell them apart."""
    parents = [folder.parent for folder in folders]
    above = Path(os.path.commonpath(parents)) if parents else Path()
    return [Watched(folder, str(folder.relative_to(above))) for folder in folders]


def _is_run(folder: Path) -> bool:
    return (folder / LOG).is_file() or (folder / "run.yaml").is_file()
