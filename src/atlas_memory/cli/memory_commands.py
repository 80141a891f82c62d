"""`atlas read`, `atlas chat` and `atlas memory`: memories in files."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..console import one_line, progress_bar
from .startup import imports

if TYPE_CHECKING:
    from ..models.saved_memory import Memory

memory_app = typer.Typer(help="Saved memories, which `atlas read` writes.", no_args_is_help=True)

PIECE = 2**16  # characters of a text that are read at a time, as by `model.read`
SAME = "the same command, with the same texts and the same --from"
SAVE_EVERY = 30.0  # seconds, at the end of a piece
MemoryFile = Annotated[Path, typer.Argument(metavar="MEMORY", help="A file that `atlas read` wrote.")]


def read(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `atlas train` wrote, or demo.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXTS...", help="Text files, one after the other; - is standard input."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("read.memory"),
    from_: Annotated[Path | None, typer.Option("--from", help="A memory to read on from.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with --out, which was interrupted.")] = False,
) -> None:
    """Read texts into a memory of constant size, and save it: at the end, and every half minute."""
    with imports():
        from atlas_memory.data.tokenization import encode
        from atlas_memory.models import Memory
        from atlas_memory.train.run_model import load_run

    if not texts:
        raise typer.BadParameter("name the text files to read, or - for standard input")
    if texts.count("-") > 1:
        raise typer.BadParameter("- is standard input, which can be read once")
    _check_place(out)
    loaded = load_run(run)
    memory = start = Memory.load(from_, loaded.model) if from_ else Memory.empty(loaded.model)
    if resume:
        if not out.is_file():
            raise ValueError(f"there is no memory at {str(out)!r} to go on with: leave --resume out")
        memory = Memory.load(out, loaded.model)
        if memory.texts[: len(start.texts)] != start.texts or len(memory.texts) > len(start.texts) + len(texts):
            raise ValueError(f"{str(out)!r} was read by another command: --resume needs {SAME}")
    elif out.exists():
        raise ValueError(f"{str(out)!r} exists: choose another --out; --resume goes on with an interrupted reading")
    done, began, first, read_bytes = len(start.texts), time.monotonic(), memory.tokens, 0
    saved = began

    def speed() -> str:
        return f"{(memory.tokens - first) / max(time.monotonic() - began, 1e-9):,.0f} a second"

    try:
        with progress_bar(Console(stderr=True), "", _size(texts) or None) as show:
            for text in texts:
                for piece, record, known in _pieces(text, memory.texts[done] if len(memory.texts) > done else None):
                    read_bytes += len(piece.encode())
                    if not known:
                        ids = encode(loaded.tokenizer, piece)
                        now = loaded.model.read(_tensor(ids), memory=memory) if len(ids) else memory
                        memory = replace(now, texts=(*memory.texts[:done], record))  # at once: Ctrl-C may come between
                    show(read_bytes, f"{memory.tokens:,} tokens, {speed()}")
                    if time.monotonic() - saved > SAVE_EVERY:
                        memory.save(out)
                        saved = time.monotonic()
                whole = replace(memory.texts[done], whole=True)
                memory, done = replace(memory, texts=(*memory.texts[:done], whole, *memory.texts[done + 1 :])), done + 1
    except KeyboardInterrupt:
        if memory.tokens > first:
            memory.save(out)
            print(one_line(f"{out}: {memory.tokens:,} tokens; the same command with --resume goes on"), file=sys.stderr)
        raise
    if memory.tokens == start.tokens:
        raise ValueError(f"no text in {', '.join(texts)}: there is nothing to read")
    memory.save(out)
    print(
        one_line(
            f"{out}: {memory.tokens - first:,} tokens in {time.monotonic() - began:.1f} s, {speed()}; "
            f"{memory.tokens:,} tokens in all, in a state of {memory.nbytes:,} bytes"
        )
    )


def _pieces(text: str, before: Any) -> Iterator[tuple[str, Any, bool]]:
    """Pieces of a text, what has been read of it at the end of each, and whether `before`, of an interrupted reading,
    has read the piece. ValueError if that was another text."""
    from atlas_memory.data.readers import text_of
    from atlas_memory.models.saved_memory import ReadText

    name, count, digest = ("standard input" if text == "-" else Path(text).name), 0, hashlib.sha256()
    other = f"{text!r} is not the text that was read before: --resume needs {SAME}"
    try:
        with _open(text) as file:
            for piece in text_of(file, PIECE):
                count += len(data := piece.encode())
                digest.update(data)
                record = ReadText(name, count, digest.hexdigest(), whole=False)
                if known := before is not None:
                    if count > before.bytes or (count == before.bytes and record.sha256 != before.sha256):
                        raise ValueError(other)
                    before = before if count < before.bytes else None
                yield piece, record, known
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{text!r} is not UTF-8 text ({error.reason}): text in another encoding is converted by "
            "iconv -f ENCODING -t utf-8"
        ) from error
    if before is not None:
        raise ValueError(other)


def _open(text: str) -> Any:
    if text == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed: name a text file")
        return sys.stdin.buffer
    if Path(text).is_dir():
        raise ValueError(f"{text!r} is a folder: name the text files in it")
    if not Path(text).is_file():
        raise ValueError(f"there is no text file at {text!r}")
    return open(text, "rb")


def _size(texts: list[str]) -> int:
    """Bytes of all texts; 0 if that is not known."""
    for text in texts:
        if text != "-":
            _open(text).close()  # before hours of reading
    return 0 if "-" in texts else sum(Path(text).stat().st_size for text in texts)


def _check_place(out: Path) -> None:
    if out.is_dir():
        raise ValueError(f"{str(out)!r} is a folder: name the file to write")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {str(out.parent)!r} to write {out.name!r} into")


def _tensor(ids: Any) -> Any:
    import torch

    return torch.from_numpy(ids.astype("int64"))[None]


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `atlas train` wrote, or demo.")],
    memory: Annotated[Path | None, typer.Option(help="What the model has read before.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=1e-6)] = 0.8,
    top_k: Annotated[int, typer.Option(min=1)] = 40,
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**64 - 1)] = 0,
) -> None:
    """Talk with a model, which remembers what was said. /save FILE keeps where it stands; /quit ends."""
    with imports():
        from atlas_memory.data.tokenization import chat_tokenizer
        from atlas_memory.eval.sampling import reply
        from atlas_memory.models import Memory
        from atlas_memory.train.run_model import load_run

    loaded = load_run(run)
    now = Memory.load(memory, loaded.model) if memory else Memory.empty(loaded.model)
    tokenizer = chat_tokenizer(loaded.tokenizer)
    print(f"{now.tokens:,} tokens read. /save FILE keeps the memory, /quit ends.", file=sys.stderr)
    turn, saved = 0, set[Path]()
    while (line := _ask()) is not None:
        command, _, place = line.strip().partition(" ")
        if command == "/quit":
            break
        if command == "/save":
            _save(now, place.strip(), saved)
        elif command.startswith("/"):
            print(f"{command} is unknown: /save FILE keeps the memory, /quit ends", file=sys.stderr)
        elif line.strip():
            now = reply(loaded.model, tokenizer, now, line, max_new_tokens, temperature, top_k, seed + turn)
            turn += 1


def _ask() -> str | None:
    """A line of the user; None at the end of input."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        import readline  # noqa: F401 - editing and history
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeError:
        print("this line is not UTF-8 text", file=sys.stderr)
        return ""


