"""Reports of several runs on one page."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atlas_memory.monitor.logs import LOG, MEMORY, ProbeRecord, read_log
from atlas_memory.train.run_folder import flat_settings, has_byte_tokens
from atlas_memory.train.run_model import load_run
from atlas_memory.viz import charts
from atlas_memory.viz.folders import common_folder, identity, report_folder, written
from atlas_memory.viz.labels import amount, differing, loss_unit
from atlas_memory.viz.report import Progress, no_progress, write_report
from atlas_memory.viz.token_page import render


def write_comparison(
    folders: Sequence[str | Path],
    data: str | Path | None = None,
    streams: int = 16,
    sample_tokens: int = 400,
    column: str | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the report of each run, as ``write_report`` does, and a folder ``comparison`` beside the runs (where their
    common folder cannot be written to, beside the first), with the page that compares them (of a text that ``data``
    names, ``comparison-NAME``). ``progress`` is called meanwhile. Returns the page's path; ValueError if a run cannot
    be read or is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a run is named twice among {', '.join(map(str, folders))}")
    above, names = common_folder(paths)
    if above == Path(above.anchor) or not os.access(above, os.W_OK):
        above = paths[0].parent
    for path in paths:
        load_run(path)  # which finds what is wrong with the last before the first is read
    reports = [write_report(path, data, streams, sample_tokens, column, _of(names[path], progress)) for path in paths]
    target = report_folder(above, "comparison", data)

    def logs(name: str) -> dict[str, list[Any]]:
        """Of each run, up to the step at which its model was saved."""
        ends = [math.inf if report["steps"] is None else report["steps"] for report in reports]
        found = [[e for e in read_log(path, name) if e.step <= end] for path, end in zip(paths, ends, strict=True)]
        return dict(zip(names.values(), found, strict=True))

    steps, probes = logs(LOG), logs(MEMORY)
    rule = [{"model.rule": report["rule"]} if report["rule"] else {} for report in reports]  # a preset may decide it
    settings = [flat_settings(path) | of for path, of in zip(paths, rule, strict=True)]
    links = [os.path.relpath(Path(report["folder"]) / "report.html", target) for report in reports]
    of_runs = zip(names.values(), links, reports, probes.values(), strict=True)
    with written(target) as made:
        page = render(
            "comparison.html",
            reads=dict.fromkeys(f"{report['text']}, {report['read']}" for report in reports),
            texts=len({report["text_digest"] for report in reports}),
            date=reports[-1]["date"],
            machine=reports[-1]["machine"],
            runs=[_row(*of) for of in of_runs],
            charts=_draw(made, reports, steps, probes, all(map(has_byte_tokens, paths))),
            names=list(names.values()),
            settings=differing(settings),
        )
        found = {"data": identity(data), "runs": dict(zip(names.values(), links, strict=True))}
        (made / "comparison.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        (made / "comparison.html").write_text(page, encoding="utf-8")
    return target / "comparison.html"


def _of(name: str, progress: Progress) -> Progress:
    """Progress that names the run."""
    return lambda what, share: progress(f"{name}: {what}", share)


def _draw(
    made: Path,
    reports: Sequence[dict[str, Any]],
    steps: dict[str, list[Any]],
    probes: dict[str, list[ProbeRecord]],
    of_bytes: bool,
) -> set[str]:
    """The charts for which runs have data; their names."""
    scale, unit = loss_unit(of_bytes)
    positions = {
        name: [(bucket["to"], bucket["bits_per_byte"]) for bucket in report["memory_on"]["by_position"]]
        for name, report in zip(steps, reports, strict=True)
    }
    losses = {name: [(e.step, scale * e.loss) for e in of] for name, of in steps.items()}
    shares = {name: charts.contributions(of) for name, of in probes.items()}
    found = {
        "position": charts.by_position(positions, "By position"),
        "loss": charts.curves(losses, "Training loss", unit=unit),
        "contribution": charts.curves(shares, "Memory contribution", bands=True, dashed=True),
    }
    drawn = {name: chart for name, chart in found.items() if chart is not None}
    for name, chart in drawn.items():
        charts.save(made / f"{name}.png", [chart])
    return {*drawn}


def _row(name: str, link: str, report: dict[str, Any], probes: Sequence[ProbeRecord]) -> dict[str, Any]:
    margin, older = report["margin"], report["beyond_training_length"]
    shares = sorted(probes[-1].contributions) if probes else []
    raised = sum(alarm["until"] is None for alarm in report["alarms"])
    cells = [
        " to ".join(dict.fromkeys(f"{end:.2f}" for end in shares[:1] + shares[-1:])),
        f"{report['memory_on']['bits_per_byte']:.4f}",
        "" if margin is None else amount(margin),
        "" if older is None else amount(older),
        f"{report['parameters']:,}",
        "" if report["steps"] is None else f"{report['steps']:,}",
    ]
    about = {"name": name, "link": quote(os.fsencode(link)), "block": report["block"], "rule": report["rule"] or ""}
    return about | {"cells": cells, "raised": raised, "over": len(report["alarms"]) - raised, "probed": bool(probes)}
