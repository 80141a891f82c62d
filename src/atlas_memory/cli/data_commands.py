"""The commands that make text ready for training: `atlas data prepare`, `atlas tokenizer train`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..console import one_line, print_line, progress_bar
from .startup import imports

if TYPE_CHECKING:
    from atlas_memory.data.sources import Source

data_app = typer.Typer(help="Text made ready for training.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Tokenizers of your own.", no_args_is_help=True)

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SOURCE]...", help="As data.path has them; none: the standard library's source."),
]
Column = Annotated[str, typer.Option(help="Where tables have the text.")]
Split = Annotated[str, typer.Option(help="Of a dataset.")]
Subset = Annotated[str | None, typer.Option(help="Of a hub's dataset that has several.")]
Streaming = Annotated[bool, typer.Option("--streaming", help="Read a hub's dataset as it comes, without a download.")]
Documents = Annotated[int | None, typer.Option(min=1, help="Read only the first so many.")]
HeldOut = Annotated[float, typer.Option(min=0.0, max=0.9, help="The share of documents not to train on.")]


@contextmanager
def _progress(source: Source, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a source has been read. Errors name options instead of a run's keys, such as data.column."""
    console, began, read = Console(stderr=True), time.monotonic(), ""

    def progress(documents: int, count: int) -> None:
        nonlocal read
        read = f"{documents:,} documents, {count:,} {unit}"
        show(documents, read)

    try:
        with progress_bar(console, f"reading {source}") as show:
            yield progress
    except ValueError as error:
        said = re.sub(r"\bdata\.path(=|: )|; prepared text is made by: .*", "", str(error))
        raise ValueError(re.sub(r"\bdata\.(\w+)", lambda key: f"--{key[1].replace('_', '-')}", said)) from error
    print_line(console, f"read {read} in {time.monotonic() - began:.0f} s{source.remarks()}")


@data_app.command()
def prepare(
    sources: Sources = None,
    out: Annotated[Path, typer.Option(help="The folder to write: data.path of runs to come.")] = Path("prepared"),
    tokenizer: Annotated[str, typer.Option(help='"bytes", a name or a folder.')] = "bytes",
    column: Column = "text",
    split: Split = "train",
    subset: Subset = None,
    streaming: Streaming = False,
    documents: Documents = None,
    held_out: HeldOut = 0.1,
) -> None:
    """Tokenise text once, into a folder that training reads without loading it."""
    with imports():
        from atlas_memory.data.prepared import prepare as run
        from atlas_memory.data.sources import Source

    source = Source(sources or None, column, split, subset, streaming, documents)
    with _progress(source, "tokens") as progress:
        made = run(source, out, tokenizer, held_out, progress)
    print(one_line(made))


@tokenizer_app.command("train")
def train_tokenizer(
    sources: Sources = None,
    out: Annotated[Path, typer.Option(help="The folder to write: data.tokenizer of runs to come.")] = Path("tokenizer"),
    vocab_size: Annotated[int, typer.Option(help="Tokens, at least 258.")] = 32_000,
    column: Column = "text",
    split: Split = "train",
    subset: Subset = None,
    streaming: Streaming = False,
    documents: Documents = None,
    held_out: HeldOut = 0.1,
) -> None:
    """Learn a byte-level BPE tokenizer from text."""
    with imports():
        from atlas_memory.data import Source
        from atlas_memory.data import train_tokenizer as run

    source = Source(sources or None, column, split, subset, streaming, documents)
    with _progress(source, "characters") as progress:
        made = run(source, out, vocab_size, held_out, progress)
    print(one_line(f"{out}: {len(made):,} tokens; use it with data.tokenizer={out}"))
