"""What is shown on a terminal: text from outside, of which nothing may steer the terminal, and progress."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_LINE = 2000
"""Characters of a line."""
EVERY = 30.0
"""Seconds after which progress is told again, where there is no terminal."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor, changes colours or the direction of writing; and surrogates."""


def printable(text: str) -> str:
    """The text, on as many lines, with control characters escaped."""
    return _CONTROL.sub(lambda found: f"\\x{code:02x}" if (code := ord(found[0])) < 256 else f"\\u{code:04x}", text)


def one_line(text: Any) -> str:
    """The text on one line, `printable`; of a long one the middle is left out, since a remedy stands at the end."""
    line = " ".join(filter(None, map(str.strip, str(text).splitlines())))
    if len(line) > LONGEST_LINE:
        head, tail = LONGEST_LINE * 2 // 3, LONGEST_LINE // 3
        line = f"{line[:head]} ... ({len(line) - head - tail:,} characters left out) ... {line[-tail:]}"
    return printable(line)


def first_line(error: Exception) -> str:
    """What an error says first, or where it says nothing, of which kind it is."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def valid_utf8(name: str) -> str:
    """The name of a file as text that can be written, whether it is UTF-8 or not."""
    return name.encode("utf-8", "replace").decode()


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """A line on a console, as it stands: brackets are no markup, numbers have no colours."""
    console.print(one_line(text), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(console: Console, what: str, total: int | None = None) -> Iterator[Callable[[int, str], None]]:
    """Print `what` is done; on a terminal show a bar too, updated with how much of `total` (None: unknown) has been
    done, and with details."""
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    print_line(console, what)
    known = (BarColumn(10), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left")) if total else ()
    columns = (SpinnerColumn(), *known, TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, detail: bar.update(task, completed=done, description=detail)


@contextmanager
def progress_lines(command: str) -> Iterator[Callable[[str, float], None]]:
    """Inside, show on standard error what a command does and which share of it is done, as it is called with: a bar on
    a terminal; elsewhere a line for each thing that is begun, and one every `EVERY` seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), BarColumn(10), TaskProgressColumn(), words, TimeElapsedColumn())
    last, when = "", 0.0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def progress(what: str, share: float) -> None:
            nonlocal last, when
            bar.update(task, completed=share, description=one_line(what))
            now = time.monotonic()
            if not console.is_terminal and (what != last or now - when >= EVERY):
                print_line(console, f"{command}: {what}" + (f" {share:.0%}" if what == last else ""))
                last, when = what, now

        yield progress
