"""What is said while text is read: how much of it has been, and what time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Say `what` is done; and on a terminal, until it is, how much of `total` (None: unknown), and details, as they are
    told. Without a terminal it is that one line."""
    if not console.is_terminal:
        console.print(what, highlight=False, markup=False, soft_wrap=True)
        yield lambda done, detail: None
        return
    known = (BarColumn(20), TaskProgressColumn(), TimeLeft(), TextColumn("left")) if total else ()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *known, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, detail: bar.update(task, completed=done, description=detail or what)
