"""Names, numbers and colours of reports and the dashboard."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from atlas_memory.console import printable

# Okabe and Ito's colours, for any colour vision.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A8A8A"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#56B4E9", "#E69F00", "#000000", GREY, "#7A4EAB", "#8C564B")  # of runs


def legible(value: object, most: int = 1000) -> str:
    """Any value as text of at most `most` characters that can be shown anywhere."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integers of 5,000 digits
        text = "a huge number"
    return printable(text if len(text) <= most else f"{text[:most]}\u2026")


def memory_label(name: str) -> str:
    """A memory's name for a chart: the number of its layer, and its name within the layer."""
    layer, _, own = name.partition(":")
    number = re.search(r"(?<![^.])[0-9]{1,9}(?![^.])", layer)
    return f"layer {int(number[0]) + 1 if number else 1} {legible(own, 60)}".rstrip()


def amount(margin: dict[str, Any]) -> str:
    """A saving with two digits of its standard error; a single stream has none."""
    value, error = margin["bits_per_byte"], margin["standard_error"]
    if error is None:
        return f"{decimals(value, None)} in one stream"
    return f"{decimals(value, error)} ± {decimals(error, error)}"


def decimals(value: float, error: float | None) -> str:
    """A number with two digits of its error, or four decimals."""
    digits = max(0, 1 - math.floor(math.log10(error))) if error is not None and error > 1e-6 else 4
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no minus before zeros


def duration(seconds: float) -> str:
    return f"{seconds:.1f} seconds" if seconds < 60 else f"{seconds / 60:.1f} minutes"


def average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def count(number: int, noun: str) -> str:
    """Such as "1 stream" and "16 streams"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def loss_unit(of_bytes: bool) -> tuple[float, str]:
    """The factor from a logged loss to a shown one, and the unit."""
    return (1 / math.log(2), "bits per byte") if of_bytes else (1.0, "nats per token")


def model_size(numbers: dict[str, Any]) -> str:
    """The model of a report in words."""
    rule = f", rule {numbers['rule']}" if numbers["rule"] else ""
    layers, heads = count(numbers["layers"], "layer"), count(numbers["heads"], "head")
    wide = f"{layers} of width {numbers['width']:,} with {heads}, {numbers['parameters']:,} parameters"
    return f"block {numbers['block']}{rule}, {wide}"


def headline(numbers: dict[str, Any]) -> str:
    """The title of a report, with what the alarms found."""
    if numbers["margin"] is None:
        return "A model without a memory"
    memories = {memory["name"] for memory in numbers["memories"]}
    faults = {memory["name"] for memory in numbers["memories"] if not memory["wrote"]}
    faults |= {alarm["memory"] for alarm in numbers["alarms"] if alarm["until"] is None}
    if not faults:
        return "A memory that learns while it reads"
    unused = len(memories) if "" in faults else len(faults)
    return f"A model with {len(memories)} memories, {unused} of no use"


def differing(settings: Sequence[dict[str, Any]], all_keys: bool = False) -> list[list[str]]:
    """Rows of a key and its values, where flat settings differ, or of all keys."""
    keys = dict.fromkeys(key for each in settings for key in each)
    differ = [key for key in keys if all_keys or len({legible(each.get(key)) for each in settings}) > 1]
    return [[key, *(legible(each.get(key, "")) for each in settings)] for key in differ]
