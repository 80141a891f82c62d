"""Multi-query associative recall, MQAR (Zoology, arXiv 2312.04927): key-value pairs, then the keys again."""

from __future__ import annotations

from functools import partial

import numpy as np

from .task import IGNORED, Rows, Task

VOCABULARY = 8192  # Zoology's
POWER = 0.01  # of the distances from pairs to questions
FILLER = 0


def recall(pairs: int, length: int, vocabulary: int, rows: int, random: np.random.Generator, asked: bool) -> Rows:
    """`pairs` keys and their values come first. Each key is then asked once, at an even place whose distance from the
    first of them has the density a x^(a - 1), with a = 0.01; the label there is its value. Other places hold token 0.
    Keys are from the first half of the vocabulary, values from the second.
    """
    half, places = vocabulary // 2, (length - 2 * pairs) // 2
    keys = 1 + _distinct(rows, half - 1, pairs, random)
    values = half + _distinct(rows, vocabulary - half, pairs, random)
    density = POWER * np.arange(1, places + 1) ** (POWER - 1)
    # With Gumbel noise the largest are a draw without replacement.
    noisy = np.log(density) + random.gumbel(size=(rows, places))
    at = 2 * pairs + 2 * np.argpartition(-noisy, pairs - 1, 1)[:, :pairs]
    at = random.permuted(at, axis=1)
    ids = np.full((rows, length), FILLER)
    labels = np.full((rows, length), IGNORED)
    ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    np.put_along_axis(ids, at, keys, 1)
    np.put_along_axis(labels, at, values, 1)
    return ids, labels


def _distinct(rows: int, kinds: int, count: int, random: np.random.Generator) -> np.ndarray:
    """`[rows, count]` numbers below `kinds`, different in a row."""
    return np.argpartition(random.random((rows, kinds)), count - 1, 1)[:, :count]


def mqar(pairs: int, length: int, vocabulary: int = VOCABULARY) -> Task:
    """The task with so many pairs in sequences of `length` (Zoology, arXiv 2312.04927).

    Raises:
        ValueError: the pairs and their questions do not fit, or the vocabulary has too few keys.
    """
    if pairs < 1 or length < 4 * pairs or length % 2:
        raise ValueError(
            f"MQAR of {pairs} pairs needs an even length of at least {4 * max(pairs, 1)} tokens, got {length}"
        )
    if vocabulary // 2 - 1 < pairs:
        raise ValueError(f"MQAR of {pairs} pairs needs {2 * pairs + 2} tokens in its vocabulary, got {vocabulary}")
    return Task(f"mqar {pairs}/{length}", vocabulary, length, partial(recall, pairs, length, vocabulary))
