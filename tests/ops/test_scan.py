"""All chunks at once (ops/delta_scan.py) and one after the other are the same function; which of them is taken."""

import importlib
from dataclasses import dataclass, replace

import pytest
import torch

from atlas_memory.memory import RULES, Linear, chunkwise, recurrent
from atlas_memory.ops import delta_scan as scan
from atlas_memory.ops.dispatch import has_scan

from .problems import everything, random_problem, worst

chunkwise_form = importlib.import_module("atlas_memory.ops.chunkwise")

VARIED = {
    "gated-deltanet": RULES["gated-deltanet"],
    "deltanet": RULES["deltanet"],
    "fades to M_0": RULES["gated-deltanet"].vary(retention={"to_initial": True}),
    "residual": replace(RULES["gated-deltanet"], network=Linear(residual=True)),
    "before the decay": RULES["gated-deltanet"].vary(optimiser={"after_decay": False}),
}


@pytest.fixture
def scanned(monkeypatch) -> list[int]:
    """How many chunks were read at once, of each time that any were."""
    found, form = [], scan.read_chunks

    def counted(rule, params, memory, chunks, filled):
        found.append(len(chunks.v))
        return form(rule, params, memory, chunks, filled)

    monkeypatch.setattr(scan, "read_chunks", counted)
    return found


@pytest.mark.parametrize("time", [8, 11, 20])
@pytest.mark.parametrize("name", VARIED)
def test_equals_the_definition_and_chunk_after_chunk(name, time, scanned, monkeypatch):
    problem = random_problem(VARIED[name].vary(window={"chunk": 4}), 0, time=time, dim=6)
    at_once = everything(chunkwise, problem)
    assert scanned == [-(-time // 4)]
    monkeypatch.setattr(chunkwise_form, "has_scan", lambda rule: False)
    in_turn = everything(chunkwise, problem)
    assert len(scanned) == 1
    for other in (in_turn, everything(recurrent, problem)):
        gap, where = worst(at_once, other)
        assert gap < 1e-10, where


@pytest.mark.parametrize("name", ["fades to M_0", "deltanet"])
def test_goes_on_from_a_state(name, scanned):
    problem = random_problem(VARIED[name].vary(window={"chunk": 4}), 1, time=24)

    def in_parts(rule, params, q, k, v, gates, state):
        for start, stop in ((0, 8), (8, 9), (9, 12), (12, 24)):  # the second and third begin or end inside a chunk
            now = replace(problem, params=params, q=q, k=k, v=v, gates=gates).between(start, stop)
            y, state = chunkwise(*now.arguments(), state)
            parts.append(y)
        return torch.cat(parts, 2), state

    parts: list[torch.Tensor] = []
    gap, where = worst(everything(in_parts, problem), everything(recurrent, problem))
    assert gap < 1e-10, where
    assert scanned == [2, 3]


def test_who_is_read_at_once(scanned):
    """A few sequences of several chunks, under the delta rule with gates a head; not padding."""
    rule = RULES["gated-deltanet"].vary(window={"chunk": 4})
    for changes, options, expected in (
        ({}, {}, True),
        ({"time": 4}, {}, False),
        ({"channels": True}, {}, False),
        ({"batch": 64, "heads": 8}, {}, True),  # 8,192 numbers of a chunk's keys
        ({"batch": 65, "heads": 8}, {}, False),
        ({"dim": 16}, {}, True),
        ({"dim": 17}, {}, False),  # D M would take longer than all else
        ({}, {"recompute": 2}, True),
    ):
        scanned.clear()
        problem = random_problem(rule, 2, **({"time": 9, "batch": 1, "heads": 1} | changes))
        chunkwise(*problem.arguments(), **options)
        assert bool(scanned) == expected, (changes, options)
    for name, other in RULES.items():
        assert has_scan(other) == (name in ("deltanet", "gated-deltanet")), name


@dataclass(frozen=True)
class Halved(Linear):
    """A network of one's own."""

    def end(self, x, pre_norm, norm):
        return 0.5 * pre_norm

    def pre_norm_error(self, cache, error, norm):
        return 0.5 * error


def test_parts_of_ones_own_are_read_chunk_after_chunk(scanned):
    rule = replace(RULES["gated-deltanet"], network=Halved()).vary(window={"chunk": 4})
    problem = random_problem(rule, 3, time=20)
    gap, where = worst(everything(chunkwise, problem), everything(recurrent, problem))
    assert gap < 1e-10 and not scanned, where
