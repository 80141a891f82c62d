"""What a study of learning is: a function of one rule, one head width and one seed, and what its table shows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from atlas_memory.memory import RULES, Muon, Rule
from benchmarks import machine, measure
from benchmarks.registry import Row

CHUNK = 16
"""Tokens of a chunk in all studies."""
WIDTH = 128
"""Of the models of text, whatever their heads are: of preset ``tiny``."""
ASKED_SEED = 7
"""The seed of what trained models are asked."""


def heads(dim: int) -> int:
    """Of how many heads of ``dim`` the models of text are; ValueError if they are none as wide as ``WIDTH``."""
    if WIDTH % dim:
        raise ValueError(f"--widths {dim}: models of text are {WIDTH} wide, and heads divide that")
    return WIDTH // dim


Measure = Callable[[str, int, int, bool], dict[str, float]]
"""Numbers by name, of a case, heads of a width, a seed, and whether it is only to be seen that it works."""


@dataclass(frozen=True)
class Study:
    """One table: a row a case and head width, its numbers the means over the seeds.

    Attributes:
        name: what the command calls it.
        shows: what is measured, in a sentence or a few.
        cases: names of rules, or of what stands beside them.
        widths: of heads.
        measure: see ``Measure``; it is called in a process of its own.
        columns: of the table; see ``results.COLUMNS``.
    """

    name: str
    shows: str
    cases: tuple[str, ...]
    widths: tuple[int, ...]
    measure: Measure
    columns: tuple[str, ...]


def laptop(name: str, window: int = 4) -> Rule:
    """The rule at a size that is trained in a minute: a memory as wide as its head, short windows, chunks of 16, and
    Muon once a chunk, until which what waits for it is read too, as in the byte presets."""
    rule = RULES[name]
    changes: dict[str, dict[str, Any]] = {"window": {"size": min(window, rule.window.size), "chunk": CHUNK}}
    if hasattr(rule.network, "expansion"):
        changes["network"] = {"expansion": 1}
    if isinstance(rule.optimiser, Muon):
        changes["optimiser"] = {"every": None, "read_pending": True}
    return rule.vary(**changes)


def run(
    study: Study,
    cases: tuple[str, ...],
    widths: tuple[int, ...],
    seeds: tuple[int, ...],
    quick: bool,
    workers: int,
    command: str,
    say: Callable[[str], None],
    earlier: list[Row],
) -> Iterator[dict[str, Any]]:
    """Every case at every width, with every seed: the result as the JSON file has it, anew whenever a row is complete,
    since a study takes hours.

    Args:
        earlier: rows of an earlier run; those of other cases and widths are kept, each with its own revision.

    Raises:
        ValueError: a case that the study does not have.
    """
    if unknown := [case for case in cases if case not in study.cases]:
        raise ValueError(f"study {study.name} has no case {unknown[0]!r}; it has {', '.join(study.cases)}")
    result = {
        "benchmark": study.name,
        "shows": study.shows,
        "command": command,
        "quick": quick,
        "threads": 1,
        "date": machine.now(),
        "revision": machine.revision(),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "load_before": measure.load(),
        "columns": list(study.columns),
    }
    made = {"date": result["date"], "revision": result["revision"], "cpu": machine.describe()["cpu"]}
    rows: dict[tuple[int, int], Row] = {
        (row["dim"], study.cases.index(row["candidate"])): row for row in earlier if row["candidate"] in study.cases
    }
    jobs = [(case, width, seed) for width in widths for case in cases for seed in seeds]
    with ProcessPoolExecutor(workers, initializer=_alone) as pool:
        found: list[dict[str, float]] = []
        for job, numbers in zip(jobs, pool.map(partial(_measured, study.measure, quick), jobs), strict=True):
            case, width, seed = job
            say(f"{study.name}: {case}, heads of {width}, seed {seed}: {_brief(numbers)}")
            found.append({"seed": seed, **numbers})
            if len(found) == len(seeds):
                means = {name: statistics.fmean(f[name] for f in found) for name in numbers}
                rows[width, study.cases.index(case)] = {
                    "candidate": case,
                    "dim": width,
                    "seeds": found,
                    **means,
                    **made,
                }
                found = []
                in_order = [rows[place] for place in sorted(rows)]
                yield result | {"load_after": measure.load(), "rows": in_order, "remarks": []}


def _measured(function: Measure, quick: bool, job: tuple[str, int, int]) -> dict[str, float]:
    return function(*job, quick)


def _alone() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # what a memory forgets fades to numbers that are slow to compute with


def _brief(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
