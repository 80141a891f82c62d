"""From a benchmark to its result: verify, time in turns, measure memory, and put it all in rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config

from benchmarks import machine, measure, peak
from benchmarks.cost import BACKWARD
from benchmarks.measure import Rounds, Timed, TooLong
from benchmarks.profile import shares
from benchmarks.registry import Benchmark, Candidate, Missing, Row, Shape
from benchmarks.verify import Unverified, Verdict, verify

PATIENCE = 60.0
"""Seconds of one call after which a candidate is not taken to the next, longer shape."""
BUDGET = 900.0
"""Seconds that the rounds of one shape may take before there are fewer of them."""


@dataclass(frozen=True)
class Settings:
    """How to run: rounds, threads of arithmetic, whether at the quick shapes, seconds that compilation may take (0:
    nothing is compiled), and whether to measure peak memory."""

    repeats: int = 7
    threads: int = 1
    quick: bool = False
    compile_limit: float = 1800.0
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(benchmark: Benchmark, settings: Settings, command: str, say: Callable[[str], None]) -> dict[str, Any]:
    """The result, as the JSON file has it.

    Args:
        command: what to print above the table.
        say: gets a line about each candidate as it comes.
    """
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # numbers below 1e-38 are slow, and an untrained memory fades to such
    if benchmark.profiled:  # else a profile does not see what compiled code calls
        torch._inductor.config.cpp.enable_kernel_profile = True
    result = {
        "benchmark": benchmark.name,
        "shows": benchmark.shows,
        "command": command,
        "quick": settings.quick,
        "threads": settings.threads,
        "date": machine.now(),
        "revision": machine.revision(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "load_before": measure.load(),
        "columns": list(benchmark.columns),
    }
    rows: list[Row] = []
    verdicts: dict[tuple[str, Shape], Verdict] = {}
    slow: set[str] = set()
    for index, shape in enumerate(benchmark.quick if settings.quick else benchmark.shapes):
        found = [c for c in benchmark.candidates if c.takes(shape) and c.name not in slow]
        rows += _at(benchmark, found, shape, index, settings, verdicts, say)
        slow |= {row["candidate"] for row in rows if row.get("median", 0.0) > PATIENCE}
    result |= {"load_after": measure.load(), "rows": rows, "remarks": benchmark.remarks(rows)}
    return result


def _at(
    benchmark: Benchmark,
    candidates: list[Candidate],
    shape: Shape,
    index: int,
    settings: Settings,
    verdicts: dict[tuple[str, Shape], Verdict],
    say: Callable[[str], None],
) -> list[Row]:
    """The rows of all candidates at a shape."""
    rows = {c.name: _about(c, shape) for c in candidates}
    timed: dict[str, Timed] = {}
    for candidate in candidates:
        row = rows[candidate.name]
        try:
            timed[candidate.name] = _prepare(candidate, shape, row, settings, verdicts)
        except Exception as error:  # one candidate must not end the others' run; what it said is in the table
            row["check"] = _line(error)
        say(f"{benchmark.name}: {candidate.name}, {shape}: {row['check']}")
    rates = measure.rates()
    calls = {name: t.call for name, t in timed.items()} | {name: call for name, (call, _) in rates.items()}
    once = frozenset(c.name for c in candidates if c.once)
    found = measure.rounds(calls, settings.repeats, BUDGET, once)
    speeds = {name: amount / found.spread(name).median for name, (_, amount) in rates.items()}
    baselines = {c.group: c.name for c in candidates if c.baseline and c.name in timed}
    for candidate in candidates:
        if candidate.name in timed:
            row = rows[candidate.name]
            _times(row, candidate, shape, found, speeds, baselines.get(candidate.group))
            _finish(row, benchmark, candidate, timed[candidate.name], index, settings)
            say(f"{benchmark.name}: {candidate.name}, {shape}: {1e3 * row['median']:.1f} ms")
    return list(rows.values())


def _about(candidate: Candidate, shape: Shape) -> Row:
    row = {"candidate": candidate.name, "group": candidate.group, "ours": candidate.oracle is not None}
    row |= {"compiled": candidate.compile, "backward": candidate.backward}
    sizes = {name: getattr(shape, name) for name in ("batch", "heads", "dim", "time", "context", "tokens")}
    return row | {"shape": str(shape)} | sizes


def _prepare(
    candidate: Candidate, shape: Shape, row: Row, settings: Settings, verdicts: dict[tuple[str, Shape], Verdict]
) -> Timed:
    """Verified, built and called once; the row's ``check`` says what was found."""
    if candidate.compile and settings.compile_limit <= 0:
        raise TooLong("not compiled: --compile-limit 0")
    key = candidate.name, candidate.reduce(shape)
    if key not in verdicts:
        with measure.deadline(settings.compile_limit if candidate.compile else None):
            verdicts[key] = verify(candidate, shape)
    row["check"], row["checked_at"] = verdicts[key].text, str(key[1])
    prepared = measure.ready(candidate, shape, verdicts[key], settings.compile_limit)
    if candidate.compile:
        row["first_call"] = prepared.first
    return prepared


def _times(
    row: Row, candidate: Candidate, shape: Shape, found: Rounds, speeds: dict[str, float], baseline: str | None
) -> None:
    spread = found.spread(candidate.name)
    row |= {"median": spread.median, "min": spread.least, "p20": spread.low, "p80": spread.high}
    row |= {"rounds": len(found.seconds[candidate.name]), "cpu_share": found.cpu_share, "rates": speeds}
    if baseline is not None:
        ratio = found.ratio(candidate.name, baseline)
        row |= {"baseline": baseline, "ratio": ratio.median, "ratio_p20": ratio.low, "ratio_p80": ratio.high}
    if candidate.cost is not None:
        passes = 1.0 + BACKWARD if candidate.backward else 1.0
        flops, moved = (passes * amount for amount in candidate.cost(shape))
        row |= {"flops": flops, "bytes": moved}
        row |= {"of_sgemm": flops / spread.median / speeds["sgemm"], "of_copy": moved / spread.median / speeds["copy"]}
        row |= {"of_batched": flops / spread.median / speeds["batched"]}


def _finish(row: Row, benchmark: Benchmark, candidate: Candidate, timed: Timed, index: int, settings: Settings) -> None:
    """What is measured outside the rounds."""
    row |= timed.operation.facts
    if benchmark.profiled:
        row["profile"] = shares(timed.call)
    if settings.memory and "peak MB" in benchmark.columns:
        limit = 600.0 + 20 * row["median"] + (settings.compile_limit if candidate.compile else 0.0)
        row["peak"] = peak.growth_apart(benchmark.name, candidate.name, index, settings.quick, limit)


def _line(error: Exception) -> str:
    """Why a candidate was not timed, in one line."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Unverified):
        return text
    return (
        f"not timed: {text}" if isinstance(error, Missing | TooLong) else f"not timed: {type(error).__name__}: {text}"
    )
