"""The charts of reports and of the dashboard, as Vega-Lite specifications: a browser draws them, or `save` does, which
needs neither a browser nor a network. They are written out, since Altair checks ten runs' rows for five seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atlas_memory.monitor.logs import GATES, MemoryRecord, ProbeRecord
from atlas_memory.viz.labels import BLUE, COLOURS, GREEN, GREY, ORANGE, PINK, decimals, memory_label

if TYPE_CHECKING:  # which load torch
    from atlas_memory.eval.perplexity import Score
    from atlas_memory.eval.token_costs import TokenCosts
    from atlas_memory.monitor import MemoryTrace

Spec = dict[str, Any]
POINTS, PROBES, ROWS, COLUMNS, BINS = 1000, 60, 64, 3, 96  # at most: of all curves, of heat maps, a legend, a panel
ROW, AROUND = 15, 84  # pixels of a heat map's line, and of what is above and below: Streamlit fits all into a height
STYLE: Spec = {  # Streamlit's own leaves half of the height empty
    "font": "Source Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#E8E8E8", "domain": False, "tickColor": "#CCCCCC", "labelColor": "#555555"},
    "title": {"fontSize": 15, "anchor": "start", "offset": 6},
    "legend": {"labelFontSize": 12, "orient": "top", "offset": 4, "title": None, "labelLimit": 300},
}
STEPS: Spec = {  # every number with a prefix of its own; phones are narrow
    "labelExpr": "format(datum.value, '~s')",
    "tickMinStep": 1,
    "labelOverlap": True,
    "labelSeparation": 8,
}
END = "length(datum.label) > 15 ? '\u2026' + slice(datum.label, -14) : datum.label"  # of long names, where they differ
Points = Iterable[tuple[float, float | None] | tuple[float, float | None, float, float]]
"""(x, value), or (x, value, low, high) with the ends of a band."""


def _chart(title: str | Spec | None, height: int, **rest: Any) -> Spec:
    head = {} if title is None else {"title": title}
    return head | {"height": height, "padding": {"left": 0, "right": 8, "top": 4, "bottom": 12}, "config": STYLE} | rest


def _field(name: str, kind: str, **rest: Any) -> Spec:
    return {"field": name, "type": kind} | rest


def save(path: Path, *rows: Sequence[Spec], width: int = 640) -> None:
    """Draw rows of charts, one below the other, as a PNG; charts that share a row share its width."""
    import vl_convert

    def within(chart: Spec, beside: int) -> Spec:
        return {"width": width // beside} | {key: chart[key] for key in chart.keys() - {"config", "padding"}}

    apart = {"resolve": {"scale": {"color": "independent", "strokeDash": "independent"}}}
    lines = [{"hconcat": [within(chart, len(row)) for chart in row]} | apart for row in rows]
    stacked = {"vconcat": lines, "config": STYLE, "background": "white", "padding": 12} | apart
    path.write_bytes(vl_convert.vegalite_to_png(stacked, scale=2))


def curves(
    series: Mapping[str, Points],
    title: str | None,
    *,
    colours: Sequence[str] = COLOURS,
    x: Spec | None = None,
    unit: str | None = None,
    dashed: bool = False,
    under: Sequence[Spec] = (),
) -> Spec | None:
    """A curve for each series, of means of neighbours where points are many, over the range of those where the series
    is the only one; None where there is nothing.

    `x`: the axis, of steps unless given; `unit`: of y; `dashed`: all but the first, so that those on top of each other
    are seen; `under`: layers to draw first.
    """
    most = max(60, min(300, POINTS // max(1, len(series))))
    rows = [
        {"series": name, "x": at, "value": value, "low": low, "high": high}
        for name, points in series.items()
        for at, value, low, high in _thinned(points, most, bands=len(series) == 1)
    ]
    if not rows:
        return None
    found = {row["series"] for row in rows}
    shown = {name: colours[i % len(colours)] for i, name in enumerate(series) if name in found}
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    limits = {"zero": False} if low < high else {"domain": [min(0, 2 * low), max(0, 2 * high) or 1]}  # for one value
    legend = {"columns": COLUMNS, "symbolType": "stroke"} | ({"labelExpr": END} if len(series) > COLUMNS else {})
    across = _field("x", "quantitative", **({"title": "step", "axis": STEPS} if x is None else x))
    colour = _field("series", "nominal", scale=_colours(shown), legend=legend if len(shown) > 1 else None)
    up = _field("value", "quantitative", title=unit, scale=limits, axis={"format": "~g"})
    tooltip = [
        _field("series", "nominal"),
        _field("x", "quantitative", format=",.0f", title=across["title"]),
        _field("value", "quantitative", format=".4~g", title=title or unit),
    ]
    line: Spec = {"x": across, "y": up, "color": colour, "tooltip": tooltip}
    if dashed:
        order = [[1, 0], *([[4 + n, 5] for n in range(1, len(shown))])]
        line["strokeDash"] = _field("series", "nominal", scale={"domain": list(shown), "range": order}, legend=None)
    layers = [
        *under,
        {"mark": {"type": "line", "point": len(rows) <= 20 * len(series), "clip": True}, "encoding": line},
    ]
    if any(row["low"] < row["high"] for row in rows):
        band = {"x": across, "y": up | {"field": "low"}, "y2": {"field": "high"}, "color": colour}
        layers.insert(0, {"mark": {"type": "area", "opacity": 0.2, "clip": True}, "encoding": band})
    height = 240 + (18 * -(-len(shown) // COLUMNS) if len(shown) > 1 else 0)
    independent = {"scale": {"color": "independent"}} if under else {}
    return _chart(title, height, data={"values": rows}, layer=layers, resolve=independent)


def _thinned(points: Points, most: int, bands: bool) -> Iterable[tuple[float, float, float, float]]:
    """At most so many points, each the mean of neighbours with the least and the largest of them, if `bands`."""
    known = [(p[0], p[1], *(p[2:] or (p[1], p[1]))) for p in points if p[1] is not None and math.isfinite(p[1])]
    if len(known) <= most:
        yield from known  # type: ignore[misc]
        return
    for part in np.array_split(np.array(known, dtype=float), most):
        value = float(part[:, 1].mean())
        yield (
            int(part[-1, 0]),
            value,
            *((float(part[:, 2].min()), float(part[:, 3].max())) if bands else (value, value)),
        )


def _colours(of: Mapping[str, str]) -> Spec:
    return {"domain": list(of), "range": list(of.values())}


def contributions(probes: Sequence[ProbeRecord]) -> Points:
    """The mean memory contribution of each probe, between the least and the largest of its memories."""
    for probe in probes:
        known = probe.contributions
        if known:
            yield probe.step, sum(known) / len(known), min(known), max(known)


FIELDS = {name: about for name, about in MemoryRecord.model_fields.items() if about.title}
"""The measures of a memory, with titles and descriptions."""


class Measure(NamedTuple):
    """A measure of a memory in a probe: what it is called and means, the values between which its colours change, and
    in which field of ``MemoryRecord`` it is: which list, or which attribute of the gate."""

    title: str
    description: str
    limits: tuple[float, float] | None
    field: str
    part: int | str | None = None

    def values(self, memory: MemoryRecord) -> list[float | None] | None:
        """By head, None for what is not finite; None where the memory lacks it."""
        value: Any = getattr(memory, self.field)
        if isinstance(self.part, str):
            value = getattr(value, self.part, None)
        elif self.part is not None:
            value = value[self.part] if self.part < len(value) else None
        if value is None:
            return None
        return [
            x if x is not None and math.isfinite(x) else None for x in (value if isinstance(value, list) else [value])
        ]


def measures(probes: Sequence[ProbeRecord]) -> dict[str, Measure]:
    """What the memories have in the last probe: each of ``FIELDS``, and the spread of each gate."""
    found: dict[str, Measure] = {}
    for name, about in FIELDS.items():
        extra: Any = about.json_schema_extra
        of = Measure(about.title or "", about.description or "", extra["limits"], name)
        if name == "recall_error":
            lags = probes[-1].lags if probes else []
            found |= {
                f"{name}_{lag}": of._replace(title=of.title.format(lag=lag), part=i) for i, lag in enumerate(lags)
            }
        elif name in GATES:
            found[name] = of._replace(part="mean")
            says = f"Standard deviation over tokens of {of.title}. 0: the gate is the same at every token."
            found[f"{name}_spread"] = Measure(f"{of.title}, spread", says, None, name, "std")
        else:
            found[name] = of
    known = [memory for probe in probes[-1:] for memory in probe.memories]
    return {name: of for name, of in found.items() if any(of.values(memory) is not None for memory in known)}


def heat_map(probes: Sequence[ProbeRecord], measure: Measure) -> Spec:
    """A heat map of one measure: a column for each probe, a line for each head of each memory; for each memory, the
    mean over its heads, where there would be more than ``ROWS`` lines."""
    lines = _lines(probes, measure)
    rows = [{"line": line, "step": step, "value": value} for line, of in lines.items() for step, value in of.items()]
    log = measure.limits is not None and measure.limits[0] > 0
    scale: Spec = {"scheme": "cividis", "clamp": True, "type": "log" if log else "linear"}
    scale |= {} if measure.limits is None else {"domain": list(measure.limits)}
    tall = max(90, ROW * len(lines))
    legend = {"orient": "right", "gradientThickness": 10, "gradientLength": min(120, tall - 20), "tickCount": 4}
    axis = {"labelAngle": 0, "labelOverlap": True, "labelSeparation": 8, "format": ","}
    y = {"title": None, "sort": list(lines), "axis": {"labelLimit": 120, "labelOverlap": False}}
    encoding = {
        "x": _field("step", "ordinal", title="step", axis=axis),
        "y": _field("line", "nominal", **y),
        "color": _field("value", "quantitative", scale=scale, legend=legend | {"format": "~s" if log else ".3~g"}),
        "tooltip": [
            _field("line", "nominal"),
            _field("step", "ordinal"),
            _field("value", "quantitative", format=".4~g", title=measure.title),
        ],
    }
    return _chart(measure.title, tall + AROUND, data={"values": rows}, mark="rect", encoding=encoding)


def _lines(probes: Sequence[ProbeRecord], measure: Measure) -> dict[str, dict[int, float | None]]:
    """The lines of a heat map from above, each with its value by step."""
    shown = probes[:: -(-len(probes) // PROBES)]
    shown = shown if shown[-1] is probes[-1] else [*shown, probes[-1]]
    heads = sum(len(measure.values(memory) or []) for memory in probes[-1].memories)
    found: dict[str, dict[int, float | None]] = {}
    for probe in shown:
        for memory in probe.memories:
            values, name = measure.values(memory) or [], memory_label(memory.name)
            if heads > ROWS:
                known = [value for value in values if value is not None]
                values = [sum(known) / len(known) if known else None]
            for head, value in enumerate(values, 1):
                found.setdefault(f"{name}, head {head}" if len(values) > 1 else name, {})[probe.step] = value
    return found


def by_position(
    series: Mapping[str, Points], title: str | None, unit: str, trained: int | None, **rest: Any
) -> Spec | None:
    """Curves over positions in a stream, each point at the end of its bucket; buckets double, and are equally wide. The
    length of training is marked."""
    series = {name: list(points) for name, points in series.items()}
    ends = sorted({int(point[0]) for points in series.values() for point in points})
    x = {
        "title": "position in the stream (tokens, up to)",
        "scale": {"type": "log", "base": 2, "domain": [min(ends) / 1.2, max(ends) * 1.1], "nice": False},
        "axis": {"values": ends, "format": ",", "labelOverlap": True},
    }
    under: list[Spec] = []
    if trained is not None and ends[0] / 1.2 < trained < ends[-1]:
        at = {"x": _field("x", "quantitative", **x)}
        of = {"data": {"values": [{"x": trained, "text": "training length"}]}}
        label = {"type": "text", "align": "left", "dx": 4, "y": 6, "color": GREY}
        under += [of | {"mark": {"type": "rule", "color": GREY, "strokeDash": [4, 3]}, "encoding": at}]
        under += [of | {"mark": label, "encoding": at | {"text": {"field": "text"}}}]
    return curves(series, title, x=x, unit=unit, dashed=True, under=under, **rest)


def bits_by_position(on: Score, off: Score | None, recent: Score, trained: int, title: str) -> list[Spec | None]:
    """Bits per byte in each bucket of positions as the model reads, with a memory of the last tokens only and, if it
    has memories, with their writes off; and what writing and older tokens save, within twice the standard error over
    streams where there is more than one. Legends have the last values."""
    found = {"memory on" if off else "full context": (on, BLUE), f"last {trained:,} tokens only": (recent, GREEN)}
    found |= {"writes off": (off, ORANGE)} if off else {}
    saved = ({"by writing": (off, ORANGE)} if off else {}) | {"by older tokens": (recent, GREEN)}
    ends = on.edges[1:]
    costs = {
        f"{name} {of.by_position[-1]:.3f}": list(zip(ends, map(float, of.by_position), strict=True))
        for name, (of, _) in found.items()
    }
    savings: dict[str, Points] = {}
    for name, (of, _) in saved.items():
        value, error = on.margin_by_position(of).T
        known = np.where(on.reached > 1, 2 * error, 0.0)
        label = f"{name} {decimals(value[-1], float(error[-1]) if on.reached[-1] > 1 else None)}"
        rows = np.stack([ends, value, value - known, value + known], 1).tolist()
        savings[label] = [(row[0], row[1], row[2], row[3]) for row in rows]
    return [
        by_position(costs, title, "bits per byte", trained, colours=[c for _, c in found.values()]),
        by_position(savings, "Saved", "bits per byte", trained, colours=[c for _, c in saved.values()]),
    ]


def along_text(reading: TokenCosts) -> Spec | None:
    """Bits of each token along a text, and what writing and older tokens saved; passages that are read again, and where
    they stood first, are shaded."""
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
    series = {name: list(enumerate(values.tolist())) for name, (values, _) in known.items()}
    colours = [colour for _, colour in known.values()]
    return curves(series, None, colours=colours, x=x, unit="bits per token", under=[shaded] if shades else [])


def _stretches(places: np.ndarray) -> list[tuple[int, int]]:
    """Where ascending whole numbers begin and end to follow one another."""
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def trace_panels(
    memories: Sequence[MemoryTrace], columns: Mapping[str, tuple[str, str]], positions: Sequence[int] | None = None
) -> list[list[Spec]]:
    """A row for each memory, a column for each measure (the attribute, or ATTRIBUTE/I for that of lag I: title and
    colour): the median over heads and neighbouring tokens, and the middle 90 %. Measures of the matrices are taken at
    `positions`."""
    found = [{name: _quantiles(memory, name, positions) for name in columns} for memory in memories]
    rows = []
    for memory, of in zip(memories, found, strict=True):
        row = []
        for n, (name, (title, colour)) in enumerate(columns.items()):
            ends = [end for each in found for point in each[name] or () for end in (point["low"], point["high"])]
            scale = (
                {"domain": [min(ends), max(ends)], "nice": True} if ends and min(ends) < max(ends) else {"zero": False}
            )
            side = memory_label(memory.name) if n == 0 else None
            x = _field("x", "quantitative", title="token" if memory is memories[-1] else None, axis=STEPS)
            y = {"title": side, "scale": scale, "axis": {"tickCount": 4, "format": "~g"}}
            low, middle = _field("low", "quantitative", **y), _field("middle", "quantitative", **y)
            line = {"type": "line", "color": colour, "point": len(of[name] or ()) == 1}
            note = {"text": {"value": _note(memory, name, of[name])}}
            layers: list[Spec] = [
                {
                    "mark": {"type": "area", "opacity": 0.22, "color": colour},
                    "encoding": {"x": x, "y": low, "y2": {"field": "high"}},
                },
                {"mark": line, "encoding": {"x": x, "y": middle}},
                {"data": {"values": [{}]}, "mark": {"type": "text", "color": "#555"}, "encoding": note},
            ]
            head = {"text": title, "color": colour, "fontSize": 13} if memory is memories[0] else None
            row.append(_chart(head, 120, data={"values": of[name] or []}, layer=layers))
        rows.append(row)
    return rows


def _quantiles(memory: MemoryTrace, name: str, positions: Sequence[int] | None) -> list[dict[str, float]] | None:
    """The 5 %, 50 % and 95 % quantiles of a measure in each bin of positions, what is not finite left out; None where
    the memory lacks it."""
    attribute, _, lag = name.partition("/")
    value = getattr(memory, attribute)
    if value is None:
        return None
    value = value[:, :, int(lag)] if lag else value  # [batch, heads, time], or [batch, time]
    values = value.movedim(-1, 0).flatten(1).numpy()
    values = np.where(np.isfinite(values), values, np.nan)
    known = np.flatnonzero(~np.isnan(values).all(1))
    found = []
    for part in np.array_split(known, min(BINS, max(1, len(known)))):
        if len(part):
            low, middle, high = np.nanquantile(values[part], [0.05, 0.5, 0.95]).tolist()
            x = part.mean() if positions is None else np.asarray(positions)[part].mean()
            found.append({"x": float(x), "low": low, "middle": middle, "high": high})
    return found


def _note(memory: MemoryTrace, name: str, points: Sequence[Any] | None) -> str:
    """Why a panel is empty, or shows what was not written; else ""."""
    if points is None:
        return "not in this memory"
    if points:
        return "nothing was written" if name == "effective_rank" and not memory.wrote else ""
    return "nothing was written" if name == "update_angle" and not memory.wrote else "the text is too short"
