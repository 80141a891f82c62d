"""The logs of a run: files of JSON lines, one a step, which are read while they grow."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LOG, MEMORY, SAMPLES = "log.jsonl", "memory.jsonl", "samples.jsonl"
Check = Callable[[Any], bool]


def _object(needs: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """Whether a value is an object that has all it needs, and nothing of another kind under the names it may have."""
    checks = [*needs.items(), *(may or {}).items()]

    def check(value: Any) -> bool:
        if not isinstance(value, dict) or not needs.keys() <= value.keys():
            return False
        return all(right(value[name]) for name, right in checks if name in value)

    return check


def _list(right: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(right, value))


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _number(value: Any) -> bool:
    """A figure of a run, which computes with 32 bits at most: a larger one could not be drawn beside others."""
    return (type(value) is float and abs(value) < 1e40) or _whole(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _measured(value: Any) -> bool:
    """A figure, which is null where the text was too short for it or it was not finite."""
    return value is None or type(value) is float or _whole(value)


_HEADS = _list(_measured)
_GATE = _object({"mean": _HEADS, "std": _HEADS})
_FOUND = _object(
    {"name": _text, "share": _measured, "branch": _measured, "error": _list(_HEADS)},
    {name: _GATE for name in ("alpha", "eta", "theta", "gamma", "delta")}
    | {"half_life": lambda value: value is None or _HEADS(value)}
    | {name: _HEADS for name in ("surprise", "written", "norm", "moved", "momentum", "momentum_rank", "rank", "turn")},
)
_ALARMS = _list(_object({"kind": _text, "memory": _text, "text": _text}))
_LINE = _object({"step": _whole})
USABLE: dict[str, Check] = {
    LOG: _object(
        {"step": _whole, "loss": _number, "elapsed": _number},
        {"learning_rate": _number, "grad_norm": _number, "held_out_bits_per_byte": _number},
    ),
    MEMORY: _object(
        {"step": _whole, "seconds": _number, "memories": _list(_FOUND)},
        {"remembrance": _measured, "back": _number, "suspected": _ALARMS, "alarms": _ALARMS},
    ),
    SAMPLES: _object({"step": _whole, "prompt": _text, "text": _text}),
}
"""What a line of each log must be for those who read it."""


class Log:
    """A log, read as far as it is written; a line that is still being written is left for the next time.

    Attributes:
        path: of the file, which need not be there yet.
        usable: what a line must be, of `USABLE`; any object with a whole number as its `step` unless given.
        damaged: lines that are not; they are skipped.
        unreadable: why there is nothing to read although something is there, such as "it is a folder"; else "".
    """

    def __init__(self, path: Path, usable: Check = _LINE) -> None:
        self.path, self.usable = path, usable
        self._begin(None)

    def _begin(self, file: int | None) -> None:
        self._file, self._at, self.damaged, self.unreadable = file, 0, 0, ""
        self._steps: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """All lines by step, of which only those are read that came since the last time; a step that was done again
        after a resume counts once, as last done. A file that was replaced or cut is read anew; what cannot be read has
        no lines, and `unreadable` says why."""
        try:
            _check_regular(self.path)  # to open a pipe would be to wait for whoever writes into it
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._at:
                    self._begin(found.st_ino)
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            self._begin(None)
            return []
        except OSError as error:
            self._begin(None)
            self.unreadable = error.strerror or str(error)
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
        except (ValueError, RecursionError):  # cut off when the process was killed, or edited
            entry = None
        if self.usable(entry):
            self._steps[entry["step"]] = entry
        else:
            self.damaged += 1


def _check_regular(path: Path) -> None:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(0, "it is a folder" if stat.S_ISDIR(mode) else "it is no file, but a pipe or a device", str(path))


def read_log(folder: Path, name: str = LOG) -> list[dict[str, Any]]:
    """The usable lines of a log of the run in `folder`, as `Log.read` gives them; ValueError if it is there and cannot
    be read."""
    return _lines(Log(folder / name, USABLE[name]))


def _lines(log: Log) -> list[dict[str, Any]]:
    lines = log.read()
    if log.unreadable:
        raise ValueError(f"{str(log.path)!r} cannot be read ({log.unreadable}): move it away, or make it readable")
    return lines


def so_far(folder: Path, step: int) -> tuple[dict[str, Any], float]:
    """The line of a step in the log of the run in `folder`, empty if it has none; and the seconds that the run had
    taken by then, or by the last step before it of which there is a line."""
    lines = [entry for entry in read_log(folder) if entry["step"] <= step]
    of_step: dict[str, Any] = next((entry for entry in reversed(lines) if entry["step"] == step), {})
    return of_step, max((entry["elapsed"] for entry in lines), default=0.0)


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
        path = folder / name
        kept = [entry for entry in _lines(Log(path)) if entry["step"] <= step]
        if path.is_file():
            replacement = path.with_suffix(".tmp")
            replacement.write_text("".join(map(line, kept)), encoding="utf-8")
            replacement.replace(path)
