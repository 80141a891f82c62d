"""What a suite is: texts with something to be found in them, a question each, and how answers are scored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_memory.data.tokenization import encode


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        name: Of its own within the suite and the length.
        context: The text to be read, in which the answer stands.
        question: What follows it, up to where the model answers.
        answers: All of which an answer must hold.
    """

    name: str
    context: str
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Sources:
    """Texts that a suite needs and does not bring.

    Attributes:
        haystack: Of needles and facts: texts, one after the other.
        babi: The folder of bAbI's files.
    """

    haystack: str = ""
    babi: Path | None = None


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: Of the option `--suite`.
        shows: What it asks.
        source: Where it comes from.
        version: Grows when items or scores change.
        make: Items of a length in tokens: `make(size, length, count, random, sources)`, where `size` counts the tokens
            of a text.
        scores: By name, 0 to 1, of an answer; the first is the score.
        max_new_tokens: Of an answer.
        lengths: By default.
    """

    name: str
    shows: str
    source: str
    make: Callable[[Callable[[str], int], int, int, random.Random, Sources], Iterator[Item]]
    scores: Mapping[str, Callable[[Item, str], float]]
    max_new_tokens: int
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    version: int = 1

    def items(self, tokenizer: Any, length: int, count: int, seed: int, sources: Sources) -> list[Item]:
        """The items of a length, with the answer at most `length` tokens. ValueError where that is too short, or a
        source is missing."""
        drawn = random.Random(f"{self.name} {length} {seed}")

        def size(text: str) -> int:
            return len(encode(tokenizer, text))

        return list(self.make(size, length - self.max_new_tokens, count, drawn, sources))


def all_match(item: Item, answer: str) -> float:
    """The share of the answers that stand in it (RULER's `string_match_all`)."""
    return sum(one.lower() in answer.lower() for one in item.answers) / len(item.answers)
