"""The dashboard's charts, from the lines of logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np

from atlas_memory.dashboard.runs import Watched
from atlas_memory.report.names import BLUE, COLOURS, GATES, GREEN, GREY, ORANGE, short

if TYPE_CHECKING:  # which loads torch
    from atlas_memory.evaluation.reading import Reading

POINTS, LOOKS, ROWS, COLUMNS = 300, 60, 64, 3  # of a curve, a heat map (two) and a legend at the most
MEASURES = {  # figure of a memory in a look: what it is called, and its values where colours begin and end
    "half_life": ("half-life (tokens)", (1.0, 1e4)),
    "written": ("answers moved by writing", (0.0, 1.0)),
    "surprise": ("error before the write", (0.0, 1.0)),
    "error 16": ("error 16 tokens after", (0.0, 1.0)),
    "error 256": ("error 256 tokens after", (0.0, 1.0)),
    "share": ("share of the output that hangs on it", (0.0, 1.0)),
    "branch": ("size of the branch beside what goes past it", None),
    "norm": ("norm", None),
    "moved": ("distance from M_0", None),
    "momentum": ("norm of the momentum", None),
    "rank": ("effective rank", None),
    "turn": ("bend of its path (degrees)", (0.0, 180.0)),
    **{name: (label, (0.0, 1.0) if name in ("eta", "theta") else None) for name, (label, _) in GATES.items()},
}


def styled(chart: alt.Chart | alt.LayerChart) -> alt.Chart | alt.LayerChart:
    """A chart without what its figures do not need: Streamlit's own style leaves half of the height empty."""
    return (
        chart.configure(font="Source Sans, sans-serif", padding={"left": 0, "right": 8, "top": 4, "bottom": 12})
        .configure_view(stroke=None)
        .configure_axis(gridColor="#E8E8E8", domain=False, tickColor="#CCCCCC", labelColor="#555555")
        .configure_title(fontSize=15, anchor="start", offset=6)
        .configure_legend(labelFontSize=12, orient="top", offset=4)
    )


