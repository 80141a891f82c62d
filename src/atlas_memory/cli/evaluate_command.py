"""`atlas evaluate`: bits per byte of a run on held-out text, or the score of a model on benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..console import one_line, progress_lines
from .startup import imports
from .suite_commands import evaluate_suites

ColumnOfData = Annotated[str | None, typer.Option("--column", help="Where tables in --data have the text.")]
Writes = Literal["on", "off", "both"]


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run; with --suite also a model of transformers.")],
    data: Annotated[Path | None, typer.Option(help="Score all of this text, not the run's own held-out part.")] = None,
    column: ColumnOfData = None,
    length: Annotated[int | None, typer.Option(help="Tokens a stream; default 8 training lengths or 8,192.")] = None,
    streams: Annotated[int, typer.Option(min=0, help="Read at most so many streams; 0: all.")] = 64,
    writes: Annotated[Writes, typer.Option(help="Memory on, its writes off, or both.")] = "both",
    memories: Annotated[
        list[Path] | None, typer.Option("--memory", help="Also begin with what `atlas read` has read; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    suite: Annotated[
        str | None,
        typer.Option(help="Instead: benchmarks, with commas, as s-niah-1,passkey,language,lm-eval:piqa."),
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Of a suite: tokens, with commas; default the suite's.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Of a suite: items of each length; default 100, of lm-eval all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a suite: another seed draws other items.")] = 42,
    haystack: Annotated[
        list[Path] | None, typer.Option(help="Of a suite: a text to hide things in, or the text of `language`.")
    ] = None,
    babi: Annotated[Path | None, typer.Option(help="Of BABILong: the folder of bAbI's files.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Of lm-eval: a folder with tasks of your own.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Of a suite: only a memory can answer.")] = False,
    out: Annotated[Path | None, typer.Option(help="Of a suite: the folder for its results.")] = None,
) -> None:
    """Bits per byte of held-out text, overall and by position; or the score on benchmarks."""
    of_text = (data, column, length, memories) != (None, None, None, None) or writes != "both" or as_json
    of_suites = (lengths, count, haystack, babi, tasks, out) != (None,) * 6 or strict
    if of_text if suite is not None else of_suites:
        raise typer.BadParameter("options of a text and options of --suite measure different things: see --help")
    if suite is not None:
        sources = haystack or [], babi, tasks
        evaluate_suites(run, suite, lengths, count, seed, *sources, strict, out)
        return
    if memories and writes == "off":
        raise typer.BadParameter("--memory compares memories that write: leave --writes out")
    scores = _read(run, data, column, length, streams, writes, memories or ())
    first = next(iter(scores.values()))
    if memories:
        margins = {name: score.margin(first) for name, score in scores.items() if score is not first}
    else:
        margins = {"margin": first.margin(scores["writes_off"])} if len(scores) > 1 else {}
    read = len(first.bits)
    if as_json:
        found: dict[str, Any] = {name: score.to_dict() for name, score in scores.items()}
        saved = {
            name: {"bits_per_byte": v, "standard_error": e if read > 1 else None} for name, (v, e) in margins.items()
        }
        print(json.dumps(found | ({"saved": saved} if memories else saved), indent=2))
        return
    _show(scores)
    for name, (value, error) in margins.items():
        what = f"{name} saves" if memories else "the memory's writes save"
        within = f" ± {error:.4f}" if read > 1 else ""
        print(one_line(f"{what} {value:.4f}{within} bits per byte ({read} stream{'s'[: read > 1]})"))


def _read(
    run: str,
    data: Path | None,
    column: str | None,
    length: int | None,
    streams: int,
    writes: Writes,
    memories: Sequence[Path],
) -> dict[str, Any]:
    """The scores of each reading: with writes on and off, or from an empty memory and each of the `memories`."""
    with imports():
        from atlas_memory.eval.perplexity import bits_per_byte, evaluation_length
        from atlas_memory.models import Memory
        from atlas_memory.monitor.hooks import memory_layers
        from atlas_memory.train.config import RunConfig
        from atlas_memory.train.run_model import load_run
        from atlas_memory.train.training_data import evaluation_text

    loaded = load_run(run)
    if not memory_layers(loaded.model) and writes != "on":
        if writes == "off":
            raise ValueError("--writes off: the model has no memory whose writes could be off")
        writes = "on"
    readings: dict[str, dict[str, Any]] = {"memory_on": {}, "writes_off": {"writes": False}}
    if memories:  # each beside the same text read from an empty memory
        readings = {"empty memory": {}} | {str(path): {"memory": Memory.load(path, loaded.model)} for path in memories}
    elif writes != "both":
        del readings["writes_off" if writes == "on" else "memory_on"]
    _, documents = evaluation_text(loaded, data, column)
    trained = (loaded.config or RunConfig()).data
    length = evaluation_length(trained.longest) if length is None else length
    scores = {}
    with progress_lines("evaluate") as progress:
        for name, options in readings.items():
            shown = partial(progress, f"reading with {name.replace('_', ' ')}")
            options |= {"streams": streams or None, "progress": shown}
            scores[name] = bits_per_byte(loaded.model, loaded.tokenizer, documents, length, **options).checked()
    return scores


def _show(scores: dict[str, Any]) -> None:
    first = next(iter(scores.values()))
    table = Table("tokens", *(name.replace("_", " ") for name in scores), title="Bits per byte by position")
    for j, (start, stop) in enumerate(zip(first.edges, first.edges[1:], strict=False)):
        table.add_row(f"{start:,}-{stop:,}", *(f"{score.by_position[j]:.4f}" for score in scores.values()))
    table.add_section()
    table.add_row("all", *(f"{score.overall:.4f}" for score in scores.values()))
    Console().print(table)
