"""The picture of README: recall by distance, from the results of the study `recall`.

python -m benchmarks.learning.figure
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LINES = {"omeganet": "OmegaNet", "gated-deltanet": "Gated DeltaNet", "attention": "softmax attention"}
COLOURS = ["#3949ab", "#00897b", "#9e9e9e"]
DISTANCES = (128, 512, 1024, 4096)
DOCS = Path(__file__).parents[2] / "docs"


def chart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The Vega-Lite chart of the rows with heads of 16: the mean over seeds, and a band from the worst to the best."""
    points = []
    for row in rows:
        if row["candidate"] in LINES and row["dim"] == 16:
            for distance in DISTANCES:
                found = [seed[f"recall {distance}"] for seed in row["seeds"]]
                points.append(
                    {
                        "model": LINES[row["candidate"]],
                        "tokens": distance,
                        "recall": sum(found) / len(found),
                        "worst": min(found),
                        "best": max(found),
                    }
                )
    colour = {"field": "model", "type": "nominal", "scale": {"domain": [*LINES.values()], "range": COLOURS}}
    x = {"field": "tokens", "type": "quantitative", "scale": {"type": "log", "base": 2, "domain": [115, 4600]}}
    axis = {"values": DISTANCES, "title": "tokens of text (trained on 128)", "grid": False}
    y = {"type": "quantitative", "title": "facts recalled", "axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    last = [point for point in points if point["tokens"] == DISTANCES[-1]]
    label = {"type": "text", "align": "left", "dx": 9, "fontSize": 13, "fontWeight": 600}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 520,
        "height": 230,
        "padding": {"left": 5, "right": 12, "top": 8, "bottom": 5},
        "background": "white",
        "data": {"values": points},
        "encoding": {"x": x | {"axis": axis}, "color": colour | {"legend": None}},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.18},
                "encoding": {"y": y | {"field": "worst"}, "y2": {"field": "best"}},
            },
            {"mark": {"type": "line", "point": True, "strokeWidth": 2.5}, "encoding": {"y": y | {"field": "recall"}}},
            {
                "data": {"values": last},
                "mark": label,
                "encoding": {"y": y | {"field": "recall"}, "text": {"field": "model"}},
            },
        ],
        "config": {"view": {"stroke": None}, "axis": {"labelFontSize": 12, "titleFontSize": 13}},
    }


def main() -> None:
    """Write the picture."""
    import vl_convert

    rows = json.loads((DOCS / "results" / "data" / "recall.json").read_text(encoding="utf-8"))["rows"]
    (DOCS / "images" / "recall.png").write_bytes(vl_convert.vegalite_to_png(chart(rows), scale=2))


if __name__ == "__main__":
    main()
