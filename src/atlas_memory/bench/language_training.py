"""Language models of equal size, trained on equal tokens of a text, and read on past their training length."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch

from atlas_memory import set_execution
from atlas_memory.data import Corpus, Tokens
from atlas_memory.data.tokenization import encode, learned_tokenizer
from atlas_memory.eval.perplexity import bits_per_byte
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.models import AtlasForCausalLM

from .grid import Cell
from .task import Rows, Task
from .task_training import task_model, train_on

HEAD, STREAMS = 32, 16
BEYOND = 32  # training lengths that held-out text is read for


def run_language(cell: Cell, settings: dict[str, Any], path: str | None) -> dict[str, float]:
    """Train on what `Corpus.load(path)` reads; bits per byte of held-out text by tokens since its beginning, and the
    tokens of training in a second."""
    length, corpus = settings["length"], Corpus.load(path)
    tokenizer = learned_tokenizer((document.text for document in corpus.train), settings["vocabulary"])
    text = Tokens.of(tokenizer, corpus.train).ids
    if len(text) <= length:
        raise ValueError(f"{corpus.source} has {len(text):,} tokens to train on, and a sequence takes {length + 1:,}")
    longest = max(len(encode(tokenizer, document.text)) for document in corpus.held_out)
    if longest < length:
        raise ValueError(f"{corpus.source} has {longest:,} tokens held out in a piece, fewer than {length:,}")
    torch.manual_seed(cell["seed"])
    model = sized_model(cell["model"], len(tokenizer), settings)
    if settings["compiled"] and BLOCKS[model.config.block].memory:
        set_execution(model, compiled=True)
    task = Task("language", len(tokenizer), length, partial(crops, text, length))
    ends: list[float] = []  # of the steps, of which the first may compile

    def progress(_: float) -> None:
        ends.append(time.perf_counter())

    steps, tokens = settings["steps"], settings["tokens"]
    train_on(model, [task], steps, tokens, cell["learning_rate"], cell["seed"], progress=progress)
    score = bits_per_byte(model, tokenizer, corpus.held_out, BEYOND * length, streams=STREAMS).checked()
    numbers, first = dict[str, float](), 0
    for n, end in enumerate(score.edges[1:], 1):
        if end >= length:
            bits, size = (of[:, first:n].sum() for of in (score.bits, score.bytes))
            numbers[f"to {end:,}"], first = float(bits / size), n
    speed = tokens // length * length * (steps - 1) / (ends[-1] - ends[0])
    return numbers | {"parameters": float(model.num_parameters()), "tokens/s": speed}


def sized_model(name: str, vocabulary: int, settings: dict[str, Any]) -> AtlasForCausalLM:
    """A model with MLPs as wide as makes it nearest in size to softmax attention with MLPs of 8/3 of its width."""
    sizes = vocabulary, settings["width"], HEAD, settings["layers"], settings["length"]
    with torch.device("meta"):
        wanted = task_model("attention", *sizes).num_parameters()
        narrow, wider = (task_model(name, *sizes, intermediate_size=n).num_parameters() for n in (8, 16))
    return task_model(name, *sizes, intermediate_size=8 * max(1, 1 + round((wanted - narrow) / (wider - narrow))))


def crops(text: np.ndarray, length: int, rows: int, random: np.random.Generator, asked: bool) -> Rows:
    """Random stretches of a text's tokens `[tokens]`, and the token that follows each."""
    starts = random.integers(0, len(text) - length, rows)
    found = text[starts[:, None] + np.arange(length + 1)].astype(np.int64)
    return found[:, :-1], found[:, 1:]
