"""The report of a run: numbers in JSON, pictures, a sample of text, and one page that shows them."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_memory.data.prepared import load_corpus
from atlas_memory.data.sources import Document
from atlas_memory.data.tokens import encode, is_byte_tokenizer
from atlas_memory.evaluation.gates import GateLog, watch_gates
from atlas_memory.evaluation.perplexity import SEGMENT, bits_per_byte, reading_length
from atlas_memory.evaluation.sampling import sample
from atlas_memory.report.pictures import bits_by_position, gates_over_time, loss_curve
from atlas_memory.training.runs import Run, load_run, read_log

PROMPT = "def "


def write_report(folder: str | Path, streams: int = 16, sample_tokens: int = 400) -> dict[str, Any]:
    """Evaluate the run in `folder` and write `report/` there: report.html, report.json and the pictures.

    Reads `streams` held-out streams of `reading_length` with the memory on, with its writes off, and
    with a memory of the last training length only; and one held-out document with the gates watched. Returns what
    report.json holds; ValueError if the run cannot be loaded or has no run.yaml.
    """
    run = load_run(folder)
    if run.config is None:
        raise ValueError(f"{str(folder)!r} has no run.yaml, so its training text and length are unknown")
    trained = run.config.data.longest
    length = reading_length(trained)
    held_out = load_corpus(**run.config.data.source).held_out
    on = bits_per_byte(run.model, run.tokenizer, held_out, length, True, streams)
    off = bits_per_byte(run.model, run.tokenizer, held_out, length, False, streams)
    recent = bits_per_byte(run.model, run.tokenizer, held_out, length, True, streams, recent=trained)
    gates, document = _read_with_gates(run, held_out, length)
    log = read_log(run.folder)
    margin, error = on.margin(off)
    beyond, beyond_recent = on.after(trained), recent.after(trained)
    older = None
    if beyond is not None and beyond_recent is not None:
        saved, saved_error = beyond.margin(beyond_recent)
        older = {"bits_per_byte": saved, "standard_error": saved_error}
    numbers = {
        "preset": run.config.model.preset,
        "parameters": run.model.num_parameters(),
        "steps": int(log[-1]["step"]) if log else 0,
        "training_seconds": log[-1]["elapsed"] if log else None,
        "training_length": trained,
        "memory_on": on.to_dict(),
        "writes_off": off.to_dict(),
        "recent_only": recent.to_dict(),
        "margin": {"bits_per_byte": margin, "standard_error": error},
        "beyond_training_length": older,
        "older_by_position": [
            {"bits_per_byte": float(value), "standard_error": float(error)}
            for value, error in on.margin_by_position(recent)
        ],
        "gates": {"document": document, "layers": gates.summary()},
        "sample": sample(run.model, run.tokenizer, PROMPT, sample_tokens),
    }
    target = run.folder / "report"
    target.mkdir(exist_ok=True)
    if log:
        bits = is_byte_tokenizer(run.tokenizer)
        scale, unit = (1 / math.log(2), "bits per byte") if bits else (1.0, "nats per token")
        loss_curve(target / "loss.png", [e["step"] for e in log], [scale * e["loss"] for e in log], unit)
    bits_by_position(target / "position.png", on, off, recent, trained)
    if gates.layers:
        gates_over_time(target / "gates.png", gates.layers, document)
    (target / "report.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    (target / "report.html").write_text(_page(numbers, bool(log)), encoding="utf-8")
    return numbers


def _read_with_gates(run: Run, documents: tuple[Document, ...], length: int) -> tuple[GateLog, str]:
    """Read the first document that is long enough (else the longest) and record the gates."""
    document = next((d for d in documents if len(d.text) > 2 * length), max(documents, key=lambda d: len(d.text)))
    ids = torch.from_numpy(encode(run.tokenizer, document.text)[:length].astype(np.int64))[None].to(run.model.device)
    cache = None
    with watch_gates(run.model) as log, torch.inference_mode():
        for part in ids.split(SEGMENT, dim=1):
            cache = run.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return log, document.name


def _page(numbers: dict[str, Any], has_log: bool) -> str:
    on, off, recent = numbers["memory_on"], numbers["writes_off"], numbers["recent_only"]
    rows = "".join(
        f"<tr><td>{a['from']:,}–{a['to']:,}</td><td>{a['bits_per_byte']:.3f}</td><td>{b['bits_per_byte']:.3f}</td>"
        f"<td>{d['bits_per_byte']:.4f} ± {d['standard_error']:.4f}</td><td>{c['bits_per_byte']:.3f}</td></tr>"
        for a, b, c, d in zip(
            on["by_position"], recent["by_position"], off["by_position"], numbers["older_by_position"], strict=True
        )
    )
    gates = "".join(
        f"<tr><td>{layer + 1}</td><td>{name}</td><td>{g['mean']:.3f}</td><td>{g['std']:.3f}</td>"
        f"<td>{g['over_time']:.3f}</td><td>{g['q05']:.3f} / {g['q50']:.3f} / {g['q95']:.3f}</td></tr>"
        for layer, row in enumerate(numbers["gates"]["layers"])
        for name, g in row.items()
    )
    margin, older, trained = numbers["margin"], numbers["beyond_training_length"], numbers["training_length"]
    further = (
        f"Beyond the training length, tokens more than {trained:,} back save "
        f"{older['bits_per_byte']:.3f} ± {older['standard_error']:.3f} of it."
        if older
        else ""
    )
    minutes = f"{numbers['training_seconds'] / 60:.1f} minutes" if numbers["training_seconds"] is not None else ""
    if gates:
        gates = (
            '<h2>Gates</h2><img src="gates.png" alt="Gates of each layer over a held-out document">'
            "<table><tr><th>layer</th><th>gate</th><th>mean</th><th>std</th><th>std over time</th>"
            f"<th>5% / 50% / 95%</th></tr>{gates}</table>"
        )
    loss = '<h2>Training</h2><img src="loss.png" alt="Training loss against steps">' if has_log else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Report: {html.escape(numbers["preset"])}</title>
<style>
body {{ font: 17px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222 }}
img {{ max-width: 100% }} pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 14px }}
td, th {{ padding: .2rem 1rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums }}
.big {{ font-size: 1.3rem }}
</style>
<h1>A memory that learns while it reads</h1>
<p>Preset {html.escape(numbers["preset"])}, {numbers["parameters"]:,} parameters, {numbers["steps"]:,} steps
{f"in {minutes}" if minutes else ""}, training length {numbers["training_length"]:,} tokens.</p>
<p class="big">Held-out text: <b>{on["bits_per_byte"]:.3f}</b> bits per byte with the memory on,
<b>{off["bits_per_byte"]:.3f}</b> with its writes off: the memory saves {margin["bits_per_byte"]:.3f} ±
{margin["standard_error"]:.3f} (standard error over {on["streams"]} streams). {further}</p>
{loss}
<h2>By position</h2><img src="position.png" alt="Bits per byte by position, memory on and writes off">
<table><tr><th>tokens</th><th>memory on</th><th>memory of the last {trained:,}</th>
<th>older tokens save</th><th>writes off</th></tr>
{rows}</table>
{gates}
<h2>A sample</h2><pre>{html.escape(numbers["sample"])}</pre>
</html>
"""
