"""When a memory is of no use: what a look at it says, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FORGETS = 8.0
"""Tokens: a memory of which no head has a longer half-life keeps nothing that a convolution would not."""
WRITTEN, SHARE, BRANCH = 0.002, 0.01, 0.001
"""Below the first a write hardly moves the answer to its key: the memories of Hope that make keys and values begin at
0.01, and change within a hundred tokens all the same. Below the second what was written hardly moves what the
mixer around the memory gives out; below the third that is next to nothing beside what goes past the mixer."""

SHUT = 0.01
"""An eta below which it is the gate that keeps a memory from writing."""

AGAIN = "Train anew, into another output_dir, with"
"""Settings cannot be changed under a run."""
SLOWER = (
    f"{AGAIN} train.gate_rate=0.1 (gates learn at a tenth of the rate; not those of block hope) or a lower "
    "train.learning_rate"
)


@dataclass(frozen=True)
class Alarm:
    """That a memory has stopped to be of use.

    Attributes:
        kind: "broken", "forgets", "writes nothing" or "unused".
        name: of the memory; "" where it is all of them.
        text: what was seen and what to do, one line.
    """

    kind: str
    name: str
    text: str


def alarms(summary: dict[str, Any]) -> list[Alarm]:
    """What is wrong with the memories of which ``summarise`` tells; a memory has one alarm at most.

    One look can be of a text on which nothing had to be remembered: believe what two looks in a row say.
    """
    memories = summary["memories"]
    found = [alarm for memory in memories for alarm in _of(memory)]
    lives = [_largest(memory["half_life"]) for memory in memories]
    if lives and all(life is not None and life < FORGETS for life in lives):
        text = (
            f"no memory keeps anything: the longest half-life of a head is {max(filter(None, lives)):.2f} tokens. "
            f"{SLOWER}; where data.order is crops or packed, take stream, in which holding on pays"
        )
        return [Alarm("forgets", "", text), *(a for a in found if a.kind == "broken")]
    return found


def _of(memory: dict[str, Any]) -> Iterable[Alarm]:
    name, share, branch = memory["name"], memory["share"], memory["branch"]
    if None in memory["norm"] or share is None:
        yield Alarm("broken", name, f"{name} holds numbers that are not finite. {AGAIN} a lower train.learning_rate")
        return
    written, eta = _largest(memory["written"]), _largest(memory["eta"]["mean"])
    if written is not None and eta is not None and written < WRITTEN:
        why = (
            f"its gate eta is {eta:.1g} at most. A gate that is shut does not come back: see whether something holds "
            f"eta at zero. {SLOWER}"
            if eta < SHUT
            else f"though eta is {eta:.2f}. Look whether keys and values have collapsed. {AGAIN} a rule with bounded "
            "steps (optimiser.bounded)"
        )
        yield Alarm("writes nothing", name, f"{name} writes nothing: pairs move their answers by {written:.1%}; {why}")
    elif share < SHARE or (branch is not None and branch < BRANCH):
        used = (
            f"what it has written changes {share:.2%} of what its mixer gives out"
            if share < SHARE
            else f"{branch:.3%} of what its block passes on comes from its mixer"
        )
        text = (
            f"{name} is unused: {used}. Look for a branch that is scaled away. {AGAIN} data.order=stream, if it was "
            "another: what is remembered pays there"
        )
        yield Alarm("unused", name, text)


def _largest(values: list[float | None] | None) -> float | None:
    known = [value for value in values or () if value is not None]
    return max(known) if known else None
