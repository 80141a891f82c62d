"""Runs as a dashboard sees them: folders with logs that grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from atlas_memory.models import PRESETS  # without torch
from atlas_memory.rules.names import DEFAULT_RULE
from atlas_memory.train.logs import LOG, MEMORY, SAMPLES, USABLE, Log
from atlas_memory.train.settings import UNASKED_STEPS, flat_settings, in_bytes
from atlas_memory.train.yaml_files import read_json
from atlas_memory.viz.report.words import legible, raised

SIGNS = (LOG, "run.yaml")  # of a run: either
WITHOUT_MEMORY = ("swa", "attention")  # as `BLOCKS` says too, which loads torch


class Watched:
    """A run that may be under way.

    Attributes:
        folder: of the run.
        name: what it is called beside the others.
        config: its `run.yaml` as flat keys, such as "train.steps".
        steps, looks, samples: lines of log.jsonl, memory.jsonl and samples.jsonl, as of the last `read`.
        damaged: lines of them that are of no use.
        unreadable: a line for each of its files that is there and cannot be read, with the reason.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._lock = threading.Lock()  # whoever looks has a thread
        self._logs = [Log(folder / name, USABLE[name]) for name in (LOG, MEMORY, SAMPLES)]
        self.config: dict[str, Any] = {}
        self._model: dict[str, Any] = {}
        self.read()

    def read(self) -> None:
        """Take in what was written since the last time."""
        with self._lock:
            self.steps, self.looks, self.samples = [log.read() for log in self._logs]
            self.damaged = sum(log.damaged for log in self._logs)
            self.unreadable = [
                f"{log.path.name} cannot be read: {log.unreadable}" for log in self._logs if log.unreadable
            ]
            try:
                self.config = flat_settings(self.folder) or self.config  # a run that goes on may have more steps
            except ValueError as error:
                self.unreadable.append(str(error))
            if not self._model:
                first = os.path.expanduser(str(self.config.get("model.init_from") or ""))
                self._model = _saved(self.folder) or (_saved(Path(first)) if first else {})

    @property
    def goal(self) -> int | None:
        """The step at which training ends, if the run says."""
        goal, minutes = self.config.get("train.steps"), self.config.get("train.max_minutes")
        if goal is None and minutes is None and self.config:
            return UNASKED_STEPS
        return goal if type(goal) is int and goal < 1 << 63 else None

    @property
    def written(self) -> float:
        """When one of its logs was written last."""
        return newest(log.path for log in self._logs)

    @property
    def bytes(self) -> bool:
        """Whether a token is a byte, so that losses are bits of a byte."""
        return in_bytes(self.folder)

    @property
    def block(self) -> str:
        """What mixes over time."""
        return str(self.config.get("model.block") or self._model.get("block") or "lmm")

    @property
    def remembers(self) -> bool:
        """Whether the model has memories."""
        return self.block not in WITHOUT_MEMORY

    @property
    def rule(self) -> str:
        """The rule of its memories: asked for, as a saved model has it, or the preset's; "" where no one says."""
        known = self.config.get("model.rule") or self._model.get("rule") or ("hope" if self.block == "hope" else "")
        preset = PRESETS.get(str(self.config.get("model.preset")))
        if known or preset is None or self.config.get("model.init_from"):
            return str(known)
        return str(preset.config.get("rule", DEFAULT_RULE))

    @property
    def alarms(self) -> list[tuple[int, int | None, str]]:
        """Each alarm of its memories: the step of the look that raised it first; that of the last look that did, if
        later ones did not; and what that says."""
        return [(alarm["step"], alarm["until"], alarm["text"]) for alarm in raised(self.looks)]


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The runs among folders and in them, each once, in the order of their names; ValueError if a place has none."""
    return list(dict.fromkeys(folder for place in places for folder in _in(Path(place), [])))


def _in(place: Path, closed: list[str]) -> list[Path]:
    """The runs in a folder; those in it that cannot be read are named in `closed`."""
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


def newest(paths: Iterable[Path]) -> float:
    """When one of these was changed last, in seconds; 0 where none is there."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


class Runs:
    """The runs in places, as they come and go.

    Attributes:
        missing: a line for each place that had no run when it was looked at last, and for each folder in one that could
            not be looked into.
    """

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.places = places
        self.missing: list[str] = []
        self._known: dict[Path, Watched] = {}
        self._due = 0.0

    def all(self, due: bool = False) -> list[Watched]:
        """Those that are there now, under the shortest names that tell them apart. With `due`, as they were found last
        if that is so short ago that looking would take more than a twentieth of the time: training may need it."""
        begun = monotonic()
        if due and begun < self._due:
            return list(self._known.values())
        folders: dict[Path, None] = {}
        missing: list[str] = []
        for place in self.places:
            try:
                folders |= dict.fromkeys(_in(Path(place), missing))
            except ValueError as error:
                missing.append(str(error))
        above = Path(os.path.commonpath([folder.parent for folder in folders] or [Path("/")]))
        names = {folder: legible(folder.relative_to(above), 1 << 16) for folder in folders}
        known = self._known
        self._known = {
            folder: known[folder] if folder in known and known[folder].name == name else Watched(folder, name)
            for folder, name in names.items()
        }
        self.missing, self._due = missing, begun + 20 * (monotonic() - begun)
        return list(self._known.values())


def _saved(folder: Path) -> dict[str, Any]:
    """The configuration of the model in a folder; nothing where there is none, or not whole yet."""
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
