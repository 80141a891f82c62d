"""The charts, as they are sent to the browser."""

from pathlib import Path
from typing import Any

import pytest

from atlas_memory.viz.dashboard import charts
from atlas_memory.viz.dashboard.figures import MEASURES
from atlas_memory.viz.dashboard.runs import Watched
from atlas_memory.viz.report.names import COLOURS
from benchmarks.dashboard import made_run


def test_a_legend_has_only_runs_with_data_in_their_own_colours(tmp_path: Path) -> None:
    runs = [Watched(made_run(tmp_path / name, steps=4), name) for name in ("a", "b", "c")]
    chart = charts.curves(runs, "x", lambda run: [(1, None if run.name == "a" else 1.0)])
    assert chart is not None
    assert chart["encoding"]["color"]["scale"] == {"domain": ["b", "c"], "range": [*COLOURS[1:3]]}
    assert charts.curves(runs, "x", lambda run: [(1, float("nan"))]) is None


@pytest.mark.parametrize(("value", "domain"), [(0.0, [0, 1]), (0.5, [0, 1.0]), (-2.0, [-4.0, 1])])
def test_a_curve_of_one_value_has_an_axis(tmp_path: Path, value: float, domain: list[float]) -> None:
    run = Watched(made_run(tmp_path / "run", steps=2), "run")
    chart = charts.curves([run], "x", lambda _: [(1, value), (2, value)])
    assert chart is not None and chart["encoding"]["y"]["scale"]["domain"] == domain


def look(**figures: Any) -> list[dict[str, Any]]:
    return [
        {"step": 1, "memories": [{"name": "model.layers.0.mixer", "share": None, "branch": 1, "error": []} | figures]}
    ]


def test_every_figure_of_a_look_is_explained_and_drawn(tmp_path: Path) -> None:
    looks = Watched(made_run(tmp_path / "run", steps=100), "run").looks
    known = charts.measures(looks)
    assert {"alpha", "alpha, spread", "half_life", "error 256", "share"} <= {*known}
    assert all(len(figure.says) > 40 for figure in MEASURES.values())
    memory = looks[-1]["memories"][1]
    for name, kind in (("alpha", "mean"), ("alpha, spread", "std")):
        rows = charts.heads_over_steps(looks, name)["data"]["values"]
        shown = [row["value"] for row in rows if row["line"].startswith("layer 2")]
        assert shown == memory["alpha"][kind]


def test_what_is_not_finite_is_left_out_of_a_heat_map() -> None:
    looks = look(norm=[1.0, float("inf"), float("nan")])
    assert [row["value"] for row in charts.heads_over_steps(looks, "norm")["data"]["values"]] == [1.0, None, None]
    assert charts.measures(looks) == ["branch", "norm"]
