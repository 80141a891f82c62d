"""From a benchmark to its result: verify, time in turns, measure memory, and put it all in rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config

from benchmarks import machine, measure, peak
from benchmarks.cost import BACKWARD, total
from benchmarks.measure import Rounds, Timed, TooLong
from benchmarks.profile import shares
from benchmarks.registry import Benchmark, Candidate, Cost, Missing, Row, Shape
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
    """The result, as the JSON file has it; arguments as for ``Run``."""
    whole = Run(benchmark, settings, command, say)
    slow: set[str] = set()
    for index, shape in enumerate(benchmark.at(settings.quick)):
        whole.measure(index, [c for c in benchmark.candidates if c.takes(shape) and c.name not in slow])
        slow |= {row["candidate"] for row in whole.result["rows"] if row.get("median", 0.0) > PATIENCE}
    return whole.result


def demand_device(benchmarks: Iterable[Benchmark], quick: bool) -> None:
    """What stands before all benchmarks.

    Raises:
        Missing: one is measured on a GPU, and there is none.
    """
    names = [benchmark.name for benchmark in benchmarks if benchmark.device == "cuda"]
    if names and not quick and not torch.cuda.is_available():
        hint = "--quick, or --dry-run of python -m benchmarks.gpu, tries it on the CPU"
        raise Missing(f"no CUDA device, which is needed by {', '.join(names)}: {hint}")


class Run:
    """A benchmark being measured, a shape after another; ``result`` is what the JSON file has, so far.

    Args:
        command: what to print above the table.
        say: gets a line about each candidate as it comes.
    """

    def __init__(self, benchmark: Benchmark, settings: Settings, command: str, say: Callable[[str], None]) -> None:
        demand_device([benchmark], settings.quick)
        torch.set_num_threads(settings.threads)
        torch.set_flush_denormal(True)  # numbers below 1e-38 are slow, and an untrained memory fades to such
        if benchmark.profiled:  # else a profile does not see what compiled code calls
            torch._inductor.config.cpp.enable_kernel_profile = True
        self.benchmark, self.settings, self.say = benchmark, settings, say
        self.verdicts: dict[tuple[str, Shape], Verdict] = {}
        device = "cpu" if settings.quick else benchmark.device
        self.result: dict[str, Any] = {
            "benchmark": benchmark.name,
            "shows": benchmark.shows,
            "command": command,
            "quick": settings.quick,
            "threads": settings.threads,
            "device": device,
            "date": machine.now(),
            "revision": machine.revision(),
            "machine": machine.describe(device),
            "versions": machine.versions(),
            "load_before": measure.load(),
            "columns": list(benchmark.columns),
            "rows": [],
        }
        self._add([])

    def measure(self, index: int, candidates: list[Candidate]) -> None:
        """Some candidates at the benchmark's shape number ``index``, in turns."""
        shape = self.benchmark.at(self.settings.quick)[index]
        rows = {c.name: _about(c, shape) for c in candidates}
        try:
            self._fill(rows, candidates, shape, index)
        except Exception as error:  # such as a GPU that is lost must not take with it what was found before
            for row in rows.values():
                if "median" not in row:
                    row["check"] = "; ".join(text for text in (row.get("check"), _line(error)) if text)
        self._add(list(rows.values()))

    def _fill(self, rows: dict[str, Row], candidates: list[Candidate], shape: Shape, index: int) -> None:
        if shape.device == "cuda":  # what other shapes have left
            gc.collect()
            torch.cuda.empty_cache()
        timed: dict[str, Timed] = {}
        for candidate in candidates:
            row = rows[candidate.name]
            try:
                timed[candidate.name] = _prepare(candidate, shape, row, self.settings, self.verdicts)
            except Exception as error:  # one candidate must not end the others' run; what it said is in the table
                row["check"] = _line(error)
            self.say(f"{self.benchmark.name}: {candidate.name}, {shape}: {row['check']}")
        rates = measure.rates(shape.device)
        calls = {name: t.call for name, t in timed.items()} | {name: call for name, (call, _) in rates.items()}
        once = frozenset(c.name for c in candidates if c.once)
        found = measure.rounds(calls, self.settings.repeats, BUDGET, once, shape.device)
        speeds = {name: amount / found.spread(name).median for name, (_, amount) in rates.items()}
        for name, why in found.failed.items():
            rows[name]["check"] = _line(why)
            del timed[name]
        baselines = {c.group: c.name for c in candidates if c.baseline and c.name in timed}
        for candidate in candidates:
            if candidate.name in timed:
                row = rows[candidate.name]
                _times(row, candidate, shape, found, speeds, baselines.get(candidate.group))
                self._finish(row, candidate, timed[candidate.name], index, shape)
                self.say(f"{self.benchmark.name}: {candidate.name}, {shape}: {1e3 * row['median']:.1f} ms")

    def leave_out(self, index: int, candidates: list[Candidate], why: str) -> None:
        """Rows that say why the candidates were not measured at this shape."""
        shape = self.benchmark.at(self.settings.quick)[index]
        self._add([_about(c, shape) | {"check": f"not timed: {why}"} for c in candidates])

    def _add(self, rows: list[Row]) -> None:
        self.result["rows"] += rows
        self.result |= {"load_after": measure.load(), "remarks": self.benchmark.remarks(self.result["rows"])}

    def _finish(self, row: Row, candidate: Candidate, timed: Timed, index: int, shape: Shape) -> None:
        """What is measured outside the rounds."""
        row |= timed.operation.facts
        if self.benchmark.profiled:
            row["profile"] = shares(timed.call)
        if not self.settings.memory or "peak MB" not in self.benchmark.columns:
            return
        if shape.device == "cuda":
            row["peak"] = peak.growth_on_gpu(timed.call)
        elif self.benchmark.device == "cpu":
            limit = 600.0 + 20 * row["median"] + (self.settings.compile_limit if candidate.compile else 0.0)
            row["peak"] = peak.growth_apart(self.benchmark.name, candidate.name, index, self.settings.quick, limit)


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
        parts = [candidate.cost(shape)]
        if candidate.backward and candidate.backward_cost is not None:
            parts.append(candidate.backward_cost(shape))
        elif candidate.backward:
            parts.append(Cost(*(BACKWARD * amount for amount in parts[0])))
        flops, moved = total(*parts)
        row |= {"flops": flops, "bytes": moved, "of_copy": moved / spread.median / speeds["copy"]}
        row |= {f"of_{name}": flops / spread.median / speed for name, speed in speeds.items() if name != "copy"}


def _line(error: Exception) -> str:
    """Why a candidate was not timed, in one line."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, Unverified):
        return text
    return (
        f"not timed: {text}" if isinstance(error, Missing | TooLong) else f"not timed: {type(error).__name__}: {text}"
    )
