"""While a command imports what it needs, and what Ctrl-C does then and later."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..console import one_line


@contextmanager
def loading() -> Iterator[None]:
    """Around the imports of a command, which take seconds. Third parties are kept from talking over it, then and later;
    errors and our own warnings stay. Ctrl-C ends the process at once, since nothing has begun: an exception would come
    up in the midst of others' code, some of which drops it. The garbage collector waits: what is imported stays, and
    to look through it again and again took a third of the time."""
    with on_interrupt(lambda *_: os._exit(say("interrupted", 130))), _without_garbage_collection():
        from transformers.utils import logging as transformers_logging

        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine("atlas: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|transformers|accelerate)\.")
        yield


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Python's garbage collector waits, and leaves alone what is there by then, at the end of the process too. Nothing
    of this where all has been imported before: what is there may be garbage."""
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def on_interrupt(handler: Callable[..., Any]) -> Iterator[None]:
    """Let Ctrl-C call `handler`, where it does anything and this is the main thread, which alone may say so."""
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def take_any_text() -> None:
    """Let standard output take any text: what its encoding lacks is replaced. Where it, or that of errors, is closed,
    what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def interrupted(*_: object) -> None:
    """Say so, and raise what Ctrl-C raises."""
    raise KeyboardInterrupt(say("interrupted", 130))


def say(message: str, code: int) -> int:
    """An error, to standard error; to torchrun too, if it started this process, in the form that its report reads.
    Returns `code`, that of the process."""
    message = one_line(message)
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    print(f"{'atlas' if count == '1' else f'atlas, process {rank} of {count}'}: {message}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": said}))
    return code
