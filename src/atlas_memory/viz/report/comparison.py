"""Reports of several runs on one page."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from matplotlib.ticker import FixedLocator

from atlas_memory.train.logs import LOG, MEMORY, read_log
from atlas_memory.train.runs import load_run
from atlas_memory.train.settings import flat_settings, in_bytes
from atlas_memory.viz.report.figures import canvas, labelled, plain_names, stroke, tidy
from atlas_memory.viz.report.folders import folder_for, place, written
from atlas_memory.viz.report.names import COLOURS
from atlas_memory.viz.report.page import cells, document, picture, table
from atlas_memory.viz.report.pictures import running_mean
from atlas_memory.viz.report.report import Told, write_report
from atlas_memory.viz.report.words import amount, legible


def write_comparison(
    folders: Sequence[str | Path],
    data: str | Path | None = None,
    streams: int = 16,
    sample_tokens: int = 400,
    column: str | None = None,
    told: Told = lambda what, share: None,
) -> Path:
    """Write the report of each run, as ``write_report`` does, and a folder ``comparison`` beside the runs (where they
    lie in no folder that can be written to, beside the first), with the page that compares them (of a text that
    ``data`` names, ``comparison-NAME``). ``told`` hears how far it is. Returns the page's path; ValueError if a run
    cannot be read or is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a run is named twice among {', '.join(map(str, folders))}")
    above, names = _beside(paths)
    for path in paths:
        load_run(path)  # which finds what is wrong with the last before the first is read
    reports = [
        write_report(path, data, streams, sample_tokens, column, _of(name, told))
        for path, name in zip(paths, names, strict=True)
    ]
    target = folder_for(above, "comparison", data)
    ends = [math.inf if report["steps"] is None else report["steps"] for report in reports]  # where models were saved

    def log_of(name: str) -> list[list[dict[str, Any]]]:
        return [[e for e in read_log(path, name) if e["step"] <= end] for path, end in zip(paths, ends, strict=True)]

    logs, looks = log_of(LOG), dict(zip(names, log_of(MEMORY), strict=True))
    settings = [flat_settings(path) | _rule(report) for path, report in zip(paths, reports, strict=True)]
    with written(target) as made, plain_names():
        has_logs = any(len(log) > 1 for log in logs)
        if has_logs:
            _losses(made / "loss.png", names, logs, all(map(in_bytes, paths)))
        _positions(made / "position.png", names, reports)
        has_looks = any(len([look for look in of_run if _known_shares(look)]) > 1 for of_run in looks.values())
        if has_looks:
            _shares(made / "share.png", looks)
        links = [os.path.relpath(Path(report["folder"]) / "report.html", target) for report in reports]
        page = _page(names, links, reports, list(looks.values()), settings, has_logs, has_looks)
        found = {"data": place(data), "runs": dict(zip(names, links, strict=True))}
        (made / "comparison.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (made / "comparison.html").write_text(page, encoding="utf-8")
    return target / "comparison.html"


def _of(name: str, told: Told) -> Told:
    """What says of which run it is what `told` is told."""
    return lambda what, share: told(f"{name}: {what}", share)


def _rule(report: dict[str, Any]) -> dict[str, Any]:
    """The setting ``model.rule`` of a run, which the preset decides where its settings do not name it."""
    return {"model.rule": report["rule"]} if report["rule"] else {}


def _beside(paths: Sequence[Path]) -> tuple[Path, list[str]]:
    """The folder of a comparison of these runs, and their names in it."""
    above = Path(os.path.commonpath([path.parent for path in paths]))
    names = [legible(path.relative_to(above)) for path in paths]
    usable = above != Path(above.anchor) and os.access(above, os.W_OK)
    return above if usable else paths[0].parent, names


def _losses(path: Path, names: Sequence[str], logs: Sequence[Sequence[dict[str, Any]]], of_bytes: bool) -> None:
    """The running mean of each run, in bits a byte where all read bytes."""
    figure = canvas(8, 4.4)
    axes = figure.subplots()
    for name, log, colour in zip(names, logs, COLOURS * len(names), strict=False):
        mean = running_mean([line["loss"] for line in log]) / (math.log(2) if of_bytes else 1)
        axes.plot([line["step"] for line in log], mean, color=colour, linewidth=1.8, label=labelled(name))
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
    for n, (name, report, colour) in enumerate(zip(names, reports, COLOURS * len(names), strict=False)):
        buckets = report["memory_on"]["by_position"]
        to = [bucket["to"] for bucket in buckets]
        ends.update(to)
        bits = [bucket["bits_per_byte"] for bucket in buckets]
        axes.plot(np.log2(to), bits, color=colour, label=labelled(name), **stroke(n))
    axes.xaxis.set_major_locator(FixedLocator([float(x) for x in np.log2(sorted(ends))]))
    axes.set_xticklabels([f"{end:,}" for end in sorted(ends)])
    axes.set(title="By position, each point up to the place named", xlabel="position in the stream (tokens)")
    axes.set(ylabel="bits per byte")
    axes.legend(frameon=False, fontsize=11, handlelength=4)
    tidy(axes)
    figure.savefig(path)


def _shares(path: Path, looks: dict[str, list[dict[str, Any]]]) -> None:
    """Of each run that was looked at, the share of the output that hangs on what was written: the mean over its
    memories, between the least and the largest."""
    figure = canvas(8, 4.4)
    axes = figure.subplots()
    for n, ((name, of_run), colour) in enumerate(zip(looks.items(), COLOURS * len(looks), strict=False)):
        known = [(look["step"], share) for look in of_run if (share := _known_shares(look))]
        if known:
            steps = [step for step, _ in known]
            axes.fill_between(
                steps,
                [min(share) for _, share in known],
                [max(share) for _, share in known],
                color=colour,
                alpha=0.15,
                lw=0,
            )
            means = [float(np.mean(share)) for _, share in known]
            axes.plot(steps, means, color=colour, label=labelled(name), **stroke(n))
    axes.set(title="Share of the output that hangs on what was written", xlabel="step", ylim=(-0.04, 1.04))
    axes.legend(frameon=False, fontsize=11, handlelength=4)
    tidy(axes)
    figure.savefig(path)


def _known_shares(look: dict[str, Any]) -> list[float]:
    shares = [memory["share"] for memory in look["memories"]]
    return [share for share in shares if share is not None and math.isfinite(share)]


def _page(
    names: Sequence[str],
    links: Sequence[str],
    reports: Sequence[dict[str, Any]],
    looks: Sequence[list[dict[str, Any]]],
    settings: Sequence[dict[str, Any]],
    has_logs: bool,
    has_looks: bool,
) -> str:
    heads = ["run", "block", "rule", "alarms", "memory's share", "bits a byte", "writing saves", "older tokens save"]
    heads += ["parameters", "steps"]
    rows = [_row(*each) for each in zip(names, links, reports, looks, strict=True)]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    differ = [key for key in keys if len({legible(each.get(key)) for each in settings}) > 1]
    others = [[key, *(legible(each.get(key, "")) for each in settings)] for key in differ]
    texts = {report["text_digest"] for report in reports}
    reads = dict.fromkeys(f"{report['text']}, {report['read']}" for report in reports)
    parts = [
        "<h1>Runs side by side</h1>",
        f'<p class="about">Read: {html.escape("; ".join(reads))}. Made {reports[-1]["date"]} on '
        f"{html.escape(reports[-1]['machine'])}.</p>",
        table(heads, rows),
        "<p>What writing saves, and what tokens beyond the training length save, are bits a byte with their standard "
        "errors over streams; the names lead to the reports. The memory's share: at the last look, how much of each "
        "layer's output hangs on what was written. Alarms: how many its last look still raises, and in brackets "
        "those that have ended; the reports say what to do.</p>",
        "<p>The runs were read on different texts: their bits a byte do not compare.</p>" if len(texts) > 1 else "",
        f"<h2>By position</h2>{picture('position.png', 'Bits a byte by position')}",
        f"<h2>Training</h2>{picture('loss.png', 'Training loss against steps')}" if has_logs else "",
        f"<h2>What hangs on the memories</h2>{picture('share.png', 'Share of the output against steps')}"
        "<p>The mean over the memories of a run, and shaded from the least of them to the largest.</p>"
        if has_looks
        else "",
        "<h2>Settings that differ</h2>",
        table(["setting", *names], [cells(*row) for row in others]),
    ]
    return document("Comparison", "".join(parts))


def _row(name: str, link: str, report: dict[str, Any], looks: list[dict[str, Any]]) -> str:
    margin, older = report["margin"], report["beyond_training_length"]
    share = sorted(_known_shares(looks[-1])) if looks else []
    linked = f'<td><a href="{html.escape(quote(os.fsencode(link)))}">{html.escape(name)}</a></td>'
    alarms = f"<td>{_alarms(report['alarms']) if looks else ''}</td>"
    figures = [
        " to ".join(dict.fromkeys(f"{end:.2f}" for end in share[:1] + share[-1:])),
        f"{report['memory_on']['bits_per_byte']:.4f}",
        "" if margin is None else amount(margin),
        "" if older is None else amount(older),
        f"{report['parameters']:,}",
        "" if report["steps"] is None else f"{report['steps']:,}",
    ]
    return linked + cells(report["block"], report["rule"] or "") + alarms + cells(*figures)


def _alarms(alarms: Sequence[dict[str, Any]]) -> str:
    """How many there are, in red, and how many there were."""
    now = sum(alarm["until"] is None for alarm in alarms)
    before = f" ({len(alarms) - now} before)" if len(alarms) > now else ""
    return f'<b class="raised">{now}</b>{before}' if now else f"0{before}"
