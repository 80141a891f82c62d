"""What a report says of its numbers, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from atlas_memory.console import printable

FAULTS = {  # of an alarm's kind, the gravest first
    "broken": "is broken",
    "writes nothing": "writes nothing",
    "forgets": "forgets at once",
    "unused": "is not used",
}
DEMO_STEPS = 1198
"""That README's demo made in its five minutes, of 2,048 tokens each."""


def legible(value: object, most: int = 1000) -> str:
    """What stands in a file, or is the name of one, as text of `most` characters that can be shown anywhere."""
    try:
        text = str(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = "a huge number"
    return printable(text if len(text) <= most else f"{text[:most]}\u2026")


def amount(margin: dict[str, Any]) -> str:
    """What is saved, with two digits of its standard error; of one stream, which has none, that it is one."""
    value, error = margin["bits_per_byte"], margin["standard_error"]
    if error is None:
        return f"{decimals(value, None)} in one stream"
    return f"{decimals(value, error)} ± {decimals(error, error)}"


def decimals(value: float, error: float | None) -> str:
    """A number with as many decimals as its error has two digits; four where that is nothing or not known."""
    digits = max(0, 1 - math.floor(math.log10(error))) if error is not None and error > 1e-6 else 4
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no minus before zeros


def duration(seconds: float) -> str:
    """Seconds, or from one minute on minutes."""
    return f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def count(number: int, noun: str) -> str:
    """Such as "1 stream" and "16 streams"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(numbers: dict[str, Any]) -> str:
    """The model by what it is; its preset only where that is what was built."""
    preset = f"preset {numbers['preset']}, " if numbers["preset"] else ""
    rule = f", rule {numbers['rule']}" if numbers["rule"] else ""
    layers, heads = count(numbers["layers"], "layer"), count(numbers["heads"], "head")
    wide = f"{layers} of width {numbers['width']:,} with {heads}, {numbers['parameters']:,} parameters"
    return f"{preset}block {numbers['block']}{rule}, {wide}"


def far_fewer(numbers: dict[str, Any]) -> str:
    """That a run which time ended made far fewer steps than README's demo, in a sentence; "" where it did not."""
    steps, minutes = numbers["steps"], numbers["ended_after_minutes"]
    if minutes is None or steps is None or 2 * steps > DEMO_STEPS:
        return ""
    return (
        f"The {minutes:g} minutes that it had were enough for {count(steps, 'step')}; README's demo made "
        f"{DEMO_STEPS:,} in five. Fewer steps give worse numbers: go on with --resume and a larger train.max_minutes."
    )


def raised(looks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each alarm of a run's looks at its memories: `kind`, `memory` ("": all of them) and `text` as in its last look,
    the `step` of the look that raised it first, and `until`, the step of the last look that did if later ones did
    not."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for look in looks:
        for alarm in look.get("alarms", ()):
            key = alarm["kind"], alarm["memory"]
            first = found[key]["step"] if key in found else look["step"]
            found[key] = alarm | {"step": first, "until": look["step"]}
    return [
        alarm | {"until": None if alarm["until"] == looks[-1]["step"] else alarm["until"]} for alarm in found.values()
    ]


def headline(numbers: dict[str, Any]) -> str:
    """What a report is of: a memory that learns only where nothing says that it does not."""
    if numbers["margin"] is None:
        return "A model without a memory"
    memories = numbers["gates"]["memories"]
    faults = {memory["name"]: "writes nothing" for memory in memories if not memory["wrote"]}
    faults |= {alarm["memory"]: alarm["kind"] for alarm in numbers["alarms"] if alarm["until"] is None}
    if not faults:
        return "A memory that learns while it reads"
    if "" in faults or len(faults) >= len(memories):
        fault = next((FAULTS[kind] for kind in FAULTS if kind in faults.values()), "is of no use")
        return f"A memory that {fault}"
    return f"A model of whose {len(memories)} memories {len(faults)} {'is' if len(faults) == 1 else 'are'} of no use"
