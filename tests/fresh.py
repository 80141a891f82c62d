"""Processes that begin with what a run imports, and without threads: an interpreter of their own would import it anew,
for seconds each."""

import contextlib
import io
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["atlas_memory.train.trainer"])


@dataclass
class Ended:
    """How a process ended, and what it said."""

    code: int | None
    out: str
    err: str


def run(function: Callable[..., object], *args: Any) -> Ended:
    """Call ``function`` in a process of its own, which ends with the number that it returns."""
    here, there = FRESH.Pipe(duplex=False)
    process = FRESH.Process(target=_listened, args=(there, function, *args))
    process.start()
    there.close()
    try:
        out, err = here.recv()
    except EOFError:
        out = err = ""  # it was killed
    process.join()
    return Ended(process.exitcode, out, err)


def _listened(there: Connection, function: Callable[..., object], *args: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = function(*args)
    there.send((out.getvalue(), err.getvalue()))
    sys.exit(code if isinstance(code, int) else 0)
