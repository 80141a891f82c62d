"""Runs of the dashboard: folders with logs that grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from atlas_memory.models import PRESETS  # without torch
from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES, Log, ProbeRecord, SampleRecord, StepRecord, alarm_history
from atlas_memory.rules import DEFAULT_RULE
from atlas_memory.train.run_folder import DEFAULT_STEPS, flat_settings, has_byte_tokens, read_json
from atlas_memory.viz.folders import common_folder, find_runs

WITHOUT_MEMORY = ("swa", "attention")  # as `BLOCKS` says too, which loads torch


class WatchedRun:
    """A run that may be in progress: its `run.yaml` by keys such as "train.steps", the records of its logs as of the
    last `read`, the number of damaged lines, and why files cannot be read."""

    config: dict[str, Any]
    steps: list[StepRecord]
    probes: list[ProbeRecord]
    samples: list[SampleRecord]

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._lock = threading.Lock()  # each session of a browser has a thread
        self._log, self._memory = Log(folder / LOG, StepRecord), Log(folder / MEMORY, ProbeRecord)
        self._samples = Log(folder / SAMPLES, SampleRecord)
        self._logs: list[Log[Any]] = [self._log, self._memory, self._samples]
        self.config, self._model = {}, dict[str, Any]()
        self.read()

    def read(self) -> None:
        with self._lock:
            self.steps, self.probes, self.samples = self._log.read(), self._memory.read(), self._samples.read()
            self.damaged = sum(log.damaged for log in self._logs)
            self.unreadable = [
                f"{log.path.name} cannot be read: {log.unreadable}" for log in self._logs if log.unreadable
            ]
            try:
                self.config = flat_settings(self.folder) or self.config  # a resumed run may have more steps
            except ValueError as error:
                self.unreadable.append(str(error))
            if not self._model:
                first = os.path.expanduser(str(self.config.get("model.init_from") or ""))
                self._model = _model_config(self.folder) or (_model_config(Path(first)) if first else {})

    @property
    def last_step(self) -> int | None:
        """The step at which training ends, if it is known."""
        goal, minutes = self.config.get("train.steps"), self.config.get("train.max_minutes")
        if goal is None and minutes is None and self.config:
            return DEFAULT_STEPS
        return goal if type(goal) is int and goal < 1 << 63 else None

    @property
    def written(self) -> float:
        """The time of the last change of a log."""
        return newest(log.path for log in self._logs)

    @property
    def of_bytes(self) -> bool:
        return has_byte_tokens(self.folder)

    @property
    def block(self) -> str:
        return str(self.config.get("model.block") or self._model.get("block") or "lmm")

    @property
    def has_memory(self) -> bool:
        return self.block not in WITHOUT_MEMORY

    @property
    def rule(self) -> str:
        """The rule of its memories; "" where it is unknown."""
        known = self.config.get("model.rule") or self._model.get("rule") or ("hope" if self.block == "hope" else "")
        preset = PRESETS.get(str(self.config.get("model.preset")))
        if known or preset is None or self.config.get("model.init_from"):
            return str(known)
        return str(preset.config.get("rule", DEFAULT_RULE))

    @property
    def alarms(self) -> list[dict[str, Any]]:
        return alarm_history(self.probes)


def _model_config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in a folder; empty if there is none, or not whole yet."""
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def newest(paths: Iterable[Path]) -> float:
    """The time of the last change of these files; 0 without any."""
    times = [0.0]
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


class WatchedRuns:
    """The runs in some places; `missing` names places without a run, and unreadable folders."""

    def __init__(self, places: Sequence[str | Path]) -> None:
        self.places, self._due = places, 0.0
        self.missing: list[str] = []
        self._known: dict[Path, WatchedRun] = {}

    def all(self, due: bool = False) -> list[WatchedRun]:
        """The runs now, under the shortest names that tell them apart. With `due`, those found last, unless that is so
        long ago that another search takes at most a twentieth of the time: training may need it."""
        begun = monotonic()
        if due and begun < self._due:
            return list(self._known.values())
        folders: dict[Path, None] = {}
        missing: list[str] = []
        for place in self.places:
            try:
                folders |= dict.fromkeys(find_runs([place], missing))
            except ValueError as error:
                missing.append(str(error))
        known = self._known
        self._known = {
            folder: known[folder] if folder in known and known[folder].name == name else WatchedRun(folder, name)
            for folder, name in common_folder(list(folders))[1].items()
        }
        self.missing, self._due = missing, begun + 20 * (monotonic() - begun)
        return list(self._known.values())
