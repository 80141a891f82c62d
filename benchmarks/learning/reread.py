"""What a memory saves on passages that it has read, by how long ago: against an empty memory and against one that has
read another book.

python -m benchmarks.learning.reread RUN BOOK OTHER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_memory.data.tokenization import bytes_per_token, encode
from atlas_memory.eval.perplexity import token_nats
from atlas_memory.models import Memory
from atlas_memory.train.run_model import Run, load_run
from benchmarks.machine import describe, now

from .figure import COLOURS, DOCS

PASSAGE, STOPS = 128, 32
"""Tokens of a passage, and places of the book at which passages are read again."""
DISTANCES = (0, 256, 1024, 4096, 16_384, 65_536)
"""Tokens between a passage and the place at which it is read again."""
AHEAD = 4096
"""The control: a passage so many tokens ahead, which has not been read."""


def bits(run: Run, memory: Memory, passages: torch.Tensor) -> np.ndarray:
    """Bits of each passage `[rows, tokens]` behind what was read, `[rows]`."""
    tokens = torch.cat([torch.full((len(passages), 1), memory.last_token), passages], 1)
    cache = memory.cache()
    cache.batch_repeat_interleave(len(passages))
    with torch.inference_mode():
        return token_nats(run.model, tokens, cache=cache).sum(1) / math.log(2)


def measure(run: Run, book: str, other: str) -> dict[str, Any]:
    """Bits per byte saved at each distance, and ahead: means over `STOPS` places, and standard errors."""
    ids = torch.from_numpy(encode(run.tokenizer, book).astype(np.int64))[None]
    sizes = torch.from_numpy(bytes_per_token(run.tokenizer, book))
    first, last = DISTANCES[-1] + PASSAGE, ids.shape[1] - AHEAD - PASSAGE
    if last <= first:
        raise ValueError(f"the book has {ids.shape[1]:,} tokens, and more than {first + AHEAD + PASSAGE:,} are needed")
    empty, foreign = Memory.empty(run.model), run.model.read(other, run.tokenizer)
    memory, read, saved = empty, 0, []
    for stop in np.linspace(first, last, STOPS).astype(int).tolist():
        memory, read = run.model.read(ids[:, read:stop], memory=memory), stop
        begins = [stop - distance - PASSAGE for distance in DISTANCES] + [stop + AHEAD]
        passages = torch.cat([ids[:, begin : begin + PASSAGE] for begin in begins])
        counts = np.array([int(sizes[begin : begin + PASSAGE].sum()) for begin in begins])
        own = bits(run, memory, passages)
        saved.append([(bits(run, before, passages) - own) / counts for before in (empty, foreign)])
        print(f"{stop:,} of {ids.shape[1]:,} tokens", file=sys.stderr, flush=True)
    found = np.array(saved)  # [stops, against, distances]
    mean, error = found.mean(0), found.std(0, ddof=1) / math.sqrt(len(found))
    rows = [
        {"distance": distance, "against": name, "saved": float(mean[i, j]), "error": float(error[i, j])}
        for i, name in enumerate(("an empty memory", "a memory of another book"))
        for j, distance in enumerate([*DISTANCES, None])
    ]
    return {"rows": rows, "tokens": ids.shape[1], "bytes": len(book.encode()), "state_bytes": memory.nbytes}


def chart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The Vega-Lite chart: a line each with its standard errors, and dashed the passage that was not read."""
    points = [
        row | {"at": max(64, row["distance"]), "low": row["saved"] - row["error"], "high": row["saved"] + row["error"]}
        for row in rows
        if row["distance"] is not None
    ]
    ahead = [row for row in rows if row["distance"] is None]
    names = list(dict.fromkeys(row["against"] for row in rows))
    colour = {"field": "against", "type": "nominal", "scale": {"domain": names, "range": COLOURS}}
    ticks = [64, *DISTANCES[1:]]
    axis = {"values": ticks, "title": "tokens read since the passage", "grid": False}
    axis["labelExpr"] = "datum.value == 64 ? 'none' : format(datum.value, ',')"
    scale = {"type": "log", "base": 2, "domain": [56, 80_000]}
    x = {"field": "at", "type": "quantitative", "scale": scale, "axis": axis}
    y = {"type": "quantitative", "title": "bits per byte saved"}
    legend = {"orient": "top-right", "title": "saved against", "labelLimit": 300}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": 520,
        "height": 230,
        "padding": {"left": 5, "right": 12, "top": 8, "bottom": 5},
        "background": "white",
        "encoding": {"color": colour | {"legend": legend}},
        "layer": [
            {
                "data": {"values": points},
                "mark": {"type": "area", "opacity": 0.18},
                "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": points},
                "mark": {"type": "line", "point": True, "strokeWidth": 2.5},
                "encoding": {"x": x, "y": y | {"field": "saved"}},
            },
            {
                "data": {"values": ahead},
                "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5},
                "encoding": {"y": y | {"field": "saved"}},
            },
        ],
        "config": {"view": {"stroke": None}, "axis": {"labelFontSize": 12, "titleFontSize": 13}},
    }


def main(run: str, book: str, other: str) -> None:
    """Write docs/results/reread.json and the picture."""
    import vl_convert

    torch.set_num_threads(1)
    texts = [Path(path).read_text(encoding="utf-8") for path in (book, other)]
    made = {"books": [Path(path).name for path in (book, other)], "machine": describe(), "made": now()}
    found = measure(load_run(run), *texts) | made
    (DOCS / "results" / "reread.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (DOCS / "images" / "reread.png").write_bytes(vl_convert.vegalite_to_png(chart(found["rows"]), scale=2))
    for row in found["rows"]:
        where = "not read" if row["distance"] is None else f"{row['distance']:,} tokens ago"
        print(f"{where}, against {row['against']}: {row['saved']:.3f} +- {row['error']:.3f} bits per byte")


if __name__ == "__main__":
    main(*sys.argv[1:])
