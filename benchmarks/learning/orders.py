"""Orders of examples: what a model learns at equal tokens when its rows carry what they remember, and when not."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from atlas_memory.data import Corpus, Document
from atlas_memory.data.sources import Source
from atlas_memory.data.tokenization import encode, train_tokenizer
from atlas_memory.eval import Score, bits_per_byte
from atlas_memory.eval.perplexity import token_nats
from atlas_memory.monitor.logs import read_log
from atlas_memory.train import load_config, load_run, train
from atlas_memory.train.run_model import Run

from .study import Study, heads

LENGTH, HELD_OUT, STREAMS, STEPS = 128, 8192, 24, 900
TWICE = ((128, 0), (512, 0), (4096, 0), (512, 2048))
"""Characters of a passage that is read again, and of other text between."""
WORDS = 4096  # tokens of the BPE that stands for data.tokenizer=words
PLACES = ((0, 64), (512, 1024), (4096, 8192), (16384, 32768))
ORDERS = {
    "crops": ("data.order=crops",),
    "packed 16 lanes": ("data.order=packed", "data.interleave=16"),
    "stream": ("data.order=stream", "data.interleave=1"),
    "stream carry 32": ("data.order=stream", "data.interleave=1", "data.reset_every=32"),
    "stream 16 lanes": ("data.order=stream", "data.interleave=16"),
    "stream 16 lanes carry 4": ("data.order=stream", "data.interleave=16", "data.reset_every=4"),
    "stream 16 lanes carry 16": ("data.order=stream", "data.interleave=16", "data.reset_every=16"),
    "stream 64 rows of 32": (
        "data.order=stream",
        "data.interleave=1",
        "data.reset_every=32",
        "data.seq_len=32",
        "train.batch_size=64",
    ),
}
RULES = ("titans", "gated-deltanet")
# Blocks without a memory, with MLPs that make up for its parameters. A state that grows is not carried: the Transformer
# learns from as many tokens in rows eight times as long.
BLOCKS = {
    "swa: stream 16 lanes": ("model.block=swa", "model.attention_window=128", "model.intermediate_size=448"),
    "attention: crops of 1024": (
        "model.block=attention",
        "model.intermediate_size=448",
        "data.order=crops",
        "data.seq_len=1024",
        "train.batch_size=2",
    ),
}


def bits(case: str, dim: int, seed: int, quick: bool, text: str | None = None, steps: int = STEPS) -> dict[str, float]:
    """See ``ORDERS_STUDY``."""
    rule, order = case.split(": ")
    given = [*ORDERS.get(order, ()), *BLOCKS.get(case, (f"model.rule={rule}",))]
    return trained(given, dim, seed, quick, text, steps)


def trained(options: Sequence[str], dim: int, seed: int, quick: bool, text: str | None, steps: int) -> dict[str, float]:
    """What a model of bytes learns of a text in so many steps of 16 rows of 128 bytes, if ``options`` of `atlas train`
    do not say otherwise; one of words, with ``data.tokenizer=words``, reads tokens of a BPE of the same text."""
    given = ["model.preset=tiny", f"model.num_attention_heads={heads(dim)}", f"data.seq_len={LENGTH}"]
    given += ["train.batch_size=16", f"train.steps={2 if quick else steps}", "train.warmup_steps=20"]
    given += [f"train.seed={seed}", "train.evaluate_every=0", "train.save_every=100000", "train.device=cpu"]
    given += [*options, *([] if text is None else [f"data.path={text}"])]
    with tempfile.TemporaryDirectory() as folder:
        if "data.tokenizer=words" in given:
            train_tokenizer(Source(text), Path(folder, "words"), WORDS)
            given.append(f"data.tokenizer={folder}/words")
        outcome = train(load_config(None, [*given, f"output_dir={folder}/run"]), console=Console(quiet=True))
        run = load_run(f"{folder}/run")
        log = read_log(Path(folder) / "run")
    held_out = Corpus.load(text).held_out[: 2 if quick else None]

    def score(recent: int | None = None) -> Score:
        length, streams = (256, 2) if quick else (HELD_OUT if text is None else 4 * HELD_OUT, STREAMS)
        return bits_per_byte(run.model, run.tokenizer, held_out, length, streams=streams, recent=recent)

    whole, recent = score(), score(LENGTH)
    margins = whole.margin_by_position(recent)
    found: dict[str, Any] = {
        "parameters": float(run.model.num_parameters()),
        "training": float(np.mean([line.loss for line in log[-50:]])) / math.log(2),
        "held out": whole.overall,
        "seconds": outcome.seconds,
    }
    for first, last in PLACES:
        if first in whole.edges[:-1]:
            bucket = whole.edges.index(first)
            found[f"{first}-{last}"] = float(whole.by_position[bucket])
            found[f"older {first}-{last}"], found[f"error {first}-{last}"] = map(float, margins[bucket])
    for length, between in ((64, 32),) if quick else TWICE:
        count = 4 if quick else min(8 * STREAMS, STREAMS * 4096 // length)  # the shorter, the more
        name = f"again {length}" + (f" after {between}" if between else "")
        if (saved := again(run, held_out, length, count, between)) is not None:
            found[f"older {name}"], found[f"error {name}"] = saved
    return found


def again(
    run: Run, documents: Sequence[Document], length: int, count: int, between: int = 0
) -> tuple[float, float] | None:
    """Bits a byte that a passage of so many characters costs less when it has been read before than when another has,
    and the standard error over ``count`` passages. What follows it in the document is read ``between``. None where
    fewer than two passages of this length are ASCII."""
    whole = length + between
    texts = [d.text[i : i + whole] for d in documents for i in range(0, len(d.text) - whole + 1, whole)]
    texts = [text for text in texts if text.isascii()]  # so that a character is a byte
    texts = texts[:: max(1, len(texts) // count)][:count]
    if len(texts) < 2:
        return None
    start = np.array([run.tokenizer.eos_token_id])
    chosen = [(encode(run.tokenizer, text[:length]), encode(run.tokenizer, text[length:])) for text in texts]

    def bits(*parts: np.ndarray) -> float:
        row = torch.from_numpy(np.concatenate([start, *parts]).astype(np.int64))
        with torch.inference_mode():
            return float(token_nats(run.model, row[None])[0, -len(parts[-1]) :].sum()) / math.log(2) / length

    others = [passage for passage, _ in (*chosen[1:], chosen[0])]
    pairs = zip(others, chosen, strict=True)
    saved = np.array([bits(other, rest, passage) - bits(passage, rest, passage) for other, (passage, rest) in pairs])
    return float(saved.mean()), float(saved.std(ddof=1)) / math.sqrt(len(saved))


COLUMNS = (
    "candidate",
    "parameters",
    "training",
    "held out",
    "0-64",
    "512-1,024",
    "4,096-8,192",
    "16,384-32,768",
    "older, 512-1,024",
    "older, 4,096-8,192",
    "older, 16,384-32,768",
    "read twice, 128",
    "read twice, 512",
    "read twice, 4,096",
    "512 again after 2,048",
    "seconds",
    "seeds",
    "revision",
)
ORDERS_STUDY = Study(
    name="orders",
    shows="A byte model of preset tiny, trained by `atlas train` for 900 steps (or `--steps`) of 2,048 bytes of the "
    "standard library or of `--text`, in each order of examples: bits a byte of the last 50 steps; of 24 held-out "
    "streams of 8,192 bytes (32,768 of `--text`), in all and by place; what bytes older than 128 save of them there, "
    "against the same streams read with a memory of the last 64 to 128 bytes; and what a passage of so many bytes "
    "costs less when the one before was the same than when it was another, and when 2,048 bytes lie between.",
    cases=(*(f"{rule}: {order}" for rule in RULES for order in ORDERS), *BLOCKS),
    widths=(64,),
    measure=bits,
    columns=COLUMNS,
)
