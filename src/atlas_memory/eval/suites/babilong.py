"""BABILong (arXiv 2406.10149): the facts of a bAbI story, scattered through books, and a question about them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from .needle import SENTENCE
from .suite import Item, Sources, Suite

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {1: PLACES, 2: PLACES, 3: PLACES, 4: PLACES, 5: ("bill", "fred", "jeff", "mary", "apple", "football", "milk")}
"""What a question of each task may be answered with."""
SHORTEST = 10  # words of a sentence of the books


def stories(file: Path) -> Iterator[tuple[list[str], str, str]]:
    """Facts, question and answer of a bAbI file: each question with the facts of its story so far."""
    facts: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        number, _, text = line.strip().partition(" ")
        if number == "1":
            facts = []
        question, tab, rest = text.partition("\t")
        if tab:
            yield list(facts), question.strip(), rest.partition("\t")[0].strip().lower()
        else:
            facts.append(text.strip())


def scattered(
    task: int, size: Callable[[str], int], length: int, count: int, random: random.Random, sources: Sources
) -> Iterator[Item]:
    """Questions of a task, whose facts stand in their order at random places between sentences of the books."""
    known = list(stories(_file(task, sources)))
    if sources.split == "train":  # each again and again, between other sentences
        asked = random.choices(known, k=count)
    elif count > len(known):
        raise ValueError(f"bAbI's task {task} has {len(known)} questions, and --count asks for {count}")
    else:
        asked = random.sample(known, count)
    for n, (facts, question, answer) in enumerate(asked):
        ask = f"\nQuestion: {question}\nAnswer:"
        sentences = _background(sources, size, length - size(" ".join(facts) + ask), random)
        places = sorted(random.randint(0, len(sentences)) for _ in facts)
        for fact, place in reversed(list(zip(facts, places, strict=True))):
            sentences.insert(place, fact)
        yield Item(str(n), " ".join(sentences), ask, (answer,))


def _file(task: int, sources: Sources) -> Path:
    if sources.babi is None:
        raise ValueError("BABILong needs the files of bAbI: name their folder, --babi FOLDER")
    name = f"qa{task}_*_{sources.split}.txt"
    found = sorted(sources.babi.glob(name))
    if not found:
        raise ValueError(f"{str(sources.babi)!r} has no file {name}")
    return found[0]


def _background(sources: Sources, size: Callable[[str], int], length: int, random: random.Random) -> list[str]:
    """Sentences of the books from a random place on, of so many tokens at most; none for a length below 1."""
    if length < 1:
        return []
    if not sources.haystack:
        raise ValueError("BABILong scatters facts through books: name them, --haystack FILE")
    begin, sentences = random.randrange(len(sources.haystack)), list[str]()
    text = sources.haystack[begin : begin + 8 * length + 2000]
    if len(text) < 8 * length + 2000:
        text += " " + sources.haystack[:begin]
    while length > 0:
        before = length
        for sentence in SENTENCE.split(text[: 8 * length + 2000])[1:]:
            if len(sentence.split()) < SHORTEST:
                continue
            sentence = " ".join(sentence.split())
            length -= size(sentence + " ")
            if length < 0:
                return sentences
            sentences.append(sentence)
        if length == before:
            raise ValueError(f"--haystack has no sentence of {SHORTEST} words")
    return sentences


def official(task: int, item: Item, answer: str) -> float:
    """Of the task's labels, those that the question does not name: the answer, up to its first full stop, must hold the
    right one and no other."""
    said = re.split(r"\.|<context>|<example>", answer.lower())[0]
    question = item.question.lower()
    found = {label for label in LABELS[task] if label in said and label not in question}
    return float(found == {one.lower() for one in item.answers})


def substring(item: Item, answer: str) -> float:
    """Whether the right label stands anywhere in it."""
    return float(item.answers[0].lower() in answer.lower())


BABILONG = [
    Suite(
        f"babilong-qa{task}",
        "BABILong, arXiv 2406.10149",
        partial(scattered, task),
        {"official": partial(official, task), "substring": substring},
        16,
    )
    for task in LABELS
]
