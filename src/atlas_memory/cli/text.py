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
from .loading import loading

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
def _counting(source: Source, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a source has been read while it is, and say how many documents, and of what else, it was."""
    console, began, said = Console(stderr=True), time.monotonic(), ""
    size = source.size()
    what = f"reading {source}" + (f", {size / 1e6:,.1f} MB" if size else "")
    with progress_bar(console, what, size) as show:

        def told(documents: int, count: int) -> None:
            nonlocal said
            said = f"{documents:,} documents, {count:,} {unit}"
            show(source.read, said)

        yield told
    seconds = time.monotonic() - began
    print_line(console, f"read {said} in {seconds:.0f} s{source.remarks()}")


@contextmanager
def _of_options() -> Iterator[None]:
    """Errors that name the keys of a run, such as data.column, name the command's options and arguments instead."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"\bdata\.path(=|: )|; prepared text is made by: .*", "", str(error))
        said = re.sub(r"\bdata\.(\w+)", lambda key: f"--{key[1].replace('_', '-')}", said)
        raise ValueError(said) from error


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
    with loading():
        from atlas_memory.data.prepared import prepare as run
        from atlas_memory.data.sources import Source

    source = Source(sources or None, column, split, subset, streaming, documents)
    with _of_options(), _counting(source, "tokens") as show:
        made = run(source, out, tokenizer, held_out, show)
    print(one_line(made))


@tokenizer_app.command("train")
def train_(
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
    with loading():
        from atlas_memory.data.sources import Source
        from atlas_memory.data.tokenization import train_tokenizer

    source = Source(sources or None, column, split, subset, streaming, documents)
    with _of_options(), _counting(source, "characters") as show:
        made = train_tokenizer(source, out, vocab_size, held_out, show)
    print(one_line(f"{out}: {len(made):,} tokens; use it with data.tokenizer={out}"))
