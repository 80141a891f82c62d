"""Charts as Vega-Lite specifications, drawn by a browser or by `save`. Altair would take seconds to check ten runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from atlas_memory.monitor.logs import MEASURES, ProbeRecord
from atlas_memory.viz.labels import BLUE, COLOURS, GREEN, GREY, ORANGE, PINK, average, decimals, memory_label

if TYPE_CHECKING:  # which load torch
    from torch import Tensor

    from atlas_memory.eval.perplexity import Score
    from atlas_memory.eval.token_costs import TokenCosts
    from atlas_memory.monitor import MemoryTrace, Trace

Spec = dict[str, Any]
POINTS, PROBES, ROWS, COLUMNS, BINS = 1000, 60, 64, 3, 96  # at most: of all curves, of heat maps, a legend, a panel
PANEL = (200, 110)  # pixels
ROW, AROUND = 15, 84  # pixels of a heat map's line, and above and below: Streamlit fits all into a height
STYLE: Spec = {  # Streamlit's own leaves half of the height empty
    "font": "Source Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#E8E8E8", "domain": False, "tickColor": "#CCCCCC", "labelColor": "#555555"},
    "title": {"fontSize": 15, "anchor": "start", "offset": 6},
    "legend": {"labelFontSize": 12, "orient": "top", "offset": 4, "title": None, "labelLimit": 300, "symbolOpacity": 1},
}
STEPS: Spec = {
    "labelExpr": "format(datum.value, '~s')",
    "tickMinStep": 1,
    "labelOverlap": True,
    "labelSeparation": 8,
}
END = "length(datum.label) > 15 ? '\u2026' + slice(datum.label, -14) : datum.label"  # names differ at their ends
TRACED = {  # colours of measures along a text
    **{"alpha": BLUE, "eta": ORANGE, "theta": GREEN, "gamma": PINK, "delta": GREY},
    **{"error_before_write": ORANGE, "recall_error": GREEN, "readout_change": PINK, "memory_contribution": BLUE},
    **{"effective_rank": BLUE, "distance_from_init": GREEN, "update_angle": PINK},
}
Points = Iterable[tuple[float, float | None] | tuple[float, float | None, float, float]]
"""(x, value), or (x, value, low, high) with the ends of a band."""


def _chart(title: str | Spec | None, height: int, **rest: Any) -> Spec:
    head = {} if title is None else {"title": title}
    return head | {"height": height, "padding": {"left": 0, "right": 8, "top": 4, "bottom": 12}, "config": STYLE} | rest


def _field(name: str, kind: str, **rest: Any) -> Spec:
    return {"field": name, "type": kind} | rest


def _value(title: str | None) -> Spec:
    return _field("value", "quantitative", format=".4~g", title=title)


def save(path: Path, *rows: Sequence[Spec | None], width: int = 640) -> None:
    """Draw rows of charts as a PNG; charts in a row share the width, and None is left out."""
    import vl_convert

    def placed(chart: Spec, beside: int) -> Spec:
        inside = {key: chart[key] for key in chart.keys() - {"config", "padding"}}
        return inside if "facet" in chart else inside | {"width": width // beside}

    apart = {"resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
    lines = [{"hconcat": [placed(chart, len(row)) for chart in row if chart]} | apart for row in rows if any(row)]
    stacked = {"vconcat": lines, "config": STYLE, "background": "white", "padding": 12} | apart
    path.write_bytes(vl_convert.vegalite_to_png(stacked, scale=2))


def curves(
    series: Mapping[str, Points],
    title: str | None,
    *,
    colours: Sequence[str] = COLOURS,
    x: Spec | None = None,
    unit: str | None = None,
    bands: bool = False,
    dashed: bool = False,
    under: Sequence[Spec] = (),
) -> Spec | None:
    """A curve for each series, of means of neighbours where points are many; None without points.

    `x`: the axis (default: steps); `unit`: of y; `bands`: draw those of the points, and the range of neighbours;
    `dashed`: all but the first, so that overlapping ones are seen; `under`: layers to draw first.
    """
    most = max(60, min(300, POINTS // max(1, len(series))))
    keys = ("series", "x", "value", "low", "high")
    rows: list[Spec] = [
        dict(zip(keys, (n, *p), strict=True)) for n, points in series.items() for p in _thinned(points, most)
    ]
    if not rows:
        return None
    found = {row["series"] for row in rows}
    palette = {name: colours[i % len(colours)] for i, name in enumerate(series) if name in found}
    low, high = min(row["value"] for row in rows), max(row["value"] for row in rows)
    limits = {"zero": False} if low < high else {"domain": [min(0, 2 * low), max(0, 2 * high) or 1]}
    legend = {"columns": COLUMNS, "symbolType": "stroke"} | ({"labelExpr": END} if len(series) > COLUMNS else {})
    across = _field("x", "quantitative", **({"title": "step", "axis": STEPS} if x is None else x))
    colour = _field("series", "nominal", scale=_colours(palette), legend=legend if len(palette) > 1 else None)
    up = _field("value", "quantitative", title=unit, scale=limits, axis={"format": "~g"})
    pointed = [_field("series", "nominal"), _field("x", "quantitative", format=",.0f", title=across["title"])]
    line: Spec = {"x": across, "y": up, "color": colour, "tooltip": [*pointed, _value(title or unit)]}
    if dashed:
        order = [[1, 0], *([4 + n, 5] for n in range(1, len(palette)))]
        line["strokeDash"] = _field("series", "nominal", scale={"domain": list(palette), "range": order}, legend=None)
    layers = [{"mark": {"type": "line", "point": len(rows) <= 20 * len(series), "clip": True}, "encoding": line}]
    if bands:
        band = {"x": across, "y": up | {"field": "low"}, "y2": {"field": "high"}, "color": colour}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.2, "clip": True}, "encoding": band})
    height = 240 + (18 * -(-len(palette) // COLUMNS) if len(palette) > 1 else 0)
    apart = {"scale": {"color": "independent"}}
    return _chart(title, height, data={"values": rows}, layer=[*under, {"layer": layers}], resolve=apart)


def _thinned(points: Points, most: int) -> Iterable[tuple[float, ...]]:
    """At most so many finite points (x, value, low, high): of neighbours the last x, mean, least and largest."""
    known = [(p[0], p[1], *(p[2:] or (p[1], p[1]))) for p in points if p[1] is not None and math.isfinite(p[1])]
    if len(known) <= most:
        return known
    parts = np.array_split(np.array(known, dtype=float), most)
    return [(int(p[-1, 0]), float(p[:, 1].mean()), float(p[:, 2].min()), float(p[:, 3].max())) for p in parts]


def _colours(of: Mapping[str, str]) -> Spec:
    return {"domain": list(of), "range": list(of.values())}


def contributions(probes: Sequence[ProbeRecord]) -> Points:
    """The mean memory contribution of each probe, with its range over memories."""
    for probe in probes:
        known = probe.contributions
        if known:
            yield probe.step, sum(known) / len(known), min(known), max(known)


def _field_of(name: str) -> tuple[str, str]:
    """The field of ``MemoryRecord`` that has a measure, and the lag or "spread"."""
    field, _, suffix = (name, "", "") if name in MEASURES else name.rpartition("_")
    return field, suffix


def described(name: str) -> tuple[str, str, tuple[float, float] | None]:
    """Title, description and limits of a measure by its name in ``MemoryRecord.by_head``."""
    field, suffix = _field_of(name)
    about, extra = MEASURES[field], cast(dict[str, Any], MEASURES[field].json_schema_extra)
    title = (about.title or "").format(lag=suffix)
    if suffix == "spread":
        return f"{title}, spread", f"Standard deviation over tokens of {title}. 0: it is the same everywhere.", None
    return title, about.description or "", extra["limits"]


def measures(probes: Sequence[ProbeRecord]) -> list[str]:
    """The measures that a memory has in the last probe."""
    last = probes[-1:]
    return list(dict.fromkeys(name for probe in last for of in probe.memories for name in of.by_head(probe.lags)))


def heat_map(probes: Sequence[ProbeRecord], name: str) -> Spec:
    """A heat map of one measure: a column for each probe, a line for each head of each memory; for each memory, where
    there would be more than ``ROWS`` lines."""
    title, _, limits = described(name)
    columns = list(probes[:: -(-len(probes) // PROBES)])
    columns += [] if columns[-1] is probes[-1] else [probes[-1]]
    field = [_field_of(name)[0]]
    heads = sum(len(memory.by_head(probes[-1].lags, field).get(name, [])) for memory in probes[-1].memories)
    rows = []
    for probe in columns:
        for memory in probe.memories:
            values, label = memory.by_head(probe.lags, field).get(name, []), memory_label(memory.name)
            values = [average(values)] if heads > ROWS and values else values
            for head, value in enumerate(values, 1):
                line = f"{label}, head {head}" if len(values) > 1 else label
                rows.append({"line": line, "step": probe.step, "value": value})
    lines = list(dict.fromkeys(row["line"] for row in rows))
    log = limits is not None and limits[0] > 0
    scale: Spec = {"scheme": "cividis", "clamp": True, "type": "log" if log else "linear"}
    scale |= {} if limits is None else {"domain": list(limits)}
    tall = max(90, ROW * len(lines))
    legend = {"orient": "right", "gradientThickness": 10, "gradientLength": min(120, tall - 20), "tickCount": 4}
    axis = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 8, "format": ","}
    y = {"title": None, "sort": lines, "axis": {"labelLimit": 120, "labelOverlap": False}}
    encoding = {
        "x": _field("step", "ordinal", title="step", axis=axis),
        "y": _field("line", "nominal", **y),
        "color": _field("value", "quantitative", scale=scale, legend=legend | {"format": "~s" if log else ".3~g"}),
        "tooltip": [_field("line", "nominal"), _field("step", "ordinal"), _value(title)],
    }
    return _chart(title, tall + AROUND, data={"values": rows}, mark="rect", encoding=encoding)


def by_position(
    series: Mapping[str, Sequence[Any]], title: str | None, trained: int | None = None, **rest: Any
) -> Spec | None:
    """Curves of bits per byte over positions in a stream, at the ends of buckets, with the training length marked."""
    ends = sorted({int(point[0]) for points in series.values() for point in points})
    x = {
        "title": "position in the stream (tokens, up to)",
        "scale": {"type": "log", "base": 2, "domain": [min(ends) / 1.2, max(ends) * 1.1], "nice": False},
        "axis": {"values": ends, "format": ",", "labelOverlap": True},
    }
    under: list[Spec] = []
    if trained is not None and ends[0] / 1.2 < trained < ends[-1]:
        at = {"x": _field("x", "quantitative", **x), "text": {"field": "text"}}
        of = {"data": {"values": [{"x": trained, "text": "training length"}]}}
        rule = {"type": "rule", "color": GREY, "strokeDash": [4, 3]}
        label = {"type": "text", "align": "left", "dx": 4, "y": 6, "color": GREY}
        under = [of | {"mark": rule, "encoding": {"x": at["x"]}}, of | {"mark": label, "encoding": at}]
    return curves(series, title, x=x, unit="bits per byte", dashed=True, under=under, **rest)


def bits_by_position(on: Score, off: Score | None, recent: Score, trained: int, title: str) -> list[Spec | None]:
    """Bits per byte by position with the full context, with a memory of the last tokens only and with writes off; and
    what writing and older tokens save, within twice the standard error over streams. Legends have the last values."""
    ends, costs, savings = on.edges[1:], {}, {}
    names = {"memory on" if off else "full context": on, f"last {trained:,} tokens only": recent}
    for name, of in (names | ({"writes off": off} if off else {})).items():
        label = f"{name} {of.by_position[-1]:.3f}"
        costs[label] = list(zip(ends, map(float, of.by_position), strict=True))
    for name, other in ({"by older tokens": recent} | ({"by writing": off} if off else {})).items():
        value, error = on.margin_by_position(other).T
        error = np.where(on.reached > 1, error, 0.0)
        label = f"{name} {decimals(value[-1], float(error[-1]))}"
        savings[label] = np.stack([ends, value, value - 2 * error, value + 2 * error], 1).tolist()
    return [
        by_position(costs, title, trained, colours=[BLUE, GREEN, ORANGE]),
        by_position(savings, "Saved", trained, bands=True, colours=[GREEN, ORANGE]),
    ]


def along_text(reading: TokenCosts) -> Spec | None:
    """Bits of each token along a text, and what writing and older tokens saved; repeated passages are shaded."""
    found = {"cost": (reading.cost, ORANGE), "saved by writing": (reading.saved, GREEN)}
    found |= {"saved by older tokens": (reading.older, PINK)}
    known = {name: (values, colour) for name, (values, colour) in found.items() if values is not None}
    x = {"title": "token", "axis": STEPS, "scale": {"domain": [0, len(reading.cost)]}}
    again = reading.before >= 0
    shades = [
        {"from": begin, "to": end, "when": when}
        for when, places in (("read first", np.unique(reading.before[again])), ("read again", np.flatnonzero(again)))
        for begin, end in _stretches(places)
    ]
    colour = _field("when", "nominal", scale=_colours({"read first": GREY, "read again": BLUE}))
    shaded = {
        "data": {"values": shades},
        "mark": {"type": "rect", "opacity": 0.18},
        "encoding": {"x": _field("from", "quantitative", **x), "x2": {"field": "to"}, "color": colour},
    }
    series = {name: enumerate(values.tolist()) for name, (values, _) in known.items()}
    colours = [colour for _, colour in known.values()]
    return curves(series, None, colours=colours, x=x, unit="bits per token", under=[shaded] if shades else [])


def _stretches(places: np.ndarray) -> list[tuple[int, int]]:
    """First and last + 1 of each run of consecutive numbers."""
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def trace_columns(seen: Trace, names: Sequence[str]) -> list[Spec]:
    """A chart for each measure (an attribute of ``MemoryTrace``, or ATTRIBUTE/I for its lag I), with a panel for each
    memory: the median over heads and neighbouring tokens, and the middle 90 %."""
    return [_column(seen, name, first=n == 0) for n, name in enumerate(names)]


def _column(seen: Trace, name: str, first: bool) -> Spec:
    attribute, _, lag = name.partition("/")
    title = (MEASURES[attribute].title or "").format(lag=f"{seen.lags[int(lag or 0)]:,}")
    colour = TRACED[attribute]
    rows: list[Spec] = []
    for memory in seen.memories:
        value = getattr(memory, attribute)
        points = None if value is None else _quantiles(value[:, :, int(lag)] if lag else value, seen.positions)
        label, note = {"memory": memory_label(memory.name)}, _note(memory, attribute, points)
        rows += [label | point for point in points or ()] + [label | {"note": note}] * bool(note)
    x = _field("x", "quantitative", title="token", axis=STEPS)
    y = {"title": None, "scale": {"zero": False}, "axis": {"tickCount": 4}}
    line = {"type": "line", "color": colour, "point": len(rows) <= 20 * len(seen.memories)}
    known = [{"filter": "isValid(datum.x)"}]
    layers: list[Spec] = [
        {
            "transform": known,
            "mark": {"type": "area", "opacity": 0.22, "color": colour},
            "encoding": {"x": x, "y": _field("low", "quantitative", **y), "y2": {"field": "high"}},
        },
        {"transform": known, "mark": line, "encoding": {"x": x, "y": _field("middle", "quantitative", **y)}},
        {
            "transform": [{"filter": "isValid(datum.note)"}],
            "mark": {"type": "text", "color": "#555555"},
            "encoding": {"x": {"value": PANEL[0] / 2}, "y": {"value": PANEL[1] / 2}, "text": {"field": "note"}},
        },
    ]
    row = _field("memory", "nominal", title=None, sort=None, header={"labels": first, "labelOrient": "left"})
    panel = {"width": PANEL[0], "height": PANEL[1], "layer": layers}
    head = {"text": title, "color": colour, "fontSize": 13}
    return {"title": head, "data": {"values": rows}, "facet": {"row": row}, "spec": panel}


def _quantiles(value: Tensor, positions: Sequence[int]) -> list[dict[str, float]]:
    """The 5 %, 50 % and 95 % quantiles of the finite values of ``[batch, heads, time]`` in each bin of tokens."""
    values = value.movedim(-1, 0).flatten(1).numpy()
    values = np.where(np.isfinite(values), values, np.nan)
    at = np.asarray(positions) if len(values) == len(positions) else np.arange(len(values))
    known = np.flatnonzero(~np.isnan(values).all(1))
    found = []
    for part in np.array_split(known, min(BINS, max(1, len(known)))):
        if len(part):
            low, middle, high = np.nanquantile(values[part], [0.05, 0.5, 0.95]).tolist()
            found.append({"x": float(at[part].mean()), "low": low, "middle": middle, "high": high})
    return found


def _note(memory: MemoryTrace, name: str, points: Sequence[Any] | None) -> str:
    """Why a panel is empty or random; else ""."""
    if points is None:
        return "not in this memory"
    if name in ("effective_rank", "update_angle") and not memory.wrote:
        return "nothing was written"
    return "" if points else "the text is too short"
