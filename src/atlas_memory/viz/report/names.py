"""Colours, and what people call the gates and memories of a model."""

from __future__ import annotations

import re

from atlas_memory.viz.report.words import legible

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A8A8A"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#56B4E9", "#E69F00", "#000000", GREY, "#7A4EAB", "#8C564B")  # of runs
GATES = {  # name: (label, colour)
    "alpha": ("α  retention", BLUE),
    "eta": ("η  step size", ORANGE),
    "theta": ("θ  momentum", GREEN),
    "gamma": ("Σγ  tokens in window", PINK),
    "delta": ("δ  threshold", GREY),
}


def short(name: str) -> str:
    """A memory's name for a picture: the number of its layer, and what it is called within it."""
    layer, _, own = name.partition(":")
    number = re.search(r"(?<![^.])[0-9]{1,9}(?![^.])", layer)
    return f"layer {int(number[0]) + 1 if number else 1} {legible(own, 60)}".rstrip()
