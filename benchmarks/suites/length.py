"""Time a token as the sequence grows, of a memory and of softmax attention."""

from __future__ import annotations

from benchmarks.operations import in_both, memory_layer, sdpa
from benchmarks.registry import Benchmark, Row, Shape, up_to
from benchmarks.suites.mixers import OMEGANET

ATTENTION, MEMORY = "softmax attention", "omeganet, chunk 64"
GROUP = 2
"""Chunks computed anew together in the backward pass; verified over five."""


def remarks(rows: list[Row]) -> list[str]:
    """Where the memory overtakes attention."""
    medians: dict[str, dict[int, float]] = {}
    for row in rows:
        if "median" in row:
            medians.setdefault(row["candidate"], {})[row["time"]] = row["median"]
    attention, found = medians.get(ATTENTION, {}), []
    for name, times in medians.items():
        if name == ATTENTION:
            continue
        both = sorted(set(times) & set(attention))
        faster = [time for time in both if times[time] < attention[time]]
        if faster:
            found.append(f"{name} is faster than {ATTENTION} from T = {faster[0]:,}.")
        elif both:
            found.append(f"{name} is slower than {ATTENTION} up to T = {both[-1]:,}, the last that both were given.")
    return found


LENGTH = Benchmark(
    name="length",
    shows="Where a memory, linear in time, overtakes softmax attention, and what each remembers for the backward pass.",
    shapes=tuple(Shape(batch=1, heads=4, dim=64, time=1024 * n) for n in (1, 4, 8, 16, 64)),
    quick=tuple(Shape(batch=1, heads=2, dim=8, time=time) for time in (128, 256)),
    candidates=(
        sdpa(ATTENTION, baseline=True, takes=up_to(16_384)),  # at 64K a step takes minutes
        *in_both(memory_layer, MEMORY, OMEGANET, chunk=64),
        *in_both(memory_layer, f"{MEMORY}, groups of {GROUP}", OMEGANET, chunk=64, recompute=GROUP, verified=320),
    ),
    columns=("tokens", "candidate", "ms", "ms, 20 to 80 %", "times baseline", "µs a token", "peak MB", "check"),
    remarks=remarks,
)
