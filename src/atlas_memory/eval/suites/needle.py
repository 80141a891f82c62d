"""Needles: RULER's S-NIAH 1 to 3 (arXiv 2404.06654) and the passkey (arXiv 2305.16300).

A sentence with a key and a value stands somewhere in a long text. The question names the key.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial

from .suite import Item, Sources, Suite, all_match

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = """
able amber ancient bold brave brief bright broad calm careful cheap clean clear clever close common cool crisp
curious dark deep dense dry eager early easy exact faint fair fast fierce firm flat fresh full gentle grand grave
great happy heavy hidden high humble icy idle keen kind large late lazy light little lively lone long loud low lucky
""".split()  # noqa: SIM905
_NOUNS = """
anchor apple arrow basket beacon bell bench bird boat bottle branch brick bridge brush bucket button cabin candle
canyon carpet castle chain chair cloud coat coin comet corner cradle crown curtain desk door drum eagle engine
feather fence field finger flag flower forest fountain garden gate glacier glove hammer harbor hat helmet hill
island jacket kettle key ladder lake lamp lantern leaf lemon letter
""".split()  # noqa: SIM905
SENTENCE = re.compile(r"(?<=[.!?])\s+")
"""Between two sentences."""

Value = Callable[[random.Random], str]


def number(random: random.Random) -> str:
    """Seven digits."""
    return str(random.randint(1_000_000, 9_999_999))


def code(random: random.Random) -> str:
    """A UUID."""
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def needles(
    value: Value,
    kind: str,
    own_text: bool,
    size: Callable[[str], int],
    length: int,
    count: int,
    random: random.Random,
    sources: Sources,
) -> Iterator[Item]:
    """S-NIAH: a special magic number, or uuid, for a word; in noise, or in a text of one's own (`own_text`)."""
    for n in range(count):
        key, hidden = f"{random.choice(_ADJECTIVES)}-{random.choice(_NOUNS)}", value(random)
        needle = f"One of the special magic {kind}s for {key} is: {hidden}."
        begin = (
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the {kind} afterwards.\n"
        )
        asked = f"special magic {kind} for {key} mentioned in the provided text is"
        question = f"\nWhat is the {asked.removesuffix(' is')}? The {asked}"
        sentences = _haystack(sources if own_text else None, size, length - size(begin + needle + question), random)
        sentences.insert(random.randint(0, len(sentences)), needle)
        yield Item(str(n), begin + (" " if own_text else "\n").join(sentences), question, (hidden,))


def passkeys(
    size: Callable[[str], int], length: int, count: int, random: random.Random, sources: Sources
) -> Iterator[Item]:
    """A pass key of five digits in noise."""
    begin = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there.\n"
    )
    question = "\nWhat is the pass key? The pass key is"
    for n in range(count):
        hidden = str(random.randint(10_000, 99_999))
        needle = f"The pass key is {hidden}. Remember it. {hidden} is the pass key."
        sentences = _haystack(None, size, length - size(begin + needle + question), random)
        sentences.insert(random.randint(0, len(sentences)), needle)
        yield Item(str(n), begin + "\n".join(sentences), question, (hidden,))


def _haystack(sources: Sources | None, size: Callable[[str], int], length: int, random: random.Random) -> list[str]:
    """Sentences of about so many tokens in all, at most: noise, or a part of a text."""
    if length < 1:
        raise ValueError(f"a text of so few tokens cannot hold the question, which needs {1 - length} more")
    if sources is None:
        return [NOISE] * int(length / (size(f"{NOISE}\n" * 20) / 20))
    if not sources.haystack:
        raise ValueError("this suite hides needles in a text of your own: name it, --haystack FILE")
    begin = random.randrange(len(sources.haystack))
    text = sources.haystack[begin : begin + 8 * length]
    while len(text) < 8 * length:
        text += " " + sources.haystack
    sentences, left = list[str](), length
    for sentence in SENTENCE.split(text)[1:]:
        left -= size(sentence + " ")
        if left < 0:
            break
        sentences.append(sentence)
    return sentences


_RULER = "RULER, arXiv 2404.06654"
NEEDLES = [
    Suite("s-niah-1", _RULER, partial(needles, number, "number", False), {"match": all_match}, 32),
    Suite("s-niah-2", _RULER, partial(needles, number, "number", True), {"match": all_match}, 32),
    Suite("s-niah-3", _RULER, partial(needles, code, "uuid", True), {"match": all_match}, 64),
    Suite("passkey", "arXiv 2305.16300", passkeys, {"match": all_match}, 16),
]
