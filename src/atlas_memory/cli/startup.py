"""How a command starts: its imports, standard output, errors and Ctrl-C."""

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
def imports() -> Iterator[None]:
    """Around the imports of a command, which take seconds. Other libraries are silenced for good. Ctrl-C ends the
    process at once: some of their code would drop an exception. The garbage collector, a third of the time, waits."""
    first = "transformers" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        with on_interrupt(lambda *_: os._exit(report_error("interrupted", 130))):
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
    finally:
        if first:
            gc.freeze()
            gc.enable()


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


@contextmanager
def on_interrupt(handler: Callable[..., Any]) -> Iterator[None]:
    """Let Ctrl-C call `handler`, in the main thread."""
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def accept_any_output() -> None:
    """Let standard output replace what its encoding lacks; closed outputs become /dev/null."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt(report_error("interrupted", 130))


def report_error(message: str, code: int) -> int:
    """Print an error, and write it for torchrun's report; returns `code`."""
    message = one_line(message)
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    print(f"{'atlas' if count == '1' else f'atlas, process {rank} of {count}'}: {message}", file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": said}))
    return code
