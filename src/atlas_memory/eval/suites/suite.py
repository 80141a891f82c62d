"""What a suite is: texts with something to be found in them, a question each, and how answers are scored."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
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

    @property
    def answered(self) -> str:
        """What follows the question in a text to train on."""
        return f" {', '.join(self.answers)}"


@dataclass(frozen=True)
class Sources:
    """Texts that a suite needs and does not bring.

    Attributes:
        haystack: Of needles and facts: texts, one after the other.
        babi: The folder of bAbI's files.
        split: Which of bAbI's files are read: "test" or "train".
    """

    haystack: str = ""
    babi: Path | None = None
    split: str = "test"


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: Of the option `--suite`.
        source: Where it comes from.
        version: Grows when items or scores change.
        make: Items of a length in tokens: `make(size, length, count, random, sources)`, where `size` counts the tokens
            of a text.
        scores: By name, 0 to 1, of an answer; the first is the score.
        max_new_tokens: Of an answer.
        lengths: By default.
    """

    name: str
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


def cached_items(suite: Suite, tokenizer: Any, length: int, count: int, seed: int, sources: Sources) -> list[Item]:
    """`suite.items`, kept in `HF_HOME/atlas-memory` by tokenizer, seed and texts, since counting tokens takes long."""
    words = getattr(tokenizer, "backend_tokenizer", None)
    if words is None:
        return suite.items(tokenizer, length, count, seed, sources)
    babi = [] if sources.babi is None else [(f.name, f.read_bytes()) for f in sorted(sources.babi.glob("qa*_test.txt"))]
    key = repr((suite.name, suite.version, length, count, seed, sources.haystack, babi, words.to_str()))
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    path = home / "atlas-memory" / "suites" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [Item(row["name"], row["context"], row["question"], tuple(row["answers"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        items = suite.items(tokenizer, length, count, seed, sources)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([asdict(item) for item in items]), encoding="utf-8")
        partial.replace(path)
    except OSError:  # a home that is full or cannot be written
        pass
    return items
