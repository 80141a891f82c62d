"""What all pictures share: an empty figure, quiet axes, labels at the ends of curves, curves that lie on each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

plain_names = partial(matplotlib.rc_context, {"text.parse_math": False})
"""Inside, dollar signs in the names of files and runs are what they are, and not mathematics."""


def canvas(width: float, height: float) -> Figure:
    """An empty figure of so many inches, drawn without a screen."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def labelled(name: str) -> str:
    """A name as the label of a curve: one that begins with an underscore would be missing in a legend."""
    return f" {name}" if name.startswith("_") else name


def tidy(axes: Axes) -> None:
    """Axes without what is not needed."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11)
    for text, size in ((axes.xaxis.label, 12), (axes.yaxis.label, 12), (axes.title, 13)):
        text.set_fontsize(size)


def stroke(number: int) -> dict[str, Any]:
    """How the curve `number` of a picture is drawn: the first one whole and broad, those above it in dashes with room
    for each other's, so that three are seen where they lie on each other."""
    if number == 0:
        return {"linewidth": 3.0, "marker": "o", "markersize": 8}
    style = (5.0 * (number % 2), (4.0, 6.0))
    return {"linewidth": 2.0, "linestyle": style, "marker": "o", "markersize": max(3.0, 8.0 - 2 * number)}


def label_ends(axes: Axes, labels: Sequence[tuple[str, float, str]], end: float) -> None:
    """Write (text, height, colour) right of the axes, beside the curves that end at `end`, as near to their heights as
    they have room, with a line to the curve where that is not beside it. The limits of the axes are to be as they
    stay."""
    low, high = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # which gives the axes their height
    room = 17 / 72 * figure.dpi / axes.get_window_extent().height
    labels = sorted(labels, key=lambda label: label[1])
    wanted = np.array([(height - low) / (high - low) for _, height, _ in labels])
    for (text, height, colour), want, at in zip(labels, wanted, _apart(wanted, room), strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 4}
        line["relpos"] = (0, 0.5)
        axes.annotate(
            text,
            (end, height),
            (1.02, float(at)),
            textcoords="axes fraction",
            color=colour,
            fontsize=12,
            va="center",
            annotation_clip=False,
            arrowprops=line if abs(at - want) > room / 4 else None,
        )


def _apart(wanted: np.ndarray, room: float) -> np.ndarray:
    """Rising places as near to those wanted (in squares) as leaves room between them, within 0 to 1 where all fit."""
    shift = room * np.arange(len(wanted))
    groups: list[list[float]] = []  # of places that touch, as if room were nothing
    for place in wanted - shift:
        groups.append([place])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    places = np.concatenate([np.full(len(group), np.mean(group)) for group in groups])
    return np.clip(places, 0.0, max(0.0, 1.0 - shift[-1])) + shift
