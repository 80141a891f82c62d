"""Training a small model on the questions of a suite, and asking it in texts that are longer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from atlas_memory.data.tokenization import encode, learned_tokenizer, padding_token
from atlas_memory.eval.suites import SUITES
from atlas_memory.eval.suites.evaluation import answers
from atlas_memory.eval.suites.suite import Item, Sources, Suite

from .grid import Cell
from .task import IGNORED, Rows, Task
from .task_training import share_of_rows, task_model, train_on

HEAD, SEED = 32, 99
READ = 2000  # texts that the tokenizer is learned from
TRIES = 100  # of texts short enough: facts are not cut


def run_suite(cell: Cell, settings: dict[str, Any], train: Sources, asked: Sources) -> dict[str, float]:
    """Train on texts of `settings["trained"]` tokens; the share of questions that are answered to the letter, the
    likeliest token each time, in texts of `settings["lengths"]`. With `settings["strict"]` also the share after the
    text is gone (see `evaluate_suite`).

    Args:
        train: What the texts to train on are made of.
        asked: What the others are made of.
    """
    torch.manual_seed(cell["seed"])
    suite, longest = SUITES[settings["suite"]], max(settings["trained"])
    tokenizer = suite_tokenizer(suite, longest, settings["vocabulary"], train)
    model = task_model(cell["model"], len(tokenizer), settings["width"], HEAD, window=longest)
    tasks = [suite_task(suite, tokenizer, length, train) for length in settings["trained"]]
    train_on(model, tasks, settings["steps"], settings["tokens"], cell["learning_rate"], cell["seed"])
    found = {n: suite_task(suite, tokenizer, n, asked) for n in settings["lengths"]}
    shares = {f"{n:,} tokens": share_of_rows(model, task, settings["asked"], SEED) for n, task in found.items()}
    if settings["strict"]:
        for n in settings["lengths"]:
            items = suite.items(tokenizer, n, settings["asked"], SEED, asked)
            shares[f"{n:,} tokens, strict"] = strict_share(model, tokenizer, items, suite.max_new_tokens)
    return shares | {"parameters": float(model.num_parameters())}


def strict_share(model: Any, tokenizer: Any, items: Sequence[Item], tokens: int) -> float:
    """The share of questions that are answered to the letter by what the memory holds of the texts."""
    model.config.bos_token_id, model.config.eos_token_id = None, tokenizer.eos_token_id  # with it a text begins
    said = answers(model, tokenizer, items, tokens, strict=True)
    return sum(answer.strip() == item.answered.strip() for answer, item in zip(said, items, strict=True)) / len(items)


def check_sources(settings: dict[str, Any], train: Sources, asked: Sources) -> None:
    """ValueError where a text is missing or too short a length is asked for, before anything is trained."""
    suite, longest = SUITES[settings["suite"]], max(settings["trained"])
    tokenizer = suite_tokenizer(suite, longest, settings["vocabulary"], train)
    for lengths, sources in ((settings["trained"], train), (settings["lengths"], asked)):
        suite_task(suite, tokenizer, min(lengths), sources).rows(1, 0, asked=False)


def suite_tokenizer(suite: Suite, length: int, vocabulary: int, sources: Sources) -> Any:
    """Byte-level BPE of the texts to train on."""
    texts = _items(suite, lambda text: len(text) // 4, length, READ, 0, sources)
    return learned_tokenizer((item.context + item.question + item.answered for item in texts), vocabulary)


def suite_task(suite: Suite, tokenizer: Any, length: int, sources: Sources) -> Task:
    """A suite's texts of up to `length` tokens as a task: at the end of each the answer is asked, and its end."""
    return Task(suite.name, len(tokenizer), length, partial(_rows, suite, tokenizer, length, sources))


def _rows(
    suite: Suite, tokenizer: Any, length: int, sources: Sources, rows: int, random: np.random.Generator, asked: bool
) -> Rows:
    ids = np.full((rows, length), padding_token(tokenizer))
    labels = np.full((rows, length), IGNORED)
    end, seed, n, tries = tokenizer.eos_token_id, int(random.integers(2**32)), 0, 0

    def size(text: str) -> int:
        return len(encode(tokenizer, text))

    while n < rows:
        for item in _items(suite, size, length, rows - n, seed + tries, sources):
            prompt, answer = (encode(tokenizer, text) for text in (item.context + item.question, item.answered))
            text = np.concatenate([[end], prompt, answer, [end]])  # shorter by what an answer may take at most
            if len(text) - 1 <= length:
                ids[n, : len(text) - 1] = text[:-1]
                labels[n, len(prompt) : len(text) - 1] = text[len(prompt) + 1 :]
                n += 1
        tries += 1
        if not n and tries == TRIES:
            raise ValueError(f"no text of {suite.name} fits into {length:,} tokens: its facts alone take more")
    return ids, labels


def _items(suite: Suite, size: Any, length: int, count: int, seed: int, sources: Sources) -> Iterator[Item]:
    return suite.make(size, length - suite.max_new_tokens, count, random.Random(seed), sources)
