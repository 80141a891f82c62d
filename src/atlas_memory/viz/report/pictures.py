"""The report's pictures, drawn from plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter

from atlas_memory.eval.perplexity import Score
from atlas_memory.monitor import MemoryTrace
from atlas_memory.viz.report.figures import canvas, label_ends, stroke, tidy
from atlas_memory.viz.report.names import BLUE, GATES, GREEN, GREY, ORANGE, PINK, short
from atlas_memory.viz.report.words import decimals

_BINS = 96


def loss_curve(path: Path, steps: Sequence[float], loss: Sequence[float], unit: str) -> None:
    """Training loss against steps: each step faint, a running mean over a fiftieth of the run (at least ten
    steps) on top."""
    figure = canvas(8, 4.2)
    axes = figure.subplots()
    mean = running_mean(loss)
    axes.plot(steps, loss, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, mean, color=BLUE, linewidth=2)
    axes.set(title="Training loss", xlabel="step", ylabel=unit, ylim=(0, None))
    axes.margins(x=0.01)
    tidy(axes)
    label_ends(axes, [(f"{mean[-1]:.2f}", mean[-1], BLUE)], steps[-1])
    figure.savefig(path)


def running_mean(values: Sequence[float]) -> np.ndarray:
    """The mean of each value and those before it, over a fiftieth of all or ten."""
    width = max(10, len(values) // 50)
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(end - width, 0)
    return (total[end] - total[begin]) / (end - begin)


def bits_by_position(path: Path, on: Score, off: Score | None, recent: Score, trained: int, title: str) -> None:
    """Bits per byte in each bucket of positions: as the model reads, with a state of recent tokens only and, if it has
    memories, with their writes off. Below, what writing saves and what older tokens save (with twice the standard error
    over streams, where more than one is so long). The training length is marked."""
    figure = canvas(8, 6.4)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    edges, x = on.edges, np.arange(len(on.edges) - 1)
    curves = [(on, BLUE, "memory on" if off else "all before"), (recent, GREEN, f"last {trained:,} only")]
    curves += [(off, ORANGE, "writes off")] if off else []
    for n, (score, colour, _) in enumerate(curves):
        above.plot(x, score.by_position, color=colour, **stroke(n))
    savings = ([(off, ORANGE, "by writing")] if off else []) + [(recent, GREEN, "by older tokens")]
    labels = []
    for n, (score, colour, label) in enumerate(savings):
        saved, error = on.margin_by_position(score).T
        known = np.where(on.reached > 1, error, np.nan)
        below.fill_between(x, saved - 2 * known, saved + 2 * known, color=colour, alpha=0.2, lw=0)
        below.plot(x, saved, color=colour, **stroke(n))
        labels.append((f"{label} {decimals(saved[-1], known[-1])}", saved[-1], colour))
    below.axhline(0, color=GREY, linewidth=1, zorder=1)
    low, high = below.get_ylim()
    below.set_ylim(min(low, -1e-3), max(high, 1e-3))  # what rounding leaves is not to look like a saving
    if trained < edges[-1]:
        # Buckets are equally wide on this axis, and bucket j ends at j + 1/2.
        at = float(np.interp(trained, edges, np.arange(len(edges)) - 0.5))
        for axes in (above, below):
            axes.axvline(at, color=GREY, linestyle="--", linewidth=1.2)
        where = above.get_xaxis_transform()
        above.text(at, 1.01, "training length", color=GREY, fontsize=11, ha="center", transform=where)
    below.set_xlim(-0.5, len(x) - 0.5)
    below.xaxis.set_major_locator(FixedLocator([float(j) - 0.5 for j in range(len(edges))]))
    below.set_xticklabels([f"{edge:,}" for edge in edges])
    above.set(ylabel="bits per byte")
    above.set_title(title, pad=18)
    below.set(xlabel="position in the stream (tokens)", ylabel="saved\n(bits per byte)")
    for axes in (above, below):
        tidy(axes)
    ends = [(f"{label} {score.by_position[-1]:.3f}", score.by_position[-1], colour) for score, colour, label in curves]
    label_ends(above, ends, x[-1])
    label_ends(below, labels, x[-1])
    figure.savefig(path)


def gates_over_time(path: Path, memories: Sequence[MemoryTrace], name: str) -> None:
    """A row for each memory, a column for each gate: the median over heads and tokens nearby, and the middle 90%."""
    names = [gate for gate in GATES if any(getattr(memory, gate) is not None for memory in memories)]
    columns = [(gate, *GATES[gate]) for gate in names]
    values = [{gate: getattr(memory, gate) for gate in names} for memory in memories]
    _over_time(path, memories, columns, values, f"Gates while reading {name}")


def contents_over_time(path: Path, memories: Sequence[MemoryTrace], lags: Sequence[int], name: str) -> None:
    """A row for each memory: how wrong it is before a token is written and some tokens after, how far writing moves its
    answers, and how much of the layer's output hangs on what is written; medians and the middle 90%, as above."""
    columns = [("surprise", "error before the write", ORANGE)]
    columns += [(f"error {lag}", f"error {lag:,} tokens later", GREEN) for lag in lags]
    columns += [("written", "answers moved by writing", PINK), ("share", "share that hangs on it", BLUE)]
    values = []
    for memory in memories:
        found: dict[str, torch.Tensor | None] = {"surprise": memory.surprise, "written": memory.written}
        found |= {f"error {lag}": error for lag, error in zip(lags, memory.error.unbind(2), strict=True)}
        values.append(found | {"share": memory.share[:, None]})
    _over_time(path, memories, columns, values, f"What the memories hold while reading {name}")


