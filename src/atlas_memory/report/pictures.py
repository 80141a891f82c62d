"""The report's pictures, drawn from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from atlas_memory.evaluation.perplexity import Score

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A8A8A"
GATES = {  # name: (label, colour)
    "alpha": ("α  retention", BLUE),
    "eta": ("η  step size", ORANGE),
    "theta": ("θ  momentum", GREEN),
    "gamma": ("Σγ  tokens in window", PINK),
    "delta": ("δ  threshold", GREY),
}
_BINS = 96


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=11)
    for text, size in ((axes.xaxis.label, 12), (axes.yaxis.label, 12), (axes.title, 13)):
        text.set_fontsize(size)


def loss_curve(path: Path, steps: Sequence[float], loss: Sequence[float], unit: str) -> None:
    """Training loss against steps: each step faint, a running mean over a fiftieth of the run (at least ten
    steps) on top."""
    figure = _figure(8, 4.2)
    axes = figure.subplots()
    values = np.asarray(loss, dtype=float)
    width = max(10, len(values) // 50)
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - width, 0)
    mean = (total[end] - total[begin]) / (end - begin)
    axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, mean, color=BLUE, linewidth=2)
    axes.annotate(
        f"{mean[-1]:.2f}",
        (steps[-1], mean[-1]),
        (6, 0),
        textcoords="offset points",
        color=BLUE,
        fontsize=12,
        va="center",
    )
    axes.set(title="Training loss", xlabel="step", ylabel=unit, ylim=(0, None))
    axes.margins(x=0.01)
    _tidy(axes)
    figure.savefig(path)


def bits_by_position(path: Path, on: Score, off: Score, recent: Score, trained: int) -> None:
    """Bits per byte in each bucket of positions: memory on, writes off, and a memory of recent tokens only. Below,
    what writing saves and what older tokens save (with twice the standard error over streams). The training length
    is marked."""
    figure = _figure(8, 6.4)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    edges, x = on.edges, np.arange(len(on.edges) - 1)
    curves = [(on, BLUE, "memory on"), (recent, GREEN, f"last {trained:,} only"), (off, ORANGE, "writes off")]
    for score, colour, _ in reversed(curves):
        above.plot(x, score.by_position, color=colour, linewidth=2, marker="o", markersize=5)
    _label(
        above,
        [(f"{label} {score.by_position[-1]:.3f}", score.by_position[-1], colour) for score, colour, label in curves],
    )
    labels = []
    for score, colour, label in ((off, ORANGE, "by writing"), (recent, GREEN, "by older tokens")):
        saved, error = on.margin_by_position(score).T
        below.fill_between(x, saved - 2 * error, saved + 2 * error, color=colour, alpha=0.2, lw=0)
        below.plot(x, saved, color=colour, linewidth=2, marker="o", markersize=5)
        labels.append((f"{label} {saved[-1]:.3f}", saved[-1], colour))
    below.axhline(0, color=GREY, linewidth=1)
    _label(below, labels)
    if trained < edges[-1]:
        # Buckets are equally wide on this axis, and bucket j ends at j + 1/2.
        at = float(np.interp(trained, edges, np.arange(len(edges)) - 0.5))
        for axes in (above, below):
            axes.axvline(at, color=GREY, linestyle="--", linewidth=1.2)
        where = above.get_xaxis_transform()
        above.text(at, 1.01, "training length", color=GREY, fontsize=11, ha="center", transform=where)
    above.set_xlim(-0.5, len(x) + 0.9)
    below.xaxis.set_major_locator(FixedLocator([float(j) - 0.5 for j in range(len(edges))]))
    below.set_xticklabels([f"{edge:,}" for edge in edges])
    above.set(ylabel="bits per byte")
    above.set_title("Held-out text by position", pad=18)
    below.set(xlabel="position in the stream (tokens)", ylabel="saved\n(bits per byte)")
    for axes in (above, below):
        _tidy(axes)
        axes.spines["bottom"].set_bounds(-0.5, len(x) - 0.5)
    figure.savefig(path)


def _label(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Write (text, height, colour) to the right of the curves' ends, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    room = 0.075 * (high - low) * 6.4 / (axes.get_position().height * 10)
    heights: list[float] = []
    for text, height, colour in sorted(labels, key=lambda label: label[1]):
        heights.append(max(height, heights[-1] + room) if heights else height)
        axes.annotate(
            text,
            (len(axes.lines[0].get_xdata()) - 1, heights[-1]),  # type: ignore[arg-type]
            (10, 0),
            textcoords="offset points",
            color=colour,
            fontsize=12,
            va="center",
        )


def gates_over_time(path: Path, layers: Sequence[dict[str, torch.Tensor]], name: str) -> None:
    """A row for each layer, a column for each gate: the median over heads and tokens nearby, and the middle
    90%."""
    names = [gate for gate in GATES if any(gate in layer for layer in layers)]
    figure = _figure(3.6 * len(names) + 0.6, 2.1 * len(layers) + 0.9)
    panels: Any = figure.subplots(len(layers), len(names), squeeze=False, sharex=True, sharey="col")
    for row, layer in enumerate(layers):
        for column, gate in enumerate(names):
            axes = panels[row, column]
            label, colour = GATES[gate]
            if gate in layer:
                x, low, middle, high = _bands(layer[gate])
                axes.fill_between(x, low, high, color=colour, alpha=0.22, lw=0)
                axes.plot(x, middle, color=colour, linewidth=1.6)
            if row == 0:
                axes.set_title(label, color=colour)
            if row == len(layers) - 1:
                axes.set_xlabel("position (tokens)")
            if column == 0:
                axes.set_ylabel(f"layer {row + 1}")
            _tidy(axes)
    figure.suptitle(f"Gates while reading {name}: median and middle 90% over heads", fontsize=13)
    figure.savefig(path)


def _bands(gate: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bin centres and the 5%, 50% and 95% quantiles in each bin of positions; gate `[batch, heads, time,
    ...]`."""
    if gate.dim() == 4:  # gamma: how many tokens of the window count
        gate = gate.sum(3)
    values = gate.transpose(0, 2).flatten(1).numpy()
    parts = np.array_split(np.arange(len(values)), min(_BINS, len(values)))
    quantiles = np.array([np.quantile(values[part], [0.05, 0.5, 0.95]) for part in parts])
    return np.array([part.mean() for part in parts]), quantiles[:, 0], quantiles[:, 1], quantiles[:, 2]
