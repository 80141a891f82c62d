"""The logs of a run and their schema, whose titles and descriptions the report and the dashboard show: log.jsonl has
lines of `StepRecord`, memory.jsonl of `ProbeRecord`, samples.jsonl of `SampleRecord`."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from annotated_types import Interval
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, Field, Strict

GATES = ("alpha", "eta", "theta", "gamma", "delta")
LOG, MEMORY, SAMPLES = "log.jsonl", "memory.jsonl", "samples.jsonl"


def _encodable(value: Any) -> Any:
    """Text without lone surrogates."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_encodable)]
Whole = Annotated[int, Strict(), Interval(gt=-(2**63), lt=2**63)]
Number = Annotated[float, Strict(), AllowInfNan(False), Interval(gt=-1e40, lt=1e40)]
"""A float32 number: a larger one could not be drawn."""
Measured = Annotated[float, Strict()] | None
"""A number; null where the text was too short for it, or where it was not finite."""
Heads = list[Measured]


def _measure(title: str, description: str, limits: tuple[float, float] | None = None, default: Any = None) -> Any:
    """A field with the title of its chart, and the values between which colours change."""
    extra: Any = {"limits": limits}
    return Field(default, title=title, description=description, json_schema_extra=extra)


class Record(BaseModel):
    """A line of a log. Fields that a newer version added are kept."""

    model_config = ConfigDict(extra="allow")

    def line(self) -> str:
        """The line; numbers that are not finite are null."""
        return self.model_dump_json(exclude_none=True) + "\n"


class StepRecord(Record):
    """A line of log.jsonl: one training step."""

    step: Whole = Field(description="Number of the training step, from 1.")
    loss: Number = Field(
        title="training loss", description="Mean negative log-likelihood of a training token, in nats. Lower is better."
    )
    elapsed: Number = Field(description="Seconds of training so far, over all resumptions.")
    learning_rate: Number = Field(0.0, title="learning rate", description="Learning rate of the outer optimiser.")
    grad_norm: Number = Field(
        0.0,
        title="gradient norm",
        description="Euclidean norm of the gradient of all weights, before clipping. Spikes mean unstable training.",
    )
    held_out_bits_per_byte: Number | None = Field(
        None,
        title="held-out text (bits per byte)",
        description="Mean cost of a byte of held-out text. Lower is better; if it rises while the training loss falls, "
        "the model overfits.",
    )


class Alarm(Record):
    """A memory that has stopped being useful."""

    kind: Text = Field(description="`nonfinite`, `no retention`, `no writes` or `unused`.")
    memory: Text = Field(description="Name of the memory; empty if the alarm concerns all of them.")
    text: Text = Field(description="What was measured and what to do, on one line.")

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.memory


class GateRecord(Record):
    """A gate of a memory, over the tokens of the probe."""

    mean: Heads = Field(description="Mean over tokens, for each head.")
    std: Heads = Field(description="Standard deviation over tokens, for each head. 0: the gate ignores the token.")