def wrote_nothing(memory: MemoryTrace) -> bool:
    """Whether a memory is at the end as it was at the beginning, but for what rounding leaves."""
    return bool((memory.moved[..., -1] <= 1e-6 * memory.norm[..., -1]).all())


def geometry_over_time(path: Path, memories: Sequence[MemoryTrace], points: Sequence[int], name: str) -> None:
    """A row for each memory: in how many directions it differs after so many tokens, how far it is from M_0, and by
    how much its path bends from one piece of the text to the next."""
    columns = [
        ("rank", "effective rank of M", BLUE),
        ("moved", "distance from M_0, before reading", GREEN),
        ("turn", "bend of its path (degrees)", PINK),
    ]
    values = [{key: getattr(memory, key) for key, *_ in columns} for memory in memories]
    _over_time(path, memories, columns, values, f"The path of the memories while reading {name}", points)


def _over_time(
    path: Path,
    memories: Sequence[MemoryTrace],
    columns: Sequence[tuple[str, str, str]],
    values: Sequence[dict[str, torch.Tensor | None]],
    title: str,
    points: Sequence[int] | None = None,
) -> None:
    """Panels of (name, label, colour) by memory, of values ``[batch, heads, time]``, or of the values after so many
    tokens each, ``[batch, heads, points]``."""
    figure = canvas(3.6 * len(columns) + 0.6, 2.1 * len(memories) + 0.9)
    panels: Any = figure.subplots(len(memories), len(columns), squeeze=False, sharex=True, sharey="col")
    for row, (memory, found) in enumerate(zip(memories, values, strict=True)):
        for column, (name, label, colour) in enumerate(columns):
            axes, value = panels[row, column], found[name]
            note = _note(memory, name, value)
            if note:
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 2}
                at = {"ha": "center", "va": "center", "transform": axes.transAxes}
                axes.text(0.5, 0.5, note, fontsize=11, color="#555", bbox=paper, **at)
            if value is not None:
                x, low, middle, high = _bands(value)
                x = x if points is None else np.interp(x, np.arange(len(points)), points)
                axes.fill_between(x, low, high, color=colour, alpha=0.22, lw=0)
                axes.plot(x, middle, color=colour, linewidth=1.6, marker="o" if len(x) == 1 else "")
            if row == 0:
                axes.set_title(label, color=colour)
            if row == len(memories) - 1:
                axes.set_xlabel("position (tokens)")
            if column == 0:
                axes.set_ylabel(short(memory.name))
            tidy(axes)
    figure.suptitle(f"{title}: median and middle 90% over heads", fontsize=13)
    figure.savefig(path)


def _note(memory: MemoryTrace, name: str, value: torch.Tensor | None) -> str:
    """What has to be said in a panel: why it is empty, or that it shows what was not written."""
    if value is None:
        return "not in this memory"
    if bool(torch.isfinite(value).any()):
        return "nothing was written:\nas before reading" if name == "rank" and wrote_nothing(memory) else ""
    return "nothing was written" if name == "turn" and wrote_nothing(memory) else "the text is too short"


