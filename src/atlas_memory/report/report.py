"""The report of a run on a text: numbers in JSON, pictures, a sample, and one page that shows them."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from atlas_memory.data.prepared import Prepared, load_corpus
from atlas_memory.data.sources import Document
from atlas_memory.data.tokens import encode, is_byte_tokenizer
from atlas_memory.evaluation.perplexity import SEGMENT, Score, bits_per_byte, reading_length, token_nats
from atlas_memory.evaluation.sampling import sample
from atlas_memory.observation import MemoryTrace, Trace, trace
from atlas_memory.observation.watching import memories
from atlas_memory.observation.writes import memory_writes
from atlas_memory.report.page import page
from atlas_memory.report.pictures import (
    GATES,
    bits_by_position,
    contents_over_time,
    gates_over_time,
    loss_curve,
    over_training,
)
from atlas_memory.report.reading import pieces_of, reading_page
from atlas_memory.training.config import RunConfig
from atlas_memory.training.runs import Run, load_run, read_log

PROMPT = 32  # tokens of the text that the sample goes on from


def write_report(
    folder: str | Path, data: str | Path | None = None, streams: int = 16, sample_tokens: int = 400
) -> dict[str, Any]:
    """Evaluate the run in `folder` and write its `report/` (of a text that `data` names, `report-NAME/`): report.html,
    report.json and the pictures.

    Reads `streams` streams of `reading_length` as the model reads, with a memory of the last training length only and,
    if it has memories, with their writes off; and one document with every memory traced. The text is the run's own
    held-out part, or all of `data`. Returns what report.json holds, with `folder`, the report's; ValueError if the run
    cannot be loaded, or has no run.yaml to name its text and there is no `data`.
    """
    run = load_run(folder)
    text, documents = _text(run, data)
    trained = (run.config or RunConfig()).data.longest
    length = reading_length(trained)

    def score(writes: bool = True, recent: int | None = None) -> Score:
        return bits_per_byte(run.model, run.tokenizer, documents, length, writes, streams, recent)

    on, recent = score(), score(recent=trained)
    off = score(writes=False) if memories(run.model) else None
    document = next((d for d in documents if len(d.text) > 2 * length), max(documents, key=lambda d: len(d.text)))
    ids = torch.from_numpy(encode(run.tokenizer, document.text)[:length].astype(np.int64))[None]
    prompt = run.tokenizer.decode(ids[0, :PROMPT], skip_special_tokens=True).rstrip("\ufffd")
    seen = trace(run.model, ids, piece=SEGMENT)
    log = read_log(run.folder)
    written = sample(run.model, run.tokenizer, prompt, sample_tokens)
    config = run.model.config
    numbers: dict[str, Any] = {
        "run": str(run.folder),
        "preset": None if run.config is None else run.config.model.preset,
        "block": config.block,
        "rule": config.rule if off else None,
        "parameters": run.model.num_parameters(),
        "text": text,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{_processor()}, {platform.system()}, torch {torch.__version__}",
        "steps": int(log[-1]["step"]) if log else None,
        "training_seconds": log[-1]["elapsed"] if log else None,
        "training_length": trained,
        "memory_on": on.to_dict(),
        "writes_off": None if off is None else off.to_dict(),
        "recent_only": recent.to_dict(),
        "margin": None if off is None else _margin(on.margin(off)),
        "beyond_training_length": _beyond(on, recent, trained),
        "older_by_position": [_margin(pair) for pair in on.margin_by_position(recent)],
        "gates": {"document": document.name, "memories": [_gates(memory) for memory in seen.memories]},
        "prompt": prompt,
        "sample": written.removeprefix(prompt),
    }
    target = run.folder / ("report" if data is None else f"report-{Path(data).stem or 'text'}")
    target.mkdir(exist_ok=True)
    if len(log) > 1:
        bits = is_byte_tokenizer(run.tokenizer)
        scale, unit = (1 / math.log(2), "bits per byte") if bits else (1.0, "nats per token")
        loss_curve(target / "loss.png", [e["step"] for e in log], [scale * e["loss"] for e in log], unit)
    bits_by_position(target / "position.png", on, off, recent, trained)
    if seen.memories:
        gates_over_time(target / "gates.png", seen.memories, document.name)
        contents_over_time(target / "contents.png", seen.memories, seen.lags, document.name)
    looks = read_log(run.folder, "memory.jsonl")
    if len(looks) > 1:
        over_training(target / "training.png", looks)
    (target / "reading.html").write_text(_reading(run, document.name, ids, seen), encoding="utf-8")
    (target / "report.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    (target / "report.html").write_text(page(numbers, len(log) > 1, len(looks) > 1), encoding="utf-8")
    return numbers | {"folder": str(target)}


def _text(run: Run, data: str | Path | None) -> tuple[str, Sequence[Document]]:
    """What is read, in words, and its documents."""
    if data is None:
        if run.config is None:
            raise ValueError(f"{str(run.folder)!r} has no run.yaml to name its held-out text: give --data")
        source = run.config.data.path or "the Python standard library's source"
        return f"the held-out part of {source}", load_corpus(**run.config.data.source).held_out
    if Prepared.open(data) is not None:
        raise ValueError(f"--data={str(data)!r} is a prepared folder, which keeps held-out text only: give the text")
    corpus = load_corpus(**(run.config or RunConfig()).data.source | {"path": str(data)})
    return f"{data}, all of it", corpus.train + corpus.held_out


def _reading(run: Run, name: str, ids: torch.Tensor, seen: Trace) -> str:
    """The page of what each token cost, and what writing saved on it."""
    cost = cast(torch.Tensor, seen.nats)[0].double().numpy() / math.log(2)
    saved = None
    if seen.memories:
        with memory_writes(run.model, False), torch.inference_mode():
            without = token_nats(run.model, ids.to(run.model.device))[0] / math.log(2)
        saved = np.append(np.nan, without) - cost  # nothing predicts the first token
    return reading_page(name, pieces_of(run.tokenizer, ids[0].tolist()), cost, saved)


def _processor() -> str:
    """What the machine computes with."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _margin(pair: Sequence[float]) -> dict[str, float]:
    return {"bits_per_byte": float(pair[0]), "standard_error": float(pair[1])}


def _beyond(on: Score, recent: Score, trained: int) -> dict[str, float] | None:
    """What tokens older than the training length save where there are any."""
    beyond, beyond_recent = on.after(trained), recent.after(trained)
    if beyond is None or beyond_recent is None:
        return None
    return _margin(beyond.margin(beyond_recent))


def _gates(memory: MemoryTrace) -> dict[str, Any]:
    """Of each gate of a memory: mean, standard deviation and quantiles over all that was read, and `over_time`, the
    standard deviation over positions alone, averaged over heads (0: it does not look at the token)."""
    found: dict[str, Any] = {}
    for name in GATES:
        value = getattr(memory, name)
        if value is not None:
            quantiles = np.quantile(value.double().numpy(), [0.0, 0.05, 0.5, 0.95, 1.0])
            found[name] = {
                "mean": float(value.double().mean()),
                "std": float(value.double().std(correction=0)),
                **{key: float(q) for key, q in zip(("min", "q05", "q50", "q95", "max"), quantiles, strict=True)},
                "over_time": float(value.double().std(dim=2, correction=0).mean()),
            }
    life = memory.half_life
    return {"name": memory.name, "half_life": None if life is None else life.mean(0).tolist(), "gates": found}