class MemoryRecord(Record):
    """One memory in a probe; lists have an entry for each head."""

    name: Text = Field(description="Module name of the layer, and behind a colon that of the memory within it.")
    half_life: Heads | None = _measure(
        "half-life (tokens)", "Tokens after which the gate α has halved a write. Low: it is soon forgotten.", (1.0, 1e4)
    )
    readout_change: Heads | None = _measure(
        "readout change",
        "Relative change of the memory's answer to a key from before the write to 16 tokens after it, from 0 to 1. 0: "
        "nothing was written, or it has been forgotten.",
        (0.0, 1.0),
    )
    error_before_write: Heads | None = _measure(
        "error before the write",
        "Normalised squared error of the memory's answer to a key just before the write. 0: the memory knows the "
        "value; 1: it knows nothing of it; at most 2.",
        (0.0, 1.0),
    )
    recall_error: list[Heads] = _measure(
        "error {lag} tokens after the write",
        "The same error some tokens after the write, for each of the probe's `lags`. High: the token is forgotten.",
        (0.0, 1.0),
        default=...,
    )
    memory_contribution: Measured = _measure(
        "memory contribution",
        "Share of the layer's output that depends on what its memory has written, compared with a memory that stays at "
        "M_0. 0: the memory contributes nothing; 1: everything.",
        (0.0, 1.0),
        default=...,
    )
    branch_ratio: Measured = _measure(
        "branch ratio",
        "Norm of the layer's output divided by that of the residual stream after it. Near 0: the layer is ignored.",
        default=...,
    )
    norm: Heads | None = _measure(
        "norm of M", "Frobenius norm of the memory's matrices M after the text. Growth without end: it diverges."
    )
    distance_from_init: Heads | None = _measure(
        "distance from M_0", "Frobenius norm of M - M_0 after the text: how far reading moved the memory."
    )
    momentum_norm: Heads | None = _measure("norm of the momentum", "Frobenius norm of the momentum S after the text.")
    momentum_rank: Heads | None = _measure("effective rank of the momentum", "Effective rank of the last matrix of S.")
    effective_rank: Heads | None = _measure(
        "effective rank", "Effective rank of the memory's last matrix. 1: all answers are parallel; at most its width."
    )
    update_angle: Heads | None = _measure(
        "update angle (degrees)",
        "Angle between the updates of M in consecutive pieces of the text. 0: same direction; 90: orthogonal; 120: "
        "each piece is forgotten in the next; 180: each piece undoes the one before.",
        (0.0, 180.0),
    )
    alpha: GateRecord | None = _measure("α retention", "Share of the memory that is kept at a token. 1: all of it.")
    eta: GateRecord | None = _measure("η step size", "Step size of the write of a token. 0: no write.", (0.0, 1.0))
    theta: GateRecord | None = _measure("θ momentum", "Share of the momentum that is kept at a token.", (0.0, 1.0))
    gamma: GateRecord | None = _measure("Σγ tokens in the window", "How many tokens of its window a write uses.")
    delta: GateRecord | None = _measure("δ threshold", "Error above which a robust loss limits the write.")

    def by_head(self, lags: Sequence[int], fields: Iterable[str] | None = None) -> dict[str, Heads]:
        """Each measure that the memory has (in these fields), by head, null for what is not finite: of gates NAME and
        NAME_spread, the mean and the standard deviation; of `recall_error` NAME_LAG."""
        found: dict[str, Heads] = {}
        for name in MEASURES if fields is None else fields:
            value = getattr(self, name)
            if isinstance(value, GateRecord):
                found |= {name: value.mean, f"{name}_spread": value.std}
            elif name == "recall_error":
                found |= {f"{name}_{lag}": of for lag, of in zip(lags, value, strict=False)}
            elif value is not None:
                found[name] = value if isinstance(value, list) else [value]
        return {n: [x if x is not None and math.isfinite(x) else None for x in of] for n, of in found.items()}


MEASURES = {name: about for name, about in MemoryRecord.model_fields.items() if about.title}


class ProbeRecord(Record):
    """A line of memory.jsonl: all memories, measured while the model reads a fixed held-out text."""

    step: Whole = Field(description="Training step after which the memories were probed.")
    seconds: Number = Field(description="Duration of the probe.")
    effective_remembrance: Measured = Field(
        None,
        title="effective remembrance",
        description="Mean total variation distance between next-token predictions with the whole context and with the "
        "last `recent` to 2 `recent` tokens only (arXiv 2507.02782). 0: older tokens are not used; at most 1.",
    )
    recent: Whole = Field(128, description="Tokens of context that `effective_remembrance` leaves.")
    lags: list[Whole] = Field([16, 256], description="Tokens between the write and the readings of `recall_error`.")
    memories: list[MemoryRecord] = Field(description="The memories, in the order of the layers.")
    suspected: list[Alarm] = Field([], description="What is wrong in this probe.")
    alarms: list[Alarm] = Field([], description="What is wrong in this probe and was in the one before.")

    @property
    def contributions(self) -> list[float]:
        """The finite values of `memory_contribution`."""
        known = [memory.memory_contribution for memory in self.memories]
        return [value for value in known if value is not None and math.isfinite(value)]


