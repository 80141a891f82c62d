"""The report of a run on a text: numbers in JSON, pictures, a sample, and one page that shows them."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from atlas_memory.data.sources import Document
from atlas_memory.data.tokenization import encode, is_byte_tokenizer
from atlas_memory.eval.perplexity import SEGMENT, Score, bits_per_byte, reading_length
from atlas_memory.eval.reading import read
from atlas_memory.eval.sampling import sample
from atlas_memory.models import PRESETS
from atlas_memory.monitor import MemoryTrace, traces
from atlas_memory.monitor.trace import joined
from atlas_memory.monitor.watching import memories
from atlas_memory.train.callbacks import HeldOut
from atlas_memory.train.config import RunConfig
from atlas_memory.train.examples import digest_of_held_out
from atlas_memory.train.logs import LOG, MEMORY, read_log
from atlas_memory.train.runs import Run, load_run
from atlas_memory.train.settings import noted
from atlas_memory.train.texts import text_of
from atlas_memory.viz.report.figures import plain_names
from atlas_memory.viz.report.folders import check_writable, folder_for, place, written
from atlas_memory.viz.report.names import GATES
from atlas_memory.viz.report.page import page
from atlas_memory.viz.report.pictures import (
    bits_by_position,
    contents_over_time,
    gates_over_time,
    geometry_over_time,
    loss_curve,
    over_training,
    wrote_nothing,
)
from atlas_memory.viz.report.reading import reading_page
from atlas_memory.viz.report.words import count, legible, raised, size

PROMPT = 32  # tokens of the text that the sample goes on from
Told = Callable[[str, float], None]
"""What is told what a report is doing, and which share of that is done."""


def write_report(
    folder: str | Path,
    data: str | Path | None = None,
    streams: int = 16,
    sample_tokens: int = 400,
    column: str | None = None,
    told: Told = lambda what, share: None,
) -> dict[str, Any]:
    """Evaluate the run in `folder` and write its `report/` (of a text that `data` names, `report-NAME/`, see
    `folder_for`): report.html, report.json and the pictures.

    Reads `streams` streams of `reading_length` as the model reads, with a memory of the last training length only and,
    if it has memories, with their writes off; and one document with every memory traced. The text is the run's own
    held-out part, or `data` with nothing held out, of whose tables `column` is read (None: the run's). `told` hears how
    far it is. Returns what report.json holds, with `folder`, the report's; ValueError if the run cannot be loaded, has
    no run.yaml to name its text and there is no `data`, or no document has two tokens.
    """
    run = load_run(folder)
    target = folder_for(run.folder, "report", data)
    check_writable(target)
    # A run that goes on, or was killed, has logged steps after those of its newest checkpoint.
    log, looks = ([e for e in read_log(run.folder, name) if e["step"] <= run.step] for name in (LOG, MEMORY))
    text, documents = text_of(run, data, column)
    trained = (run.config or RunConfig()).data.longest
    length = reading_length(trained)
    document = next((d for d in documents if len(d.text) > 2 * length), max(documents, key=lambda d: len(d.text)))
    named = legible(document.name, 200)
    all_ids = encode(run.tokenizer, document.text)
    if len(all_ids) < 2:
        raise ValueError(f"{text}: its longest document is a single token, with nothing to predict: give a longer text")
    ids = all_ids[:length].astype(np.int64)

    def score(how: str, writes: bool = True, recent: int | None = None) -> Score:
        def said(share: float) -> None:
            told(f"reading {count(streams, 'stream')} {how}", share)

        return bits_per_byte(run.model, run.tokenizer, documents, length, writes, streams, recent, said).checked()

    scores = (
        score("as the model reads"),
        score("with the memory's writes off", writes=False) if memories(run.model) else None,
        score(f"with the last {trained:,} tokens only", recent=trained),
    )
    pieces = []
    for piece in traces(run.model, torch.from_numpy(ids)[None], piece=SEGMENT):
        pieces.append(piece)
        told("looking at the memories, token by token", piece.points[-1] / len(ids))
    seen = joined(pieces)
    cost = cast(torch.Tensor, seen.nats)[0].double().numpy() / math.log(2)
    prompt = run.tokenizer.decode(ids[:PROMPT], skip_special_tokens=True).rstrip("\ufffd")
    names = {memory.name for memory in seen.memories}
    drawn = [look for look in looks if names and names <= {memory["name"] for memory in look["memories"]}]
    told("writing a sample", 0.0)
    numbers = _run(run, trained, log) | {"text": text, "data": place(data), "read": _read(scores[0], documents)}
    numbers["text_digest"] = digest_of_held_out(documents)
    numbers |= _scores(*scores, trained)
    numbers |= {
        "held_out_in_training": _in_training(log, trained) if data is None else None,
        "alarms": raised(looks),
        "gates": {"document": named, "memories": [_gates(memory) for memory in seen.memories]},
        "prompt": prompt,
        "sample": sample(run.model, run.tokenizer, prompt, sample_tokens).removeprefix(prompt),
    }
    told("drawing pictures", 0.0)
    with written(target) as made, plain_names():
        if len(log) > 1:
            scale, unit = _loss_unit(run.tokenizer)
            loss_curve(made / "loss.png", [e["step"] for e in log], [scale * e["loss"] for e in log], unit)
        name = "Held-out text" if data is None else legible(Path(data).name or str(data), 80)
        bits_by_position(made / "position.png", *scores, trained, f"{name} by position")
        if seen.memories:
            gates_over_time(made / "gates.png", seen.memories, named)
            contents_over_time(made / "contents.png", seen.memories, seen.lags, named)
            geometry_over_time(made / "geometry.png", seen.memories, seen.points, named)
        if len(drawn) > 1:
            over_training(made / "training.png", [memory.name for memory in seen.memories], drawn)
        part = "all of it" if len(ids) == len(all_ids) else f"the first {len(ids):,} of its {len(all_ids):,} tokens"
        about = (
            f"Here is {part}, read by {run.folder}: {size(numbers)}. Made {numbers['date']} on {numbers['machine']}."
        )
        again = read(
            run.model, run.tokenizer, ids, cost, trained, lambda share: told("reading a document in other ways", share)
        )
        (made / "reading.html").write_text(reading_page(named, again, about=about), encoding="utf-8")
        (made / "report.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        (made / "report.html").write_text(page(numbers, len(log) > 1, len(drawn) > 1), encoding="utf-8")
    return numbers | {"folder": str(target)}


def _loss_unit(tokenizer: Any) -> tuple[float, str]:
    """By what the losses of a log are multiplied for people, and what they are then in."""
    return (1 / math.log(2), "bits per byte") if is_byte_tokenizer(tokenizer) else (1.0, "nats per token")


def _run(run: Run, trained: int, log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was trained, how long, and on what machine it is read."""
    config = run.model.config
    steps, seconds = (int(log[-1]["step"]), log[-1]["elapsed"]) if log else (None, None)
    tokens = limit = None
    if run.config is not None:
        plan, limit = run.config.train, run.config.train.max_minutes
        rows = noted(run.folder).get("rows", plan.batch_size * plan.gradient_accumulation_steps)  # of all processes
        tokens = rows * run.config.data.seq_len if type(rows) is int else None
    return {
        "run": str(run.folder),
        "preset": _preset(run),
        "block": config.block,
        "rule": config.rule if memories(run.model) else None,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "parameters": run.model.num_parameters(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{_processor()}, {platform.system()}, torch {torch.__version__}",
        "steps": steps,
        "tokens_per_step": tokens,
        "ended_after_minutes": limit if limit and seconds is not None and seconds >= 60 * limit else None,
        "training_seconds": seconds,
        "training_length": trained,
        "training_length_is_known": run.config is not None,
    }


def _in_training(log: Sequence[dict[str, Any]], trained: int) -> dict[str, Any] | None:
    """What the log says last of held-out text, and how that was read."""
    read = [line for line in log if "held_out_bits_per_byte" in line]
    if not read:
        return None
    how = {"streams": HeldOut.streams, "length": HeldOut.segments * trained}
    return {"step": read[-1]["step"], "bits_per_byte": read[-1]["held_out_bits_per_byte"]} | how


def _preset(run: Run) -> str | None:
    """The preset that the run names, if the model is of its size; not where the run began with another model."""
    if run.config is None or run.config.model.init_from is not None:
        return None
    preset = PRESETS[run.config.model.preset].config
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    same = all(getattr(run.model.config, name) == preset[name] for name in sizes)
    return run.config.model.preset if same else None


def _read(on: Score, documents: Sequence[Document]) -> str:
    """How much of the text was read, in words."""
    there, read_of_it = sum(len(d.text.encode("utf-8", "surrogatepass")) for d in documents), int(on.bytes.sum())
    streams = f"in {count(len(on.bits), 'stream')} of at most {count(on.edges[-1], 'token')}"
    return (
        f"all of its {there:,} bytes, {streams}"
        if read_of_it == there
        else f"{read_of_it:,} of its {there:,} bytes, {streams}"
    )


def _scores(on: Score, off: Score | None, recent: Score, trained: int) -> dict[str, Any]:
    """What reading cost in each way, and what writing and older tokens save."""
    return {
        "memory_on": on.to_dict(),
        "writes_off": None if off is None else off.to_dict(),
        "recent_only": recent.to_dict(),
        "margin": None if off is None else _margin(on.margin(off), len(on.bits)),
        "beyond_training_length": _beyond(on, recent, trained),
        "older_by_position": [
            _margin(pair, streams) for pair, streams in zip(on.margin_by_position(recent), on.reached, strict=True)
        ],
    }


def _processor() -> str:
    """What the machine computes with."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _margin(pair: Sequence[float], streams: int) -> dict[str, Any]:
    """What is saved and its standard error over so many streams; None of one, which does not tell."""
    error = float(pair[1]) if streams > 1 else None
    return {"bits_per_byte": float(pair[0]), "standard_error": error, "streams": int(streams)}


def _beyond(on: Score, recent: Score, trained: int) -> dict[str, Any] | None:
    """What tokens older than the training length save where there are any."""
    beyond, beyond_recent = on.after(trained), recent.after(trained)
    if beyond is None or beyond_recent is None:
        return None
    return _margin(beyond.margin(beyond_recent), int(beyond.reached.max()))


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
    return {
        "name": memory.name,
        "wrote": not wrote_nothing(memory),
        "half_life": None if life is None else life.mean(0).tolist(),
        "gates": found,
    }