def curves(
    runs: Sequence[Watched], label: str, points: Callable[[Watched], Iterable[tuple[int, float | None]]]
) -> alt.Chart | None:
    """A curve of (step, value) for each run, means of neighbours where there are many; None where there is nothing."""
    rows = [
        {"run": run.name, "step": step, "value": value}
        for run in runs
        for step, value in _thin([(step, v) for step, v in points(run) if v is not None and math.isfinite(v)])
    ]
    if not rows:
        return None
    names = [run.name for run in runs]
    scale = alt.Scale(domain=names, range=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
    legend = alt.Legend(title=None, columns=COLUMNS, labelLimit=110, symbolType="stroke")
    return (
        alt.Chart(alt.Data(values=rows), title=label)
        .mark_line(point=len(rows) <= 20 * len(runs), clip=True)
        .encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(format="~s", tickMinStep=1)),
            y=alt.Y("value:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("run:N", scale=scale, legend=legend if len(names) > 1 else None),
            tooltip=[
                "run:N",
                alt.Tooltip("step:Q", format=",.0f"),
                alt.Tooltip("value:Q", format=".4~g", title=label),
            ],
        )
        .properties(height=240 + (18 * -(-len(names) // COLUMNS) if len(names) > 1 else 0))
    )


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(points) <= POINTS:
        return points
    parts = np.array_split(np.array(points, dtype=float), POINTS)
    return [(int(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def measures(looks: Sequence[dict[str, Any]]) -> list[str]:
    """Which of ``MEASURES`` the memories have in the last look."""
    memories = looks[-1]["memories"] if looks else []
    return [name for name in MEASURES if any(_values(memory, name) is not None for memory in memories)]


def heads_over_steps(looks: Sequence[dict[str, Any]], measure: str) -> alt.Chart:
    """A heat map of one figure: a column for each look, a line for each head of each memory; for each memory, the mean
    over its heads, where there would be more than ``ROWS`` lines."""
    label, limits = MEASURES[measure]
    shown = looks[:: -(-len(looks) // LOOKS)]
    shown = shown if shown[-1] is looks[-1] else [*shown, looks[-1]]
    found: dict[str, list[tuple[int, float]]] = {}
    heads = sum(len(_values(memory, measure) or []) for memory in looks[-1]["memories"])
    for look in shown:
        for memory in look["memories"]:
            values = [math.nan if v is None else v for v in _values(memory, measure) or []]
            if heads > ROWS:
                values = [float(np.mean(values))] if values else []
            for head, value in enumerate(values):
                line = short(memory["name"]) + (f", head {head + 1}" if len(values) > 1 else "")
                found.setdefault(line, []).append((look["step"], value))
    rows = [
        {"line": line, "step": step, "value": value if math.isfinite(value) else None}
        for line, values in found.items()
        for step, value in values
    ]
    log = measure == "half_life"
    scale: dict[str, Any] = {"scheme": "cividis", "clamp": True, "type": "log" if log else "linear"}
    scale |= {} if limits is None else {"domain": list(limits)}
    legend = alt.Legend(
        orient="right", title=None, gradientThickness=10, gradientLength=110, format="~s" if log else ".3~g"
    )
    return (
        alt.Chart(alt.Data(values=rows), title=label)
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelAngle=0, labelOverlap=True, format=",")),
            y=alt.Y("line:N", title=None, sort=list(found), axis=alt.Axis(labelLimit=120, labelOverlap=True)),
            color=alt.Color("value:Q", scale=alt.Scale(**scale), legend=legend),
            tooltip=["line:N", alt.Tooltip("step:O"), alt.Tooltip("value:Q", format=".4~g", title=label)],
        )
        .properties(height=max(120, 14 * len(found)))
    )


def _values(memory: dict[str, Any], measure: str) -> list[float | None] | None:
    """A figure of a memory, by head."""
    if measure.startswith("error "):
        return memory["error"][0 if measure == "error 16" else -1]
    value = memory.get(measure)
    if isinstance(value, dict):
        return value["mean"]
    return [value] if isinstance(value, int | float) else value


def reading_along(reading: Reading) -> alt.Chart:
    """Bits a token along a text, and what writing saved, means of neighbours; passages that are read again, and where
    they stood first, are shaded."""
    parts = np.array_split(np.arange(1, len(reading.cost)), min(200, max(1, len(reading.cost) - 1)))
    curves = [("cost", reading.cost, ORANGE)]
    curves += [] if reading.saved is None else [("saved by writing", reading.saved, GREEN)]
    rows = [
        {"token": int(part.mean()), "what": name, "bits": float(np.mean(values[part]))}
        for name, values, _ in curves
        for part in parts
    ]
    lines = (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X(
                "token:Q",
                title="token",
                axis=alt.Axis(format="~s", tickCount=8),
                scale=alt.Scale(domain=[0, len(reading.cost)]),
            ),
            y=alt.Y("bits:Q", title="bits a token"),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=[name for name, _, _ in curves], range=[colour for *_, colour in curves]),
                legend=alt.Legend(title=None),
            ),
            tooltip=["what:N", alt.Tooltip("token:Q", format=","), alt.Tooltip("bits:Q", format=".2f")],
        )
    )
    shades = [
        {"from": begin, "to": end, "when": when}
        for when, places in (
            ("read first", np.unique(reading.before[reading.before >= 0])),
            ("read again", np.flatnonzero(reading.before >= 0)),
        )
        for begin, end in _stretches(places)
    ]
    shaded = (
        alt.Chart(alt.Data(values=shades))
        .mark_rect(opacity=0.18)
        .encode(
            x=alt.X("from:Q", title="token"),
            x2="to:Q",
            color=alt.Color(
                "when:N",
                scale=alt.Scale(domain=["read first", "read again"], range=[GREY, BLUE]),
                legend=alt.Legend(title=None),
            ),
        )
    )
    chart = alt.layer(shaded, lines).resolve_scale(color="independent") if shades else lines
    return chart.properties(height=280)


def _stretches(places: np.ndarray) -> list[tuple[int, int]]:
    """Where ascending whole numbers begin and end to follow one another."""
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
