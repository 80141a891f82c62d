"""Timing in turns: every round calls each candidate once, so that what else the machine does falls on all alike.

In the same rounds run the machine's own rates, against which a candidate is set: large matrix products in float32,
batched ones of the size within a chunk, and copying (``SIZES``); on a GPU also products in TF32 and bfloat16. A GPU is
waited for wherever a clock is read.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.registry import Candidate, Operation, Shape
from benchmarks.verify import Verdict, demand

LEAST = 0.02
"""Seconds that one timing lasts at least: shorter calls are repeated within it."""

Call = Callable[[], object]


class Sizes(NamedTuple):
    """Of what shows a device's rates: the side of square matrices, n, rows, inner and columns of batched ones, and the
    floats that are copied."""

    side: int
    batched: tuple[int, int, int, int]
    copied: int


SIZES = {"cpu": Sizes(1024, (8, 72, 64, 256), 2**24), "cuda": Sizes(8192, (4096, 72, 64, 256), 2**28)}
"""By device; a GPU is filled by larger ones only."""


@dataclass(frozen=True)
class Timed:
    """A candidate ready to be timed: its call, how long the first one took with compilation, and its operation."""

    call: Call
    first: float
    operation: Operation


@dataclass(frozen=True)
class Spread:
    """Of one quantity over the rounds."""

    median: float
    least: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Median, minimum, and the 20th and 80th percentile."""
        low, median, high = (float(x) for x in np.percentile(values, [20, 50, 80]))
        return cls(median, min(values), low, high)


def ready(candidate: Candidate, shape: Shape, verdict: Verdict | None, limit: float | None = None) -> Timed:
    """Build a candidate and call it once.

    Args:
        verdict: what ``verify`` found in this run.
        limit: seconds after which a first call of a compiled candidate is given up; None: no limit.

    Raises:
        Unverified: the candidate is ours and was not found equal to the definition.
        Missing: it cannot be built here.
        TooLong: the limit is over.
    """
    demand(candidate, verdict)
    operation = candidate.operation(shape)
    call = step(operation, candidate.backward)
    if candidate.once:
        return Timed(call, 0.0, operation)
    with deadline(limit if candidate.compile else None):
        return Timed(call, seconds(call, device=shape.device), operation)


def step(operation: Operation, backward: bool) -> Call:
    """One call: outputs and all gradients, and what is done with these; or outputs in inference mode."""

    def both() -> object:
        y = operation.function(operation.x)
        gradients = torch.autograd.grad(y, operation.leaves, torch.ones_like(y), allow_unused=True)
        return gradients if operation.update is None else operation.update(gradients)

    @torch.inference_mode()
    def forward() -> object:
        return operation.function(operation.x)

    return both if backward else forward


def seconds(call: Call, times: int = 1, device: str = "cpu") -> float:
    """Wall time of one of ``times`` calls in a row."""
    wait(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    return (time.perf_counter() - start) / times


def wait(device: str) -> None:
    """Until what a GPU was given is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def rounds(
    calls: Mapping[str, Call],
    repeats: int,
    budget: float,
    once: frozenset[str] = frozenset(),
    device: str = "cpu",
) -> Rounds:
    """Time all calls in turns, but for those for which there is no memory beside the others.

    Args:
        repeats: rounds, at least one; fewer, but not under three, where they would take longer than ``budget`` seconds.
        once: names that run in the first round only.
    """
    warm: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, call in calls.items():
        try:
            if name not in once:
                warm[name] = seconds(call, device=device)
        except torch.OutOfMemoryError as error:
            failed[name] = error.with_traceback(None)  # whose frames hold tensors
    calls = {name: call for name, call in calls.items() if name not in failed}
    times = {name: max(1, math.ceil(LEAST / took)) for name, took in warm.items()}
    total = sum(took * times[name] for name, took in warm.items())
    repeats = max(1, min(repeats, max(3, int(budget / max(total, 1e-9)))))
    found: dict[str, list[float]] = {name: [] for name in calls}
    start, spent = time.perf_counter(), time.process_time()
    for turn in range(repeats):
        gc.collect()
        with _uncollected():
            for name, call in calls.items():
                if turn == 0 or name not in once:
                    found[name].append(seconds(call, times.get(name, 1), device))
    wall = time.perf_counter() - start
    return Rounds(found, (time.process_time() - spent) / wall, failed)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection within: it would fall on whichever call is running."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True)
class Rounds:
    """Seconds of every call in each round, the share of one core that the process had meanwhile, and the calls for
    which there was no memory."""

    seconds: dict[str, list[float]]
    cpu_share: float
    failed: dict[str, Exception] = field(default_factory=dict)

    def spread(self, name: str) -> Spread:
        """Of a call's seconds."""
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> Spread:
        """Of the ratios of two calls in the same rounds."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=False)
        return Spread.of([a / b for a, b in pairs])


def rates(device: str = "cpu") -> dict[str, tuple[Call, float]]:
    """Calls that show what a device gives, with what each does: FLOPs of the products, bytes of the copy (read and
    written)."""
    draw = torch.Generator(device).manual_seed(0)
    side, (count, rows, inner, columns), copied = SIZES[device]

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw, device=device)

    a, b, c = randn(side, side), randn(side, side), torch.empty(side, side, device=device)
    d, e, f = (
        randn(count, rows, inner),
        randn(count, inner, columns),
        torch.empty(count, rows, columns, device=device),
    )
    source, goal = (torch.zeros(copied, device=device) for _ in range(2))
    found: dict[str, tuple[Call, float]] = {
        "sgemm": (lambda: torch.mm(a, b, out=c), 2.0 * side**3),
        "batched": (lambda: torch.bmm(d, e, out=f), 2.0 * count * rows * inner * columns),
        "copy": (lambda: goal.copy_(source), 2.0 * 4 * copied),
    }
    if device == "cuda":
        g, h, i = (x.bfloat16() for x in (a, b, c))
        found |= {
            "tf32": (lambda: _in_tf32(a, b, c), 2.0 * side**3),
            "bf16": (lambda: torch.mm(g, h, out=i), 2.0 * side**3),
        }
    return found


def _in_tf32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.mm(a, b, out=out)
    torch.set_float32_matmul_precision(before)


class TooLong(RuntimeError):
    """A call that was given up."""


@contextmanager
def deadline(limit: float | None) -> Iterator[None]:
    """Give up what runs within after so many seconds; in the main thread, on systems with alarms.

    Raises:
        TooLong: the limit is over.
    """
    if limit is None:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"not compiled within {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    except Exception as error:  # the compiler wraps what is raised within it
        text = str(error)
        if not isinstance(error, TooLong) and "not compiled within" in text:
            raise TooLong(f"not compiled within {limit:.0f} s") from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def load() -> float:
    """The machine's load over the last minute: processes that run or wait to run."""
    return os.getloadavg()[0]
