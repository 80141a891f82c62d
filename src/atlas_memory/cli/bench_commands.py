"""`atlas bench`: synthetic benchmarks of rules, trained on the spot or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from ..console import one_line, progress_lines
from .result_tables import print_study
from .startup import imports, report_error

CORES = os.cpu_count() or 1
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks that train small models of rules, or none.")
Seeds = Annotated[str, typer.Option(help="With commas between; the table has their mean and its standard error.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Where the results are kept; the same command goes on there. Default bench/NAME.json."),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes of one thread each.")]
Models = Annotated[
    str, typer.Option(help="Rules, blocks, BLOCK:RULE, RULE+4d, RULE+degree-2, attention+conv; with commas.")
]
Rates = Annotated[str, typer.Option(help="With commas between; the table takes the best of each row.")]


def _run(study: Any, cells: Sequence[dict[str, Any]], out: Path | None, workers: int) -> None:
    from atlas_memory.bench.grid import run_study

    path = out or Path("bench") / f"{study.name}.json"
    command = " ".join(["atlas", *map(quote, sys.argv[1:])])
    with progress_lines("bench") as progress:
        result = run_study(study, cells, path, command, workers, progress)
    print_study(result)
    print(one_line(f"results: {path}"))
    of_these = [run for run in result["runs"] if run["cell"] in cells]
    if failed := [run for run in of_these if "error" in run]:
        first = ", ".join(map(str, failed[0]["cell"].values()))
        report_error(f"{len(failed)} of {len(of_these)} runs failed; the first, {first}: {failed[0]['error']}", 1)
        raise typer.Exit(1 if len(failed) == len(of_these) else 0)


def _chosen(option: str, given: str, known: Sequence[str] | None = None) -> list[str]:
    from atlas_memory.rules.validation import suggest

    names = list(dict.fromkeys(given.split(",")))
    for name in names:
        if not name:
            raise ValueError(f"--{option} {given!r} has an empty name")
        if known is not None and name not in known:
            raise ValueError(f"--{option}: {name!r} is unknown; {suggest(name, known)}")
    return names


def _numbers(option: str, given: str, least: int = 1) -> list[int]:
    try:
        found = list(dict.fromkeys(int(number) for number in given.split(",")))
    except ValueError as error:
        raise ValueError(f"--{option} {given!r} must be whole numbers with commas between") from error
    if not all(least <= number < 2**31 for number in found):
        raise ValueError(f"--{option} {given!r} must be numbers of at least {least}")
    return found


def _rates(given: str) -> list[float]:
    try:
        found = list(dict.fromkeys(float(number) for number in given.split(",")))
    except ValueError as error:
        raise ValueError(f"--learning-rates {given!r} must be numbers with commas between") from error
    if not all(0 < rate <= 1 for rate in found):
        raise ValueError(f"--learning-rates {given!r} must be above 0, and at most 1")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cells(models: Sequence[str], learning_rates: str, seeds: str) -> list[dict[str, Any]]:
    return [
        {"model": model, "learning_rate": rate, "seed": seed}
        for seed in _numbers("seeds", seeds, 0)
        for model in models
        for rate in _rates(learning_rates)
    ]


def _check_models(names: Sequence[str], width: int, head: int) -> None:
    """Raise ValueError unless all are models, before the first of them is trained."""
    import torch

    from atlas_memory.bench.task_training import task_model

    with torch.device("meta"):
        for name in names:
            task_model(name, 16, width, head)


@bench_app.command()
def capacity(
    memories: Annotated[str | None, typer.Option(help="With commas between; default all.")] = None,
    dims: Annotated[str, typer.Option(help="Widths of heads.")] = "8,16,32,64",
    seeds: Seeds = "0,1,2",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """How many pairs an untrained memory holds, against the width of its heads (ATLAS, Propositions 1 and 2)."""
    with imports():
        from atlas_memory.bench.capacity import LARGEST, MEMORIES
        from atlas_memory.bench.studies import CAPACITY

    chosen = list(MEMORIES)
    if memories is not None:  # names have commas
        chosen = [name for name in MEMORIES if name in memories]
        if not chosen:
            raise ValueError(f"--memories {memories!r}: there are {'; '.join(MEMORIES)}")
    cells = [
        {"memory": memory, "dim": dim, "seed": seed}
        for memory in chosen
        for dim in _numbers("dims", dims, 2)
        if dim <= LARGEST.get(memory, dim)
        for seed in _numbers("seeds", seeds, 0)
    ]
    if not cells:
        raise ValueError(f"--dims {dims}: {chosen[0]} is measured with heads of at most {LARGEST[chosen[0]]}")
    _run(CAPACITY, cells, out, workers)


@bench_app.command()
def mqar(
    models: Models = "attention,attention+conv,deltanet,gated-deltanet,titans,omeganet,atlas",
    widths: Annotated[str, typer.Option(help="Widths of models.")] = "32,64",
    learning_rates: Rates = "0.003,0.01",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, of 2,048 tokens each.")] = 600,
    vocabulary: Annotated[int, typer.Option(min=130, help="Size of the vocabulary.")] = 8192,
    seeds: Seeds = "0,1,2",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """Multi-query associative recall: values of 8 to 64 keys (Zoology)."""
    with imports():
        from atlas_memory.bench.studies import HEAD, MQAR

    names, sizes = _chosen("models", models), _numbers("widths", widths)
    for width in sizes:
        _check_models(names, width, HEAD)
    study = replace(MQAR, settings=MQAR.settings | {"steps": steps, "vocabulary": vocabulary})
    cells = [
        {"model": name, "width": width, "learning_rate": rate, "seed": seed}
        for seed in _numbers("seeds", seeds, 0)
        for name in names
        for width in sizes
        for rate in _rates(learning_rates)
    ]
    _run(study, cells, out, workers)


@bench_app.command()
def mad(
    models: Models = "attention,attention+conv,gated-deltanet,titans,omeganet,atlas",
    tasks: Annotated[str | None, typer.Option(help="With commas between; default all six.")] = None,
    learning_rates: Rates = "0.003",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training at most; MAD takes 20,000.")] = 2000,
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step; MAD takes 128.")] = 128,
    seeds: Seeds = "0,1,2",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """MAD's six tasks: compression, recall, noisy and fuzzy recall, selective copying, memorisation."""
    with imports():
        from atlas_memory.bench.mad import MAD
        from atlas_memory.bench.studies import HEAD, MAD_STUDY

    known = [task.name for task in MAD]
    names, chosen = _chosen("models", models), known if tasks is None else _chosen("tasks", tasks, known)
    study = replace(MAD_STUDY, settings=MAD_STUDY.settings | {"steps": steps, "rows": rows})
    _check_models(names, study.settings["width"], HEAD)
    cells = [
        {"model": name, "task": task, "learning_rate": rate, "seed": seed}
        for seed in _numbers("seeds", seeds, 0)
        for task in chosen
        for name in names
        for rate in _rates(learning_rates)
    ]
    _run(study, cells, out, workers)


