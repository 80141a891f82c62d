"""The command: `python -m benchmarks list | run | learn | show | table`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, cast

import torch
import typer

from benchmarks import peak as peaks
from benchmarks import results
from benchmarks.learning import STUDIES
from benchmarks.learning.study import ASKED_SEED
from benchmarks.learning.study import run as measure_learning
from benchmarks.registry import Benchmark, Missing, Row
from benchmarks.run import Settings, demand_device
from benchmarks.run import run as measure
from benchmarks.suites import BENCHMARKS

app = typer.Typer(
    help="Benchmarks of atlas-memory: what each candidate costs, verified equal to the definition first.",
    epilog="Errors are one line; ATLAS_TRACEBACK=1 shows where they come from.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
QUICK = Path("runs/performance")


@app.command("list")
def list_() -> None:
    """What there is to measure."""
    for study in STUDIES.values():
        print(f"{study.name} (learn): {study.shows}")
        print(f"  cases: {', '.join(study.cases)}")
    for benchmark in BENCHMARKS.values():
        print(f"{benchmark.name}: {benchmark.shows}")
        print(f"  shapes: {'; '.join(map(str, benchmark.shapes))}")
        print(f"  candidates: {'; '.join(c.name for c in benchmark.candidates)}")


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Benchmarks; none: all, without a GPU those on CPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json; default docs/results/data.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of arithmetic.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes, only to see that it works.")] = False,
    compile_limit: Annotated[
        float | None, typer.Option(help="Seconds each compilation may take; 0: compile nothing. Default 1800, quick 0.")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, each candidate in a process of its own.")] = True,
) -> None:
    """Verify and measure; write a JSON file each."""
    chosen = [_benchmark(name) for name in names] if names else measurable()
    demand_device(chosen, quick)
    limit = (0.0 if quick else 1800.0) if compile_limit is None else compile_limit
    settings = Settings(min(repeats, 2) if quick else repeats, threads, quick, limit, memory)
    folder = results.writable(out or (QUICK if quick else results.FOLDER))
    refused = []
    for benchmark in chosen:
        command = f"python -m benchmarks run {benchmark.name} --repeats {settings.repeats} --threads {threads}"
        command += " --quick" if quick else ""
        command += f" --compile-limit {limit:g}" if compile_limit is not None else ""
        command += "" if memory else " --no-memory"
        result = measure(benchmark, settings, command, lambda line: print(line, file=sys.stderr))
        path = results.save(result, folder)
        print(f"{results.table(result)}\n{path}")
        refused += [row["candidate"] for row in result["rows"] if "refused" in row["check"]]
    if refused:
        raise RuntimeError(f"not equal to the definition, and not timed: {', '.join(dict.fromkeys(refused))}")


@app.command()
def learn(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Studies; none: all.")] = None,
    cases: Annotated[str | None, typer.Option(help="Rules, with commas between; default all of the study.")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths of heads, with commas; default the study's.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between; the table has their mean.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json; default docs/results/data.")] = None,
    workers: Annotated[int, typer.Option(help="Processes of one thread each.", min=1)] = os.cpu_count() or 1,
    text: Annotated[
        Path | None, typer.Option(help="Of studies of whole models: a text or folder; default stdlib.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of studies of whole models: steps of training.", min=1)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A step or two of each, only to see that it works.")] = False,
) -> None:
    """Whether memories write, are taught and remember; write a JSON file each, whenever a row of it is complete. Rows
    of other cases and widths that the file already has stay in it."""
    given_too = {"text": None if text is None else str(text), "steps": steps}
    options = {name: value for name, value in given_too.items() if value is not None}
    for name in names or STUDIES:
        if name not in STUDIES:
            raise ValueError(f"unknown study {name!r}; there are {', '.join(STUDIES)}")
        if unknown := options.keys() - inspect.signature(STUDIES[name].measure).parameters.keys():
            raise ValueError(f"study {name} takes no --{', --'.join(sorted(unknown))}: leave it out, or name others")
    for study in (STUDIES[name] for name in names or STUDIES):
        folder = results.writable(out or (QUICK if quick else results.FOLDER))
        chosen = study.cases if cases is None else tuple(cases.split(","))
        heads = study.widths if widths is None else _numbers("widths", widths)
        given: dict[str, object] = {"cases": cases, "widths": widths, "seeds": seeds}
        study = replace(study, measure=partial(study.measure, **options))
        settings = "".join(f" --{name} {quote(str(value))}" for name, value in options.items())
        chosen_too = "".join(f" --{name} {quote(str(value))}" for name, value in given.items() if value is not None)
        command = f"python -m benchmarks learn {study.name}{chosen_too}{settings}{' --quick' if quick else ''}"
        path, numbers = folder / f"{study.name}.json", _numbers("seeds", seeds)
        if ASKED_SEED in numbers:
            raise ValueError(f"seeds {seeds!r}: {ASKED_SEED} draws what models are asked in the end, take others")
        earlier = _earlier(path, settings, quick)
        say = partial(print, file=sys.stderr, flush=True)
        for result in measure_learning(study, chosen, heads, numbers, quick, workers, command, say, earlier):
            results.save(result | {"settings": settings}, folder)
        print(f"{results.table(result)}\n{path}")


def _earlier(path: Path, settings: str, quick: bool) -> list[Row]:
    """The rows of a study's file, to go on with.

    Raises:
        ValueError: they were made with other settings, or these are quick and those are not, or the other way round.
    """
    if not path.exists():
        return []
    result = results.load(path)
    if result["settings"] != settings:
        was = result["settings"] or " no settings"
        raise ValueError(f"{path} has rows made with{was}, these are with{settings or ' none'}: give another --out")
    if result["quick"] != quick:
        was = "made with --quick" if result["quick"] else "not made with --quick"
        raise ValueError(f"{path} has rows {was}: give another --out")
    return result["rows"]


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers with commas between, got {text!r}") from None


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A JSON file, as docs/results/data/mixers.json.")]) -> None:
    """Print a result as a table, with all its columns."""
    print(results.table(results.load(file)))


@app.command()
def table(
    folder: Annotated[Path, typer.Option("--from", help="Folder of the JSON files.")] = results.FOLDER,
    page: Annotated[Path | None, typer.Option(help="The page to rewrite.")] = None,
) -> None:
    """Rewrite the generated tables of docs/results/, or those of one page."""
    for file in [page] if page else [results.PAGES / f"{name}.md" for name in ("index", "claims", "performance")]:
        print(f"{file}: {', '.join(results.rewrite(file, folder))}")


@app.command()
def dashboard(rounds: Annotated[int, typer.Option(min=1, help="Times that each page is opened.")] = 5) -> None:
    """Seconds in which the dashboard shows one run of 2,000 steps and ten of them, in a headless browser."""
    from .dashboard import measure

    for name, seconds in measure(rounds).items():
        print(f"{name}: median {sorted(seconds)[len(seconds) // 2]:.2f} s, slowest {max(seconds):.2f} s")


@app.command(hidden=True)
def peak(name: str, candidate: str, index: int, quick: Annotated[bool, typer.Option("--quick")] = False) -> None:
    """Bytes by which this process's peak grows in one call of a candidate: what `run` starts for each."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    benchmark = _benchmark(name)
    print(peaks.growth(benchmark.candidate(candidate), benchmark.at(quick)[index]))


def measurable() -> list[Benchmark]:
    """Every benchmark for which this machine has the device."""
    return [b for b in BENCHMARKS.values() if b.device == "cpu" or torch.cuda.is_available()]


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (None: of `sys.argv`) and return its exit code: 2 for a wrong command line, 1 for other expected
    errors, 130 after Ctrl-C; each is one line."""
    usage_error = cast(type[Exception], typer.BadParameter.__base__)  # click's, wherever this typer keeps it
    try:
        return app(None if arguments is None else list(arguments), standalone_mode=False) or 0
    except usage_error as error:
        message, code = cast(Any, error).format_message(), 2
    except (ValueError, OSError, RuntimeError, Missing) as error:
        if os.environ.get("ATLAS_TRACEBACK"):
            raise
        message, code = str(error), 1
    except (KeyboardInterrupt, typer.Abort):
        message, code = "interrupted", 130
    if message:
        print(f"benchmarks: {' '.join(message.split())}", file=sys.stderr)
    return code
