"""Time a token as the sequence grows, of a memory and of softmax attention."""

from __future__ import annotations

from benchmarks.operations import in_both, in_steps, memory_layer, sdpa
from benchmarks.registry import Benchmark, Row, Shape, up_to
from benchmarks.suites.mixers import OMEGANET

ATTENTION, MEMORY = "softmax attention", "omeganet, chunk 64"
GROUP = 8
"""Chunks computed anew together in the backward pass; verified over nine."""
RECOMPUTED = in_both(memory_layer, f"{MEMORY}, groups of {GROUP}", OMEGANET, chunk=64, recompute=GROUP, verified=576)
SHORT, LONGEST = 4096, 65_536
IN_STEPS = f", in steps of {SHORT:,}"


def remarks(rows: list[Row]) -> list[str]:
    """Where the memory overtakes attention, and what the longest sequence takes beside short ones in turns."""
    medians: dict[str, dict[int, float]] = {}
    for row in rows:
        if "median" in row:
            medians.setdefault(row["candidate"], {})[row["time"]] = row["median"]
    attention, found = medians.get(ATTENTION, {}), []
    for name, times in medians.items():
        if name == ATTENTION or name.endswith(IN_STEPS):
            continue
        both = sorted(set(times) & set(attention))
        faster = [time for time in both if times[time] < attention[time]]
        if faster:
            found.append(f"{name} is faster than {ATTENTION} from T = {faster[0]:,}.")
        elif both:
            found.append(f"{name} is slower than {ATTENTION} up to T = {both[-1]:,}, the last that both were given.")
    for name, times in medians.items():
        for time in set(times) & set(medians.get(name + IN_STEPS, {})):
            ratio = times[time] / medians[name + IN_STEPS][time]
            found.append(f"{name}: at {time:,} tokens a token takes {ratio:.2f} of its time at {SHORT:,}, in turns.")
    return found


LENGTH = Benchmark(
    name="length",
    shows="Where a memory, linear in time, overtakes softmax attention, and what each remembers for the backward pass.",
    shapes=tuple(Shape(batch=1, heads=4, dim=64, time=1024 * n) for n in (1, 4, 8, 16, 64)),
    quick=tuple(Shape(batch=1, heads=2, dim=8, time=time) for time in (128, 256)),
    candidates=(
        sdpa(ATTENTION, baseline=True, takes=up_to(16_384)),  # at 64K a step takes minutes
        *in_both(memory_layer, MEMORY, OMEGANET, chunk=64),
        *RECOMPUTED,
        *(in_steps(c.name + IN_STEPS, c, SHORT, takes=lambda shape: shape.time in (LONGEST, 256)) for c in RECOMPUTED),
    ),
    columns=("tokens", "candidate", "ms", "ms, 20 to 80 %", "times baseline", "µs a token", "peak MB", "check"),
    remarks=remarks,
)