@bench_app.command()
def suite(
    name: Annotated[str, typer.Argument(metavar="SUITE", help="Such as s-niah-1, or babilong-qa1.")],
    models: Models = "swa+conv,gated-deltanet,titans,omeganet",
    trained: Annotated[str, typer.Option(help="Tokens of texts to train on, in turn.")] = "256,512",
    lengths: Annotated[str, typer.Option(help="Tokens of the texts to be asked about.")] = "512,2048,8192,32768",
    width: Annotated[int, typer.Option(help="Of the models, whose heads are 32 wide.")] = 64,
    learning_rates: Rates = "0.01",
    steps: Annotated[int, typer.Option(min=1, help="Steps of training, of 4,096 tokens each.")] = 800,
    haystack: Annotated[
        list[Path] | None, typer.Option(help="A text to hide things in; the last tenth is kept for the questions.")
    ] = None,
    babi: Annotated[Path | None, typer.Option(help="Of BABILong: the folder of bAbI's files.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also ask when the text is gone and only a memory can answer.")
    ] = False,
    seeds: Seeds = "0,1,2",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """Needles or facts in texts up to 64 times as long as those of training (RULER, BABILong)."""
    from .suite_commands import find_sources, find_suite

    with imports():
        from atlas_memory.bench.studies import suite_study
        from atlas_memory.bench.suite_training import HEAD, check_sources

    find_suite(name)
    names, sources = _chosen("models", models), find_sources(haystack or [], babi)
    _check_models(names, width, HEAD)
    cut = len(sources.haystack) * 9 // 10
    train, asked = (
        replace(sources, haystack=sources.haystack[part], split=split)
        for part, split in ((slice(cut), "train"), (slice(cut, None), "test"))
    )
    settings: dict[str, Any] = {"suite": name}
    settings |= {"trained": _numbers("trained", trained), "lengths": _numbers("lengths", lengths)}
    settings |= {"width": width, "steps": steps, "strict": strict, "data": _digest(sources.haystack)}
    study = suite_study(settings, train, asked)
    check_sources(study.settings, train, asked)
    _run(study, _cells(names, learning_rates, seeds), out, workers)


@bench_app.command()
def language(
    text: Annotated[str | None, typer.Option(help="As data.path of atlas train; default Python's own library.")] = None,
    models: Models = "attention,swa,gated-deltanet,titans,omeganet,hope,mag:titans,mal:titans",
    width: Annotated[int, typer.Option(help="Of the models, whose heads are 32 wide.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Of the models.")] = 4,
    length: Annotated[int, typer.Option(min=64, max=2048, help="Tokens of a stretch to train on.")] = 256,
    learning_rates: Rates = "0.003",
    steps: Annotated[int, typer.Option(min=2, help="Steps of training, of 2,048 tokens each.")] = 800,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the models, which takes a minute each.")
    ] = False,
    seeds: Seeds = "0",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """Language at equal size and tokens: bits per byte up to 32 training lengths, and the speed of training."""
    with imports():
        from atlas_memory.bench.language_training import HEAD
        from atlas_memory.bench.studies import language_study
        from atlas_memory.data import Corpus

    names = _chosen("models", models)
    _check_models(names, width, HEAD)
    corpus = Corpus.load(text)
    data = _digest("".join(document.text for document in (*corpus.train, *corpus.held_out)))
    settings = {"width": width, "layers": layers, "length": length, "steps": steps, "compiled": compiled, "data": data}
    _run(language_study(settings, text), _cells(names, learning_rates, seeds), out, workers)


@bench_app.command()
def referee(
    rules: Annotated[str, typer.Option(help="With commas between.")] = "titans,omeganet,atlas,ttt-mlp,lact",
    tasks: Annotated[str, typer.Option(help="Of mqar, noisy-recall and bytes.")] = "mqar,noisy-recall,bytes",
    switches: Annotated[str | None, typer.Option(help="With semicolons between; default all.")] = None,
    seeds: Seeds = "0,1,2",
    out: Out = None,
    workers: Workers = CORES,
) -> None:
    """Whether a memory memorises: ascent, more inner steps, keys as queries, the last matrix alone (arXiv
    2602.21204)."""
    with imports():
        from atlas_memory.bench.referee import HEAD, SWITCHES, TASKS, WIDTH
        from atlas_memory.bench.studies import REFEREE
        from atlas_memory.rules.rule import RULES

    chosen = list(SWITCHES) if switches is None else switches.split(";")
    if unknown := [switch for switch in chosen if switch not in SWITCHES]:
        raise ValueError(f"--switches: {unknown[0]!r} is unknown; there are {'; '.join(SWITCHES)}")
    names = _chosen("rules", rules, list(RULES))
    _check_models(names, WIDTH, HEAD)
    cells = [
        {"rule": rule, "switch": switch, "task": task, "seed": seed}
        for task in _chosen("tasks", tasks, TASKS)
        for seed in _numbers("seeds", seeds, 0)
        for rule in names
        for switch in chosen
    ]
    _run(REFEREE, cells, out, workers)
