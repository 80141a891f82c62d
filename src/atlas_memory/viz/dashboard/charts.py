"""The dashboard's charts, from the lines of logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atlas_memory.viz.dashboard.figures import MEASURES, SPREAD
from atlas_memory.viz.dashboard.runs import Watched
from atlas_memory.viz.report.names import BLUE, COLOURS, GREEN, GREY, ORANGE, PINK, short

if TYPE_CHECKING:  # which loads torch
    from atlas_memory.eval.reading import Reading

POINTS, LOOKS, ROWS, COLUMNS = 1000, 60, 64, 3  # of all curves, a heat map (two) and a legend at the most
ROW, AROUND = 15, 84  # pixels of a heat map's line, and of what is above and below: Streamlit fits all into a height
STYLE: dict[str, Any] = {  # Streamlit's own leaves half of the height empty
    "font": "Source Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#E8E8E8", "domain": False, "tickColor": "#CCCCCC", "labelColor": "#555555"},
    "title": {"fontSize": 15, "anchor": "start", "offset": 6},
    "legend": {"labelFontSize": 12, "orient": "top", "offset": 4, "title": None},
}
STEPS: dict[str, Any] = {  # by the hundred pixels, since phones are narrow; every number with a prefix of its own
    "labelExpr": "format(datum.value, '~s')",
    "tickCount": {"signal": "ceil(width / 100)"},
    "tickMinStep": 1,
    "labelOverlap": True,
    "labelSeparation": 8,
}
END = "length(datum.label) > 15 ? '\u2026' + slice(datum.label, -14) : datum.label"  # of long names, where they differ
Spec = dict[str, Any]
"""A chart, as Vega-Lite has it. It is written out since checking the rows of ten runs takes Altair five seconds."""


def _chart(title: str | None, rows: Sequence[dict[str, Any]], height: int, **rest: Any) -> Spec:
    padding = {"left": 0, "right": 8, "top": 4, "bottom": 12}
    head = {} if title is None else {"title": title}
    return head | {"data": {"values": rows}, "height": height, "padding": padding, "config": STYLE} | rest


def _field(name: str, kind: str, **rest: Any) -> Spec:
    return {"field": name, "type": kind} | rest


def curves(
    runs: Sequence[Watched], label: str, points: Callable[[Watched], Iterable[tuple[int, float | None]]]
) -> Spec | None:
    """A curve of (step, value) for each run, means of neighbours where there are many; None where there is nothing."""
    most = max(60, min(300, POINTS // max(1, len(runs))))
    rows: list[dict[str, Any]] = [
        {"run": run.name, "step": step, "value": value}
        for run in runs
        for step, value in _thin([(step, v) for step, v in points(run) if v is not None and math.isfinite(v)], most)
    ]
    if not rows:
        return None
    found = {row["run"] for row in rows}
    colours = {run.name: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs) if run.name in found}
    low, high = min(row["value"] for row in rows), max(row["value"] for row in rows)
    legend = {"columns": COLUMNS, "labelExpr": END, "symbolType": "stroke"} if len(colours) > 1 else None
    limits = {"zero": False} if low < high else {"domain": [min(0, 2 * low), max(0, 2 * high) or 1]}  # for one value
    return _chart(
        label,
        rows,
        240 + (18 * -(-len(colours) // COLUMNS) if legend else 0),
        mark={"type": "line", "point": len(rows) <= 20 * len(runs), "clip": True},
        encoding={
            "x": _field("step", "quantitative", title="step", axis=STEPS),
            "y": _field("value", "quantitative", title=None, scale=limits, axis={"format": "~g"}),
            "color": _field("run", "nominal", scale=_colours(colours), legend=legend),
            "tooltip": [
                _field("run", "nominal"),
                _field("step", "quantitative", format=",.0f"),
                _field("value", "quantitative", format=".4~g", title=label),
            ],
        },
    )


def _thin(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(points) <= most:
        return points
    parts = np.array_split(np.array(points, dtype=float), most)
    return [(int(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def measures(looks: Sequence[dict[str, Any]]) -> list[str]:
    """Which of ``MEASURES`` the memories have in the last look."""
    memories = looks[-1]["memories"] if looks else []
    return [name for name in MEASURES if any(_values(memory, name) is not None for memory in memories)]


def heads_over_steps(looks: Sequence[dict[str, Any]], measure: str) -> Spec:
    """A heat map of one figure: a column for each look, a line for each head of each memory; for each memory, the mean
    over its heads, where there would be more than ``ROWS`` lines."""
    label, _, limits = MEASURES[measure]
    found = _lines(looks, measure)
    rows = [
        {"line": line, "step": step, "value": value} for line, values in found.items() for step, value in values.items()
    ]
    log = measure == "half_life"
    scale: dict[str, Any] = {"scheme": "cividis", "clamp": True, "type": "log" if log else "linear"}
    scale |= {} if limits is None else {"domain": list(limits)}
    tall = max(90, ROW * len(found))
    legend = {"orient": "right", "gradientThickness": 10, "gradientLength": min(120, tall - 20), "tickCount": 4}
    legend |= {"format": "~s" if log else ".3~g"}
    axis = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 8, "format": ","}
    names = {"labelLimit": 120, "labelOverlap": False}
    return _chart(
        label,
        rows,
        tall + AROUND,
        mark="rect",
        encoding={
            "x": _field("step", "ordinal", title="step", axis=axis),
            "y": _field("line", "nominal", title=None, sort=list(found), axis=names),
            "color": _field("value", "quantitative", scale=scale, legend=legend),
            "tooltip": [
                _field("line", "nominal"),
                _field("step", "ordinal"),
                _field("value", "quantitative", format=".4~g", title=label),
            ],
        },
    )


def _lines(looks: Sequence[dict[str, Any]], measure: str) -> dict[str, dict[int, float | None]]:
    """The lines of a heat map from above, each with its value by step."""
    shown = looks[:: -(-len(looks) // LOOKS)]
    shown = shown if shown[-1] is looks[-1] else [*shown, looks[-1]]
    heads = sum(len(_values(memory, measure) or []) for memory in looks[-1]["memories"])
    found: dict[str, dict[int, float | None]] = {}
    for look in shown:
        for memory in look["memories"]:
            values, name = _values(memory, measure) or [], short(memory["name"])
            if heads > ROWS:
                known = [value for value in values if value is not None]
                values = [sum(known) / len(known) if known else None]
            for head, value in enumerate(values, 1):
                line = f"{name}, head {head}" if len(values) > 1 else name
                found.setdefault(line, {})[look["step"]] = value
    return found


def _values(memory: dict[str, Any], measure: str) -> list[float | None] | None:
    """A figure of a memory, by head."""
    value: Any = memory.get(measure.removesuffix(SPREAD))
    if measure.startswith("error "):
        value = memory["error"][0 if measure == "error 16" else -1] if memory["error"] else None
    elif isinstance(value, dict):
        value = value["std" if measure.endswith(SPREAD) else "mean"]
    if value is None:
        return None
    return [x if x is not None and math.isfinite(x) else None for x in (value if isinstance(value, list) else [value])]


def reading_along(reading: Reading) -> Spec:
    """Bits a token along a text, and what writing saved, means of neighbours; passages that are read again, and where
    they stood first, are shaded."""
    parts = np.array_split(np.arange(1, len(reading.cost)), min(200, max(1, len(reading.cost) - 1)))
    curves = [("cost", reading.cost, ORANGE)]
    curves += [] if reading.saved is None else [("saved by writing", reading.saved, GREEN)]
    curves += [] if reading.older is None else [("saved by older tokens", reading.older, PINK)]
    rows = [
        {"token": int(part.mean()), "what": name, "bits": float(np.mean(values[part]))}
        for name, values, _ in curves
        for part in parts
    ]
    x = {"title": "token", "axis": STEPS, "scale": {"domain": [0, len(reading.cost)]}}
    below = {"columns": 1}  # one name below the other, for narrow screens
    lines = {
        "mark": "line",
        "encoding": {
            "x": _field("token", "quantitative", **x),
            "y": _field("bits", "quantitative", title="bits a token"),
            "color": _field(
                "what", "nominal", scale=_colours({name: colour for name, _, colour in curves}), legend=below
            ),
            "tooltip": [
                _field("what", "nominal"),
                _field("token", "quantitative", format=","),
                _field("bits", "quantitative", format=".2f"),
            ],
        },
    }
    shades = [
        {"from": begin, "to": end, "when": when}
        for when, places in (
            ("read first", np.unique(reading.before[reading.before >= 0])),
            ("read again", np.flatnonzero(reading.before >= 0)),
        )
        for begin, end in _stretches(places)
    ]
    shaded = {
        "data": {"values": shades},
        "mark": {"type": "rect", "opacity": 0.18},
        "encoding": {
            "x": _field("from", "quantitative", **x),
            "x2": {"field": "to"},
            "color": _field("when", "nominal", scale=_colours({"read first": GREY, "read again": BLUE}), legend=below),
        },
    }
    layers = [shaded, lines] if shades else [lines]
    return _chart(None, rows, 260, layer=layers, resolve={"scale": {"color": "independent"}})


def _colours(of: dict[str, str]) -> Spec:
    return {"domain": list(of), "range": list(of.values())}


def _stretches(places: np.ndarray) -> list[tuple[int, int]]:
    """Where ascending whole numbers begin and end to follow one another."""
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
