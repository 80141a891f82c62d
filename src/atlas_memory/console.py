"""Terminal output: untrusted text, with control characters escaped, and progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_LINE = 2000
EVERY = 30.0  # seconds between lines of progress without a terminal
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text, on as many lines, with control characters escaped."""
    return _CONTROL.sub(lambda found: f"\\x{code:02x}" if (code := ord(found[0])) < 256 else f"\\u{code:04x}", text)


def one_line(text: Any) -> str:
    """The text on one line, `printable`; a long one without its middle, since remedies are at the end."""
    line = " ".join(filter(None, map(str.strip, str(text).splitlines())))
    if len(line) > LONGEST_LINE:
        head, tail = LONGEST_LINE * 2 // 3, LONGEST_LINE // 3
        line = f"{line[:head]} ... ({len(line) - head - tail:,} characters left out) ... {line[-tail:]}"
    return printable(line)


def first_line(error: Exception) -> str:
    """The first line of an error, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def valid_utf8(name: str) -> str:
    """A file's name with what is not UTF-8 replaced."""
    return name.encode("utf-8", "replace").decode()


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line without markup or colours."""
    console.print(one_line(text), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, what: str, total: float | None = None) -> Iterator[Callable[[float, str], None]]:
    """Print `what` is done, if anything; on a terminal show a bar too, updated with how much of `total` (None: unknown)
    has been done, and with details."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    if what:
        print_line(console, what)
    known = (BarColumn(10), TaskProgressColumn()) if total else ()
    columns = (SpinnerColumn(), *known, TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, detail: bar.update(task, completed=done, description=one_line(detail))


@contextmanager
def progress_lines(command: str) -> Iterator[Callable[[str, float], None]]:
    """Show on standard error what a command does, and the share that is done: a bar on a terminal; elsewhere a line for
    each new step, and one every `EVERY` seconds."""
    from rich.console import Console

    console = Console(stderr=True)
    last, when = "", 0.0
    with progress_bar(console, "", 1.0) as show:

        def progress(what: str, share: float) -> None:
            nonlocal last, when
            show(share, what)
            now = time.monotonic()
            if not console.is_terminal and (what != last or now - when >= EVERY):
                print_line(console, f"{command}: {what}" + (f" {share:.0%}" if what == last else ""))
                last, when = what, now

        yield progress
