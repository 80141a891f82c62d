"""What a command says while it reads for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ..printing import one_line, tell

EVERY = 30.0
"""Seconds after which a line is written again, where there is no terminal."""


@contextmanager
def telling(command: str) -> Iterator[Callable[[str, float], None]]:
    """Inside, show what a command does and which share of that is done, as they are told: a bar on a terminal, and
    elsewhere a line for each thing that is begun and one every `EVERY` seconds; on standard error."""
    console = Console(stderr=True)
    words = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), BarColumn(10), TaskProgressColumn(), words, TimeElapsedColumn())
    said, when = "", 0.0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def told(what: str, share: float) -> None:
            nonlocal said, when
            bar.update(task, completed=share, description=one_line(what))
            now = time.monotonic()
            if not console.is_terminal and (what != said or now - when >= EVERY):
                done = f" {share:.0%}" if what == said else ""
                tell(console, f"{command}: {what}{done}")
                said, when = what, now

        yield told