class SampleRecord(Record):
    """A line of samples.jsonl: a text that the model wrote during training."""

    step: Whole = Field(description="Training step after which the text was written.")
    prompt: Text = Field(description="The given beginning.")
    text: Text = Field(description="What the model wrote.")


RECORDS: dict[str, type[Any]] = {LOG: StepRecord, MEMORY: ProbeRecord, SAMPLES: SampleRecord}


R = TypeVar("R", bound=Record)


class Log(Generic[R]):
    """A log that may grow; an incomplete last line is left for the next time. `damaged` counts lines that do not fit
    the schema; `unreadable` tells why the file cannot be read, such as "it is a folder", or is ""."""

    def __init__(self, path: Path, record: type[R]) -> None:
        self.path, self.record = path, record
        self._restart(None)

    def _restart(self, file: int | None, unreadable: str = "") -> None:
        self._file, self._at, self.damaged, self.unreadable = file, 0, 0, unreadable
        self._steps: dict[int, R] = {}

    def read(self) -> list[R]:
        """All records by step; only new lines are parsed. Of a step that was repeated after a resume the last record
        counts. A file that was replaced or cut is read anew; one that cannot be read has no records."""
        try:
            _check_regular(self.path)  # opening a pipe would wait for its writer
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._at:
                    self._restart(found.st_ino)
                file.seek(self._at)
                new = file.read()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            self._restart(None, "" if missing else error.strerror or str(error))
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in filter(bytes.strip, whole.split(b"\n")):
            try:
                record: Any = self._parse(line)
                self._steps[record.step] = record
            except (ValueError, RecursionError):
                self.damaged += 1
        return [self._steps[step] for step in sorted(self._steps)]

    def _parse(self, line: bytes) -> R:
        try:
            return self.record.model_validate_json(line)
        except ValueError:  # pydantic's reader takes no lone surrogate
            return self.record.model_validate(json.loads(line))


def _check_regular(path: Path) -> None:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(0, "it is a folder" if stat.S_ISDIR(mode) else "it is no file, but a pipe or a device", str(path))


def read_log(folder: Path, name: str = LOG) -> list[Any]:
    """The records of a log of the run in `folder`; ValueError if it cannot be read."""
    log: Log[Any] = Log(folder / name, RECORDS[name])
    records = log.read()
    if log.unreadable:
        raise ValueError(f"{str(log.path)!r} cannot be read ({log.unreadable}): move it away, or make it readable")
    return records


def so_far(folder: Path, step: int) -> tuple[StepRecord | None, float]:
    """The record of a step in the log of the run in `folder`, if there is one; and the seconds of training by then."""
    records: list[StepRecord] = [record for record in read_log(folder) if record.step <= step]
    of_step = records[-1] if records and records[-1].step == step else None
    return of_step, max((record.elapsed for record in records), default=0.0)


def cut_logs(folder: Path, step: int) -> None:
    """Drop the lines after `step` from all logs, as a resumed run repeats those steps."""
    for name in RECORDS:
        path = folder / name
        kept = [record for record in read_log(folder, name) if record.step <= step]
        if path.is_file():
            replacement = path.with_suffix(".tmp")
            replacement.write_text("".join(record.line() for record in kept), encoding="utf-8")
            replacement.replace(path)


def alarm_history(probes: Sequence[ProbeRecord]) -> list[dict[str, Any]]:
    """Each alarm of a run: `kind`, `memory` and `text` as in its last probe, `step` of the first probe that raised it,
    and `until`, the step of the last one, None if that is the run's last probe."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for probe in probes:
        for alarm in probe.alarms:
            about = {"kind": alarm.kind, "memory": alarm.memory, "text": alarm.text}
            first = found.get(alarm.key, {}).get("step", probe.step)
            found[alarm.key] = about | {"step": first, "until": None if probe is probes[-1] else probe.step}
    return list(found.values())
