"""What is said while text is read: how much of it has been, and what time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from atlas_memory.printing import tell


@contextmanager
def counting(console: Console, what: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
    """Say `what` is done; and on a terminal, until it is, show how much of `total` (None: unknown) has been, the time
    that is left, and details, as they are told."""
    tell(console, what)
    known = (BarColumn(10), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left")) if total else ()
    columns = (SpinnerColumn(), *known, TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, detail: bar.update(task, completed=done, description=detail)
