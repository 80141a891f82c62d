"""The charts, as they are sent to the browser and drawn."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_memory.eval.token_costs import TokenCosts
from atlas_memory.monitor.logs import ProbeRecord
from atlas_memory.viz import charts
from atlas_memory.viz.labels import COLOURS
from atlas_memory.viz.watched_runs import WatchedRun
from benchmarks.dashboard import made_run


def lines(chart: charts.Spec | None) -> dict[str, Any]:
    """What says how the curves of a chart are drawn."""
    assert chart is not None
    json.dumps(chart, allow_nan=False)
    return chart["layer"][-1]["layer"][-1]["encoding"]


def test_a_legend_has_only_runs_with_data_in_their_own_colours() -> None:
    chart = charts.curves({"a": [(1, None)], "b": [(1, 1.0)], "c": [(1, 1.0)]}, "x")
    assert lines(chart)["color"]["scale"] == {"domain": ["b", "c"], "range": [*COLOURS[1:3]]}
    assert charts.curves({"a": [(1, float("nan"))]}, "x") is None


@pytest.mark.parametrize(("value", "domain"), [(0.0, [0, 1]), (0.5, [0, 1.0]), (-2.0, [-4.0, 1])])
def test_a_curve_of_one_value_has_an_axis(value: float, domain: list[float]) -> None:
    assert lines(charts.curves({"run": [(1, value), (2, value)]}, "x"))["y"]["scale"]["domain"] == domain


def test_many_points_are_drawn_as_means_of_neighbours_and_their_range() -> None:
    chart = charts.curves({"run": [(step, step % 2) for step in range(3000)]}, "x")
    assert chart is not None and len(chart["data"]["values"]) == 300
    assert chart["data"]["values"][0] == {"series": "run", "x": 9, "value": 0.5, "low": 0.0, "high": 1.0}
    assert chart["data"]["values"][-1]["x"] == 2999


def probes(**measures: Any) -> list[ProbeRecord]:
    memory = {"name": "model.layers.0.mixer", "memory_contribution": None, "branch_ratio": 1, "recall_error": []}
    return [ProbeRecord.model_validate({"step": 1, "seconds": 0, "memories": [memory | measures]})]


def test_every_measure_of_a_probe_is_explained_and_drawn(tmp_path: Path) -> None:
    found = WatchedRun(made_run(tmp_path / "run", steps=100), "run").probes
    known = charts.measures(found)
    assert {"alpha", "alpha_spread", "half_life", "recall_error_256", "memory_contribution"} <= {*known}
    assert all(len(charts.described(name)[1]) > 40 for name in known)
    assert charts.described("recall_error_256")[0] == "error 256 tokens after the write"
    gate = found[-1].memories[1].alpha
    assert gate is not None
    for name, values in (("alpha", gate.mean), ("alpha_spread", gate.std)):
        rows = charts.heat_map(found, name)["data"]["values"]
        assert [row["value"] for row in rows if row["line"].startswith("layer 2")] == values


def test_what_is_not_finite_is_left_out_of_a_heat_map() -> None:
    odd = probes(norm=[1.0, float("inf"), float("nan")])
    known = charts.measures(odd)
    assert [row["value"] for row in charts.heat_map(odd, "norm")["data"]["values"]] == [1.0, None, None]
    assert [*known] == ["branch_ratio", "norm"]


def test_charts_are_drawn_without_a_browser(tmp_path: Path) -> None:
    """Of any names, with what has one point or none beside what has many."""
    cost = np.array([np.nan, 4.0, 4.0, 2.0, 1.0])
    reading = TokenCosts(list("abcbc"), cost, cost, None, None, np.array([-1, -1, -1, 1, 2]))
    drawn = [
        charts.curves({"_$x^2$ <b>": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]}, "a_$5^_to_$10"),
        charts.by_position({"run": [(64, 2.0, 1.9, 2.1), (100, 1.0, 1.0, 1.0)]}, None, 64, bands=True),
        charts.by_position({"run": [(64, 2.0)]}, None, 64),
        charts.along_text(reading),
    ]
    rows = [[chart] for chart in drawn if chart is not None]
    assert len(rows) == 4
    heat = charts.heat_map(probes(norm=[1.0]), "norm")
    charts.save(tmp_path / "all.png", *rows, [heat, heat], [])
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