OVER_TRAINING = {  # name: (label, colours from, to; None: as they are)
    "half_life": ("half-life (tokens)", (1.0, 1e4)),
    "written": ("answers moved by writing", (0.0, 1.0)),
    "surprise": ("error before the write", (0.0, 1.0)),
    "rank": ("effective rank", None),
}


def over_training(path: Path, names: Sequence[str], looks: Sequence[dict[str, Any]]) -> None:
    """Of the lines of ``memory.jsonl``, which have all memories of these names: a row for each memory, a column for
    each figure, a line of a panel for each head over the steps; and below, the share of every layer's output that hangs
    on what was written."""
    steps = [look["step"] for look in looks]
    by_name = [{memory["name"]: memory for memory in look["memories"]} for look in looks]
    found = {name: [look[name] for look in by_name] for name in names}
    shown = {key: about for key, about in OVER_TRAINING.items() if any(of[-1].get(key) for of in found.values())}
    shown = shown or OVER_TRAINING
    figure = canvas(3.4 * len(shown) + 0.8, 1.5 * len(names) + 3.2)
    parts: Any = figure.subfigures(2, 1, height_ratios=(len(names), 1.6))  # of which each has its own margins
    panels: Any = parts[0].subplots(len(names), len(shown), squeeze=False)
    for row, memory_name in enumerate(names):
        for column, (name, (label, limits)) in enumerate(shown.items()):
            axes = panels[row, column]
            _heads_over_steps(axes, steps, found[memory_name], name, limits)
            if row == 0:
                axes.set_title(label, fontsize=12)
            if column == 0:
                axes.set_ylabel(f"{short(memory_name)}\nhead", fontsize=11)
    axes = parts[1].subplots()
    ends = []
    for i, (name, colour) in enumerate(zip(names, (BLUE, ORANGE, GREEN, PINK, GREY) * len(names), strict=False)):
        share = np.array([memory["share"] for memory in found[name]], dtype=float)
        axes.plot(steps, share, color=colour, **stroke(i))
        ends.append((short(name), float(np.clip(np.nan_to_num(share[-1]), 0.0, 1.0)), colour))
    axes.set(ylim=(-0.04, 1.04), xlabel="step", ylabel="share of the output\nthat hangs on it")
    tidy(axes)
    figure.suptitle("The memories over the steps of training", fontsize=13)
    label_ends(axes, ends, steps[-1])
    figure.savefig(path)


def _heads_over_steps(
    axes: Axes,
    steps: Sequence[int],
    looks: Sequence[dict[str, Any]],
    name: str,
    limits: tuple[float, float] | None,
) -> None:
    """A line for each head of a memory, coloured by one of its figures in every look; half-lives by their order."""
    each = [look.get(name) or [] for look in looks]
    heads = max(1, *map(len, each))
    values = np.array([of if len(of) == heads else [np.nan] * heads for of in each], dtype=float).T
    values[~np.isfinite(values)] = np.nan
    scale: dict[str, Any] = {}
    if limits is not None:
        scale = (
            {"norm": LogNorm(*limits, clip=True)}
            if name == "half_life"
            else dict(zip(("vmin", "vmax"), limits, strict=True))
        )
    # With one row, or one column, of centres matplotlib would draw cells of no height or width.
    rows = np.arange(len(values) + 1) + 0.5
    middles = [(a + b) / 2 for a, b in pairwise(steps)]
    first, last = (middles[0], middles[-1]) if middles else (steps[0] + 0.5, steps[0] - 0.5)
    columns = [2 * steps[0] - first, *middles, 2 * steps[-1] - last]
    picture = axes.pcolormesh(columns, rows, values, cmap="cividis", **scale)
    plain = StrMethodFormatter("{x:,.0f}") if name == "half_life" else None  # its own are mathematics: `plain_names`
    axes.figure.colorbar(picture, ax=axes, pad=0.02, format=plain)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))


def _bands(value: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bin centres and the 5%, 50% and 95% quantiles in each bin of positions, what is not a number left out;
    ``[batch, heads, time]``."""
    values = value.transpose(0, 2).flatten(1).numpy()
    known = np.flatnonzero(~np.isnan(values).all(1))
    parts = np.array_split(known, min(_BINS, max(1, len(known))))
    quantiles = np.array([np.nanquantile(values[part], [0.05, 0.5, 0.95]) for part in parts if len(part)])
    quantiles = quantiles.reshape(-1, 3)
    centres = np.array([part.mean() for part in parts if len(part)])
    return centres, quantiles[:, 0], quantiles[:, 1], quantiles[:, 2]
