"""Reports: of a run on a text, with numbers in JSON, charts and a sample; and a page that compares several runs."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import torch

from atlas_memory.data.sources import Document
from atlas_memory.data.tokenization import encode, is_byte_tokenizer
from atlas_memory.eval.perplexity import SEGMENT, Score, bits_per_byte, evaluation_length
from atlas_memory.eval.sampling import sample
from atlas_memory.eval.token_costs import token_costs
from atlas_memory.monitor import Trace, summarise, traces
from atlas_memory.monitor.hooks import memory_layers
from atlas_memory.monitor.logs import GATES, LOG, MEASURES, MEMORY, ProbeRecord, StepRecord, alarm_history, read_log
from atlas_memory.monitor.tracing import joined
from atlas_memory.train.config import RunConfig
from atlas_memory.train.run_folder import flat_settings, has_byte_tokens, read_data_json
from atlas_memory.train.run_model import Run, load_run
from atlas_memory.train.training_data import digest_of_held_out, evaluation_text
from atlas_memory.viz import charts, labels
from atlas_memory.viz.folders import check_writable, common_folder, report_folder, written
from atlas_memory.viz.token_page import render, token_page

PROMPT = 32  # tokens of the text that the sample continues
PROBED = ("half_life", "readout_change", "error_before_write", "effective_rank")  # what training.png shows
Progress = Callable[[str, float], None]
"""Called with the current work and the fraction of it that is done."""


def no_progress(what: str, share: float) -> None: ...


def write_report(
    folder: str | Path,
    data: str | Path | None = None,
    streams: int = 16,
    sample_tokens: int = 400,
    column: str | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Evaluate the run in `folder` and write its `report/` (of a text that `data` names, `report-NAME/`): report.html,
    report.json, reading.html and charts.

    Reads `streams` streams of `evaluation_length` with the full context, with a memory of the last training length
    only and, if the model has memories, with their writes off; and traces the memories on one document. The text is
    the run's own held-out part, or all of `data`, with the `column` of its tables (None: the run's). Returns what
    report.json has, with `folder`, the report's; ValueError if the run cannot be loaded or has no text.
    """
    run = load_run(folder)
    target = report_folder(run.folder, "report", data)
    check_writable(target)
    # A run in progress has logged steps after those of its newest checkpoint.
    log: list[StepRecord] = [e for e in read_log(run.folder, LOG) if e.step <= run.step]
    probes: list[ProbeRecord] = [e for e in read_log(run.folder, MEMORY) if e.step <= run.step]
    trained = (run.config or RunConfig()).data.longest
    text, documents = evaluation_text(run, data, column)
    length = evaluation_length(trained)
    document = next((d for d in documents if len(d.text) > 2 * length), max(documents, key=lambda d: len(d.text)))
    all_ids = encode(run.tokenizer, document.text)
    if len(all_ids) < 2:
        raise ValueError(f"{text}: its longest document is a single token, with nothing to predict: give a longer text")
    ids = all_ids[:length].astype(np.int64)
    scores = _scores(run, documents, length, trained, streams, progress)
    traced = _trace(run, ids, progress)
    progress("writing a sample", 0.0)
    prompt = run.tokenizer.decode(ids[:PROMPT], skip_special_tokens=True).rstrip("\ufffd")
    numbers = (
        _about(run, trained, log)
        | _savings(*scores, trained)
        | {
            "text": text,
            "data": None if data is None else str(data),
            "read": _amount_read(scores[0], documents),
            "text_digest": digest_of_held_out(documents),
            "alarms": alarm_history(probes),
            "document": labels.legible(document.name, 200),
            "memories": [
                {**record.model_dump(exclude_none=True), "wrote": memory.wrote}
                for record, memory in zip(summarise(traced), traced.memories, strict=True)
            ],
            "prompt": prompt,
            "sample": sample(run.model, run.tokenizer, prompt, sample_tokens).removeprefix(prompt),
        }
    )
    progress("drawing charts", 0.0)
    with written(target) as made:
        title = "Held-out text" if data is None else labels.legible(Path(data).name or str(data), 80)
        charts.save(made / "position.png", *([chart] for chart in charts.bits_by_position(*scores, trained, title)))
        drawn = _draw_training(made, log, probes, numbers["memories"], is_byte_tokenizer(run.tokenizer))
        _draw_memories(made, traced)
        tokens = _token_page(run, ids, len(all_ids), traced, numbers, progress)
        (made / "reading.html").write_text(tokens, encoding="utf-8")
        (made / "report.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        (made / "report.html").write_text(_page(numbers, drawn), encoding="utf-8")
    return numbers | {"folder": str(target)}


def _scores(
    run: Run, documents: Sequence[Document], length: int, trained: int, streams: int, progress: Progress
) -> tuple[Score, Score | None, Score]:
    """With the full context, with the writes off, and with the last training length."""

    def score(how: str, writes: bool = True, recent: int | None = None) -> Score:
        showing = partial(progress, f"reading {labels.count(streams, 'stream')} {how}")
        return bits_per_byte(run.model, run.tokenizer, documents, length, writes, streams, recent, showing).checked()

    return (
        score("with the full context"),
        score("with the memory's writes off", writes=False) if memory_layers(run.model) else None,
        score(f"with the last {trained:,} tokens only", recent=trained),
    )


def _trace(run: Run, ids: np.ndarray, progress: Progress) -> Trace:
    pieces = []
    for piece in traces(run.model, torch.from_numpy(ids)[None], piece=SEGMENT):
        pieces.append(piece)
        progress("tracing the memories, token by token", piece.positions[-1] / len(ids))
    return joined(pieces)


def _draw_training(
    made: Path, log: Sequence[StepRecord], probes: Sequence[ProbeRecord], memories: Sequence[Any], of_bytes: bool
) -> set[str]:
    """Draw the loss and the probes, where there are any; the names of the charts."""
    if len(log) < 2:
        return set()
    scale, unit = labels.loss_unit(of_bytes)
    loss = charts.curves({"loss": [(e.step, scale * e.loss) for e in log]}, "Training loss", unit=unit, bands=True)
    charts.save(made / "loss.png", [loss])
    if len(probes) < 2 or not memories:
        return {"loss"}
    measured = charts.measures(probes)
    maps = [charts.heat_map(probes, name) for name in PROBED if name in measured]
    shares: dict[str, list[Any]] = {}
    for probe in probes:
        for memory in probe.memories:
            shares.setdefault(labels.memory_label(memory.name), []).append((probe.step, memory.memory_contribution))
    below = charts.curves(shares, MEASURES["memory_contribution"].title, dashed=True)
    charts.save(made / "training.png", maps, [below], width=1000)
    return {"loss", "training"}


def _draw_memories(made: Path, traced: Trace) -> None:
    """Gates, errors and matrices of the memories along the document."""
    if not traced.memories:
        return
    gates = [name for name in GATES if any(getattr(memory, name) is not None for memory in traced.memories)]
    errors = ["error_before_write", *(f"recall_error/{i}" for i in range(len(traced.lags)))]
    contents = [*errors, "readout_change", "memory_contribution"]
    geometry = ["effective_rank", "distance_from_init", "update_angle"]
    for name, measures in (("gates", gates), ("contents", contents), ("geometry", geometry)):
        charts.save(made / f"{name}.png", charts.trace_columns(traced, measures))


def _token_page(
    run: Run, ids: np.ndarray, total: int, traced: Trace, numbers: dict[str, Any], progress: Progress
) -> str:
    part = "all of it" if len(ids) == total else f"the first {len(ids):,} of its {total:,} tokens"
    about = f"This is {part}, read by {run.folder}: {labels.model_size(numbers)}."
    about += f" Made {numbers['date']} on {numbers['machine']}."
    cost = cast(torch.Tensor, traced.nats)[0].double().numpy() / math.log(2)
    showing = partial(progress, "reading a document in other ways")
    reading = token_costs(run.model, run.tokenizer, ids, cost, numbers["training_length"], showing)
    return token_page(numbers["document"], reading, about=about)


def _page(numbers: dict[str, Any], drawn: set[str]) -> str:
    memories, off = numbers["memories"], numbers["writes_off"]
    positions = []
    for j, bucket in enumerate(numbers["memory_on"]["by_position"]):
        costs = [of["by_position"][j] for of in (numbers["memory_on"], numbers["recent_only"], off) if of is not None]
        bits = [f"{cost['bits_per_byte']:.3f}" for cost in costs]
        saved = labels.amount(numbers["older_by_position"][j])
        positions.append([f"{bucket['from']:,}–{bucket['to']:,}", *bits[:2], saved, *bits[2:]])
    return render(
        "report.html",
        **numbers,
        headline=labels.headline(numbers),
        size=labels.model_size(numbers),
        charts=drawn,
        probed=[MEASURES[name] for name in PROBED],
        position_heads=["tokens", "bits per byte", f"last {numbers['training_length']:,} only", "older tokens save"]
        + ["writes off"] * (off is not None),
        positions=positions,
        unwritten=[memory["name"] for memory in memories if not memory["wrote"]],
        gates={name: MEASURES[name] for name in GATES if any(name in memory for memory in memories)},
    )


def _about(run: Run, trained: int, log: Sequence[StepRecord]) -> dict[str, Any]:
    """The model, its training, and the machine."""
    config = run.model.config
    steps, seconds = (log[-1].step, log[-1].elapsed) if log else (None, None)
    tokens = None
    if run.config is not None:
        own = run.config.train.batch_size * run.config.train.gradient_accumulation_steps
        rows = read_data_json(run.folder).get("rows", own)  # of all processes
        tokens = rows * run.config.data.seq_len if type(rows) is int else None
    processor = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {
        "run": str(run.folder),
        "block": config.block,
        "rule": config.rule if memory_layers(run.model) else None,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "parameters": run.model.num_parameters(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{processor}, {platform.system()}, torch {torch.__version__}",
        "steps": steps,
        "tokens_per_step": tokens,
        "training_seconds": seconds,
        "training_length": trained,
        "training_length_is_known": run.config is not None,
    }


def _amount_read(on: Score, documents: Sequence[Document]) -> str:
    """The amount of text read, in words."""
    total, read_of_it = sum(len(d.text.encode("utf-8", "surrogatepass")) for d in documents), int(on.bytes.sum())
    part = f"all of its {total:,}" if read_of_it == total else f"{read_of_it:,} of its {total:,}"
    return f"{part} bytes, in {labels.count(len(on.bits), 'stream')} of at most {labels.count(on.edges[-1], 'token')}"


def _savings(on: Score, off: Score | None, recent: Score, trained: int) -> dict[str, Any]:
    """The cost of reading in each way, and what writing and older tokens save."""
    beyond, beyond_recent = on.after(trained), recent.after(trained)
    older = None
    if beyond is not None and beyond_recent is not None:
        older = _margin(beyond.margin(beyond_recent), int(beyond.reached.max()))
    by_position = zip(on.margin_by_position(recent), on.reached, strict=True)
    return {
        "memory_on": on.to_dict(),
        "writes_off": None if off is None else off.to_dict(),
        "recent_only": recent.to_dict(),
        "margin": None if off is None else _margin(on.margin(off), len(on.bits)),
        "beyond_training_length": older,
        "older_by_position": [_margin(pair, streams) for pair, streams in by_position],
    }


def _margin(pair: Sequence[float], streams: int) -> dict[str, Any]:
    """A saving and its standard error over streams; None of one stream."""
    error = float(pair[1]) if streams > 1 else None
    return {"bits_per_byte": float(pair[0]), "standard_error": error, "streams": int(streams)}


def write_comparison(
    folders: Sequence[str | Path],
    data: str | Path | None = None,
    streams: int = 16,
    sample_tokens: int = 400,
    column: str | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Write the report of each run, as ``write_report`` does, and ``comparison/comparison.html`` beside the runs (where
    their common folder is not writable, beside the first; of a text that ``data`` names, in ``comparison-NAME``).
    Returns the page's path; ValueError if a run cannot be read or is named twice."""
    paths = [Path(folder).resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError(f"a run is named twice among {', '.join(map(str, folders))}")
    above, names = common_folder(paths)
    if above == Path(above.anchor) or not os.access(above, os.W_OK):
        above = paths[0].parent
    for path in paths:
        load_run(path)  # so that all errors come before the first report
    reports = [write_report(path, data, streams, sample_tokens, column, _for(names[path], progress)) for path in paths]
    target = report_folder(above, "comparison", data)

    def logs(name: str) -> dict[str, list[Any]]:
        """Of each run, up to the step of its model."""
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
            settings=labels.differing(settings),
        )
        (made / "comparison.html").write_text(page, encoding="utf-8")
    return target / "comparison.html"


def _for(name: str, progress: Progress) -> Progress:
    return lambda what, share: progress(f"{name}: {what}", share)


def _draw(
    made: Path,
    reports: Sequence[dict[str, Any]],
    steps: dict[str, list[Any]],
    probes: dict[str, list[ProbeRecord]],
    of_bytes: bool,
) -> set[str]:
    """Draw the charts for which there is data; their names."""
    scale, unit = labels.loss_unit(of_bytes)
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
    return set(drawn)


def _row(name: str, link: str, report: dict[str, Any], probes: Sequence[ProbeRecord]) -> dict[str, Any]:
    margin, older = report["margin"], report["beyond_training_length"]
    shares = sorted(probes[-1].contributions) if probes else []
    raised = sum(alarm["until"] is None for alarm in report["alarms"])
    cells = [
        " to ".join(dict.fromkeys(f"{end:.2f}" for end in shares[:1] + shares[-1:])),
        f"{report['memory_on']['bits_per_byte']:.4f}",
        "" if margin is None else labels.amount(margin),
        "" if older is None else labels.amount(older),
        f"{report['parameters']:,}",
        "" if report["steps"] is None else f"{report['steps']:,}",
    ]
    about = {"name": name, "link": quote(os.fsencode(link)), "block": report["block"], "rule": report["rule"] or ""}
    return about | {"cells": cells, "raised": raised, "over": len(report["alarms"]) - raised, "probed": bool(probes)}