def _save(memory: Memory, place: str, saved: set[Path]) -> None:
    """Save into a new file or one of those `saved` in this chat, and go on after an error."""
    path = Path(place)
    try:
        if not place:
            raise ValueError("/save needs the name of a file")
        _check_place(path)
        if path.exists() and path not in saved:
            raise ValueError(f"{place!r} exists: choose another file")
        memory.save(path)
        saved.add(path)
    except (OSError, ValueError) as error:
        print(one_line(error), file=sys.stderr)
    else:
        print(one_line(f"saved: {place}, {memory.tokens:,} tokens"), file=sys.stderr)


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `atlas train` wrote, or demo.")],
    memories: Annotated[Path, typer.Option(help="The folder of the memories that requests name.")] = Path("memories"),
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    address: Annotated[str, typer.Option(help="Whom it answers: 0.0.0.0 is every machine that can reach it.")] = (
        "localhost"
    ),
    max_batch_size: Annotated[int, typer.Option(min=1, help="Requests that are continued at once; others wait.")] = 16,
    max_loaded: Annotated[int, typer.Option(min=1, help="Memories that stay loaded: those used last.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at most.")] = 16_384,
) -> None:
    """Answer requests in OpenAI's protocol, from saved memories, many at a time."""
    with imports():
        import fastapi  # noqa: F401 - without these, transformers' handlers fail with no clear word
        import openai  # noqa: F401
        import uvicorn

        from atlas_memory.serve.app import make_app
        from atlas_memory.train.run_model import load_run
        from atlas_memory.viz.server import check_free, hosts, shown

    check_free(address, port)
    app = make_app(load_run(run), memories, max_batch_size, max_loaded, max_tokens, hosts(address))
    print(one_line(f"{run}: http://{shown(address)}:{port}/v1, memories in {memories} (Ctrl-C ends it)"), flush=True)
    uvicorn.run(app, host=address, port=port, log_level="warning", timeout_graceful_shutdown=3)


@memory_app.command()
def show(file: MemoryFile) -> None:
    """What a memory has read, and how far it is from where it began."""
    with imports():
        from atlas_memory.models.saved_memory import read_memory_file

    about, tensors = read_memory_file(file)
    of, size = about["model"], sum(t.numel() * t.element_size() for t in tensors.values())
    print(one_line(f"model: {of.get('name')} (block {of.get('block')}, rule {of.get('rule')})"))
    print(one_line(f"weights: {of.get('weights')}; atlas-memory {of.get('library')}"))
    print(f"read: {about['tokens']:,} tokens, in a state of {size:,} bytes")
    for text in about["texts"]:
        part = "" if text.whole else " (interrupted: not the whole text)"
        print(one_line(f"text: {text.name}, {text.bytes:,} bytes, sha256 {text.sha256}{part}"))
    table = Table("memory", "norm", "share written", "half-life (tokens)")
    for layer in about["layers"]:
        half = "-" if layer.half_life is None else " to ".join(f"{tokens:,.0f}" for tokens in layer.half_life)
        table.add_row(layer.name, f"{layer.norm:.3g}", f"{layer.written:.3g}", half)
    Console().print(table)


@memory_app.command()
def check(
    file: MemoryFile,
    model: Annotated[Path, typer.Option(help="The run whose model is to answer from it.")],
) -> None:
    """Whether a memory is whole, and of this model."""
    with imports():
        from atlas_memory.models import Memory
        from atlas_memory.train.run_model import load_run

    memory = Memory.load(file, load_run(model).model)
    print(one_line(f"{file}: whole, {memory.tokens:,} tokens, read by the model in {model}"))
