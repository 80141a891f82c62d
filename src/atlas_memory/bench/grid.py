"""A study: many small runs, one after the other or beside each other, in one file from which it goes on."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import torch

from atlas_memory import __version__

FORMAT = 1
Cell = dict[str, Any]
"""What one run is: such as its model, width and seed."""


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: Of the command, and of its file.
        shows: What is run, in a sentence or a few.
        source: The paper whose protocol or claim it is.
        run: Numbers by name, of a cell and the settings; called in a process of its own.
        rows: The keys of a cell by which the table has its rows; seeds are averaged.
        settings: The same for all cells; a file with others is not gone on with.
        across: Numbers that have a table each, with the last of the row keys across and the slope of its logarithm
            against that of the key; none: all numbers in one table.
        version: Grows when figures change.
    """

    name: str
    shows: str
    source: str
    run: Callable[[Cell, dict[str, Any]], dict[str, float]]
    rows: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    across: tuple[str, ...] = ()
    version: int = 1


def run_study(
    study: Study,
    cells: Sequence[Cell],
    path: Path,
    command: str = "",
    workers: int = 1,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Run the cells that the file does not have yet, in `workers` processes of one thread each; the file is written
    after each. A run that fails is kept with its message, and tried again the next time.

    Raises:
        ValueError: the file is of another study, version or settings.
        OSError: it cannot be written.
    """
    result: dict[str, Any] = {
        "format": FORMAT,
        "suite": study.name,
        "version": study.version,
        "shows": study.shows,
        "source": study.source,
        "rows_by": list(study.rows),
        "across": list(study.across),
        "settings": study.settings,
        "library": __version__,
        "runs": _earlier(path, study),
    }
    done = [run["cell"] for run in result["runs"] if "error" not in run]
    todo = [cell for cell in cells if cell not in done]
    result["runs"] = [run for run in result["runs"] if run["cell"] not in todo]
    _write(path, result)
    count, before = len(cells), len(cells) - len(todo)
    for n, outcome in enumerate(_outcomes(study, todo, command, workers), before + 1):
        result["runs"].append(outcome)
        _write(path, result)
        if progress is not None:
            progress(f"{n} of {count}: {', '.join(map(str, outcome['cell'].values()))}", n / count)
    order = [run for cell in cells for run in result["runs"] if run["cell"] == cell]
    result["runs"] = [run for run in result["runs"] if run["cell"] not in cells] + order
    _write(path, result)
    return result


def _outcomes(study: Study, cells: Sequence[Cell], command: str, workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        yield from (_outcome(study, cell, command) for cell in cells)
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _alone) as pool:
        with _deaf():  # Ctrl-C is the parent's affair
            waiting = [pool.submit(_outcome, study, cell, command) for cell in cells]
        try:
            yield from (one.result() for one in as_completed(waiting))
        except BaseException:
            with _deaf():  # it is over in a moment, and a second Ctrl-C would leave it half done
                for process in active_children():
                    process.terminate()
                pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _deaf() -> Iterator[None]:
    """SIGINT is not heard here, nor by processes that are started here."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _outcome(study: Study, cell: Cell, command: str) -> dict[str, Any]:
    started = time.perf_counter()
    outcome: dict[str, Any] = {"cell": cell}
    try:
        outcome["numbers"] = study.run(cell, study.settings)
    except (ValueError, RuntimeError) as error:
        outcome |= {"numbers": {}, "error": str(error)}
    seconds = round(time.perf_counter() - started, 1)
    made = {"seconds": seconds, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": _machine(), "command": command}
    return outcome | made


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).is_file():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return f"{chip}, torch {torch.__version__}"


def _alone() -> None:
    if (parent := parent_process()) is not None:  # a pool's processes outlive a parent that is killed
        Thread(target=_follow, args=(parent,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what a memory forgets fades to numbers that are slow to compute with


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _earlier(path: Path, study: Study) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        runs, known = earlier["runs"], {key: earlier[key] for key in ("suite", "version", "settings")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of a study: name another file") from error
    made = {"suite": known["suite"], "version": known["version"]} | known["settings"]
    wanted = {"suite": study.name, "version": study.version} | json.loads(json.dumps(study.settings))
    for key in made | wanted:
        if made.get(key) != wanted.get(key):
            raise ValueError(
                f"{path} is a result with {key} {made.get(key)}, not {wanted.get(key)}: name another file by --out"
            )
    return list(runs)


def _write(path: Path, result: dict[str, Any]) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder: name a file for the results")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def means(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each value of the study's row keys: these, `seeds`, `numbers`, each (mean, standard error over seeds,
    nan for one), and `failed`, the runs that did. Of several learning rates a row has the best, of those with most
    seeds, by the mean of all numbers that are shares. A number "name | case" is the number "name" of a row whose last
    key is the case."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    rates = {run["cell"].get("learning_rate") for run in result["runs"]}
    for run in result["runs"]:
        key = tuple(run["cell"][name] for name in result["rows_by"])
        groups.setdefault(key, []).append(run)
    rows = []
    for key, runs in groups.items():
        if len(rates) > 1:
            of_rate = [[r for r in runs if r["cell"]["learning_rate"] == rate] for rate in sorted(rates)]
            runs = max(of_rate, key=lambda of: (len(of), _quality(of)))
        fine = [run["numbers"] for run in runs if run["numbers"]]
        names = dict.fromkeys(name for found in fine for name in found)
        numbers = {name: _mean([found[name] for found in fine if name in found]) for name in names}
        seeds = {run["cell"]["seed"] for run in runs if run["numbers"]}
        row = dict(zip(result["rows_by"], key, strict=True)) | {"seeds": len(seeds), "failed": len(runs) - len(fine)}
        if len(rates) > 1:
            row["learning_rate"] = runs[0]["cell"]["learning_rate"]
        cases = dict.fromkeys(name.partition(" | ")[2] for name in numbers) or [""]
        for case in cases:
            of_case = {n.partition(" | ")[0]: value for n, value in numbers.items() if n.partition(" | ")[2] == case}
            rows.append(row | ({result["rows_by"][-1]: case} if case else {}) | {"numbers": of_case})
    return rows


def _quality(runs: Sequence[dict[str, Any]]) -> float:
    shares = [value for run in runs for value in run["numbers"].values() if 0 <= value <= 1]
    return statistics.fmean(shares) if shares else -1.0


def _mean(values: Sequence[float]) -> tuple[float, float]:
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), spread
