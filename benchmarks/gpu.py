"""All that is measured on a GPU, in one command from the source tree: PYTHONPATH=src python -m benchmarks.gpu --out DIR

The suites gpu-chunk, gpu-newton-schulz and gpu-training, or those that are named, most important shapes first, what is
compiled last, for a GPU that is at hand for minutes and may lack the packages of `python -m benchmarks`. Nothing is
begun after ``--minutes``; what fails is recorded, and the rest goes on. DIR/NAME.json is written after every shape.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ |= {"TRITON_INTERPRET": "1"} if "--dry-run" in sys.argv else {}  # before anything imports Triton

from benchmarks import results
from benchmarks.registry import Benchmark, Candidate, Missing
from benchmarks.run import Run, Settings, demand_device
from benchmarks.suites import ON_GPU
from benchmarks.suites.gpu import CHUNK, MEMORIES, NEWTON_SCHULZ
from benchmarks.suites.gpu_training import TRAINING


class Item(NamedTuple):
    """At one shape of a benchmark the candidates in whose names the pattern ``of`` is found: the compiled ones, or the
    others."""

    benchmark: Benchmark
    shape: int
    of: str = ""
    compiled: bool = False

    def candidates(self) -> list[Candidate]:
        """Those that are meant."""
        return [c for c in self.benchmark.candidates if re.search(self.of, c.name) and c.compile == self.compiled]


LENGTHS = range(len(CHUNK.shapes))
FAST, SLOW = "attention|gated-deltanet|graphed", "titans$"
"""What trains a model in seconds a step at most, and the rest."""
ORDER: tuple[Item, ...] = (
    Item(CHUNK, 0, "delta"),
    Item(CHUNK, 0, "MLP"),
    *(Item(NEWTON_SCHULZ, index) for index in range(len(NEWTON_SCHULZ.shapes))),
    Item(TRAINING, 0, FAST),
    Item(CHUNK, 0, "linear"),
    *(Item(CHUNK, index, "delta") for index in LENGTHS[1:]),
    *(Item(CHUNK, index, "MLP") for index in LENGTHS[1:]),
    *(Item(TRAINING, index, FAST) for index in range(1, len(TRAINING.shapes))),
    *(Item(CHUNK, index, "linear") for index in LENGTHS[1:]),
    Item(TRAINING, 0, SLOW),
    *(Item(CHUNK, index, memory, compiled=True) for memory in MEMORIES for index in LENGTHS),
    *(Item(TRAINING, index, SLOW) for index in range(1, len(TRAINING.shapes))),
)
"""Most important first; compiling takes long."""


def main(out: Path, minutes: float, quick: bool, only: Sequence[str] = ()) -> None:
    """Measure, write and print. Without names in ``only``, all suites are.

    Raises:
        Missing: no GPU, and not ``quick``.
        OSError: ``out`` cannot be written.
    """
    demand_device(ON_GPU, quick)
    folder, begun = results.writable(out), time.monotonic()
    settings = Settings(repeats=1 if quick else 3, quick=quick, compile_limit=0.0 if quick else 600.0)
    command = " ".join(["python -m benchmarks.gpu", *only, f"--minutes {minutes:g}", *["--dry-run"] * quick])
    suites = [b for b in ON_GPU if b.name in (only or [b.name])]
    runs = {b.name: Run(b, settings, command, partial(print, flush=True)) for b in suites}
    for item in ORDER:
        if item.benchmark not in suites:
            continue
        run, index, candidates = runs[item.benchmark.name], item.shape, item.candidates()
        if index >= len(item.benchmark.at(quick)):
            continue
        if time.monotonic() - begun > 60 * minutes:
            run.leave_out(index, candidates, f"{minutes:g} minutes were over")
        else:
            run.measure(index, candidates)
        results.save(run.result, folder)
    print("\n" + "\n".join(results.table(run.result) for run in runs.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = {b.name for b in ON_GPU}
    parser.add_argument("only", nargs="*", metavar="SUITE", help=f"of {', '.join(sorted(suites))}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.json; made if missing")
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, kernels in an interpreter")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - suites:
        parser.error(f"no suite is called {', '.join(sorted(unknown))}: there are {', '.join(sorted(suites))}")
    try:
        main(arguments.out, arguments.minutes, arguments.dry_run, arguments.only)
    except (Missing, OSError, ValueError) as error:
        parser.error(str(error))
