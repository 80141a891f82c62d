"""Labels at the ends of curves."""

import numpy as np
import pytest

from atlas_memory.viz.report.figures import _apart, canvas, label_ends, labelled
from atlas_memory.viz.report.pictures import _heads_over_steps


@pytest.mark.parametrize("wanted", [[0.0, 0.0], [0.2, 0.5, 0.51, 0.9], [1.0, 1.0, 1.0], [0.5], [0.1, 0.1, 0.15, 0.95]])
def test_labels_have_room_and_stay_within_the_axes(wanted: list[float]) -> None:
    places = _apart(np.array(wanted), 0.1)
    assert (np.diff(places) > 0.1 - 1e-9).all() and places.min() >= 0 and places.max() <= 1 + 1e-9


def test_labels_stay_where_they_have_room_and_share_what_they_lack() -> None:
    assert _apart(np.array([0.2, 0.5, 0.9]), 0.1).tolist() == pytest.approx([0.2, 0.5, 0.9])
    assert _apart(np.array([0.5, 0.5, 0.9]), 0.1).tolist() == pytest.approx([0.45, 0.55, 0.9])


def test_labels_stand_beside_the_axes_and_within_the_figure() -> None:
    figure = canvas(8, 4)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 0])
    axes.plot([0, 1], [0, 1e-9])
    label_ends(axes, [("by writing 0.0000", 0.0, "k"), ("by older tokens 0.0010", 1e-9, "k")], 1)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not boxes[0].overlaps(boxes[1])
    for box in boxes:
        assert box.x0 > axes.get_window_extent().x1 and box.x1 < figure.bbox.x1


@pytest.mark.parametrize(("heads", "steps"), [(1, [10, 20, 40]), (1, [10]), (3, [10, 20])])
def test_heat_maps_of_one_head_or_one_look_are_seen(heads: int, steps: list[int]) -> None:
    axes = canvas(4, 2).subplots()
    _heads_over_steps(axes, steps, [{"norm": [1.0] * heads}] * len(steps), "norm", None)
    corners = axes.collections[0].get_coordinates()
    assert (np.diff(corners[:, :, 1], axis=0) == 1).all() and (np.diff(corners[:, :, 0], axis=1) >= 1).all()
    assert (corners[0, :-1, 0] < steps).all() and (steps < corners[0, 1:, 0]).all()
    assert [tick for tick in axes.get_yticks() if 0.5 < tick < heads + 0.5] == list(range(1, heads + 1))


def test_every_name_is_in_the_legend() -> None:
    axes = canvas(4, 3).subplots()
    for name in ("_small", "large"):
        axes.plot([0, 1], label=labelled(name))
    assert [text.get_text().strip() for text in axes.legend().get_texts()] == ["_small", "large"]
