"""Reports of several runs on one page."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator

from atlas_memory.report.names import COLOURS
from atlas_memory.report.page import document, table
from atlas_memory.report.pictures import canvas, running_mean, tidy
from atlas_memory.report.report import write_report
from atlas_memory.training.logs import read_log
from atlas_memory.training.settings import flat_settings, in_bytes


def write_comparison(
    folders: Sequence[str | Path], data: str | Path | None = None, streams: int = 16, sample_tokens: int = 400
) -> Path:
    """Write the report of each run, as ``write_report`` does, and a folder ``comparison`` beside the runs, with the
    page that compares them. Returns the page's path; ValueError if a run cannot be read or is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a run is named twice among {', '.join(map(str, folders))}")
    above = Path(os.path.commonpath([path.parent for path in paths]))
    names = [str(path.relative_to(above)) for path in paths]
    reports = [write_report(path, data, streams, sample_tokens) for path in paths]
    target = above / "comparison"
    target.mkdir(exist_ok=True)
    logs = [read_log(path) for path in paths]
    settings = [flat_settings(path) for path in paths]
    has_logs = any(len(log) > 1 for log in logs)
    if has_logs:
        _losses(target / "loss.png", names, logs, all(map(in_bytes, settings)))
    _positions(target / "position.png", names, reports)
    links = [os.path.relpath(Path(report["folder"]) / "report.html", target) for report in reports]
    page = _page(names, links, reports, settings, has_logs)
    (target / "comparison.html").write_text(page, encoding="utf-8")
    return target / "comparison.html"


def _losses(path: Path, names: Sequence[str], logs: Sequence[Sequence[dict[str, Any]]], of_bytes: bool) -> None:
    """The running mean of each run, in bits a byte where all read bytes."""
    figure = canvas(8, 4.4)
    axes = figure.subplots()
    for name, log, colour in zip(names, logs, COLOURS * len(names), strict=False):
        mean = running_mean([line["loss"] for line in log]) / (math.log(2) if of_bytes else 1)
        axes.plot([line["step"] for line in log], mean, color=colour, linewidth=1.8, label=name)
    axes.set(
        title="Training loss, running mean", xlabel="step", ylabel="bits per byte" if of_bytes else "nats per token"
    )
    axes.legend(frameon=False, fontsize=11)
    tidy(axes)
    figure.savefig(path)


def _positions(path: Path, names: Sequence[str], reports: Sequence[dict[str, Any]]) -> None:
    """Bits a byte against the place in the stream; buckets that double are equally wide."""
    figure = canvas(8, 4.4)
    axes = figure.subplots()
    ends: set[int] = set()
    for name, report, colour in zip(names, reports, COLOURS * len(names), strict=False):
        buckets = report["memory_on"]["by_position"]
        to = [bucket["to"] for bucket in buckets]
        ends.update(to)
        bits = [bucket["bits_per_byte"] for bucket in buckets]
        axes.plot(np.log2(to), bits, color=colour, linewidth=1.8, marker="o", markersize=5, label=name)
    axes.xaxis.set_major_locator(FixedLocator([float(x) for x in np.log2(sorted(ends))]))
    axes.set_xticklabels([f"{end:,}" for end in sorted(ends)])
    axes.set(title="By position, each point up to the place named", xlabel="position in the stream (tokens)")
    axes.set(ylabel="bits per byte")
    axes.legend(frameon=False, fontsize=11)
    tidy(axes)
    figure.savefig(path)


def _page(
    names: Sequence[str],
    links: Sequence[str],
    reports: Sequence[dict[str, Any]],
    settings: Sequence[dict[str, Any]],
    has_logs: bool,
) -> str:
    heads = ["run", "block", "rule", "parameters", "steps", "bits a byte", "writing saves", "older tokens save"]
    rows = [_row(name, link, report) for name, link, report in zip(names, links, reports, strict=True)]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    differ = [key for key in keys if len({str(each.get(key)) for each in settings}) > 1]
    others = [[key, *(str(each.get(key, "")) for each in settings)] for key in differ]
    texts = dict.fromkeys(report["text"] for report in reports)
    parts = [
        "<h1>Runs side by side</h1>",
        f'<p class="about">Read: {html.escape("; ".join(texts))}. Made {reports[-1]["date"]} on '
        f"{html.escape(reports[-1]['machine'])}.</p>",
        table(heads, rows),
        "<p>What writing saves, and what tokens beyond the training length save, are bits a byte with their standard "
        "errors over streams; the names lead to the reports.</p>",
        "<p>The runs were read on different texts: their bits a byte do not compare.</p>" if len(texts) > 1 else "",
        '<h2>By position</h2><img src="position.png" alt="Bits a byte by position">',
        '<h2>Training</h2><img src="loss.png" alt="Training loss against steps">' if has_logs else "",
        "<h2>Settings that differ</h2>",
        table(["setting", *names], ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in others]),
    ]
    return document("Comparison", "".join(parts))


def _row(name: str, link: str, report: dict[str, Any]) -> str:
    def saved(margin: dict[str, float] | None) -> str:
        return "" if margin is None else f"{margin['bits_per_byte']:.4f} ± {margin['standard_error']:.4f}"

    cells = [
        f'<a href="{html.escape(link)}">{html.escape(name)}</a>',
        html.escape(str(report["block"])),
        html.escape(str(report["rule"] or "")),
        f"{report['parameters']:,}",
        "" if report["steps"] is None else f"{report['steps']:,}",
        f"{report['memory_on']['bits_per_byte']:.4f}",
        saved(report["margin"]),
        saved(report["beyond_training_length"]),
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)
