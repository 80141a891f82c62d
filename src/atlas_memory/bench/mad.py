"""MAD's six tasks in their baseline settings (Mechanistic Architecture Design, arXiv 2403.17844).

As in MAD, training asks for every next token of the three recall tasks, and the evaluation for values only. Two of
MAD's own quirks are kept, since its figures have them: fuzzy keys are always three tokens long in the evaluation, and
the label of the compression token counts.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from .task import IGNORED, Rows, Task

MOTIF = 3  # tokens of a fuzzy key or value, at most
MAP_SEED = 12345  # of what is memorised: the same in training and evaluation


def in_context_recall(
    vocabulary: int, length: int, noise: int, share: float, rows: int, random: np.random.Generator, asked: bool
) -> Rows:
    """Pairs of a key and a value, which is always the same in a sequence. Asked: values of keys that came before.
    A `share` of the pairs is replaced by two of `noise` tokens."""
    pairs, half = length // 2, (vocabulary - noise) // 2
    values = random.integers(half, vocabulary - noise, (rows, half))  # of each key, in this sequence
    keys = random.integers(0, half, (rows, pairs))
    lost = (random.random((rows, pairs)) < share) & (np.arange(pairs) != random.integers(0, pairs, (rows, 1)))
    lost[:, -1] = False
    for row in range(rows):  # the last key is one that came before
        keys[row, -1] = random.choice(keys[row, :-1][~lost[row, :-1]]) if not lost[row, :-1].all() else keys[row, -1]
    order = np.where(lost, -1, keys)
    seen = np.stack([(order[:, :i] == order[:, i : i + 1]).any(1) for i in range(pairs)], 1) & ~lost
    ids = np.stack([keys, np.take_along_axis(values, keys, 1)], 2)
    if noise:
        ids = np.where(lost[..., None], random.integers(vocabulary - noise, vocabulary, ids.shape), ids)
    answers = np.stack([np.full_like(keys, IGNORED), np.where(seen, ids[..., 1], IGNORED)], 2)
    ids, answers = ids.reshape(rows, -1), answers.reshape(rows, -1)
    return ids[:, :-1], (answers if asked else ids)[:, 1:]


def fuzzy_recall(vocabulary: int, length: int, rows: int, random: np.random.Generator, asked: bool) -> Rows:
    """As `in_context_recall`, but keys and values are one to three different tokens long. Sequences are padded on the
    left with the last token."""
    half, pad = (vocabulary - 1) // 2, vocabulary - 1

    def motif(first: int, stop: int, size: int) -> tuple[int, ...]:
        return tuple((first + random.permutation(stop - first)[:size]).tolist())

    def key() -> tuple[int, ...]:
        return motif(0, half, MOTIF if asked else int(random.integers(1, MOTIF + 1)))

    def value() -> tuple[int, ...]:
        return motif(half, vocabulary - 1, int(random.integers(1, MOTIF + 1)))

    ids, labels = np.full((rows, length + 1), pad), np.full((rows, length + 1), IGNORED)
    for row in range(rows):
        probe = key()
        known, presented, tokens, answers = {probe: value()}, set[tuple[int, ...]](), list[int](), list[int]()
        stop = length - len(probe) - len(known[probe]) - 2 * MOTIF
        place = int(random.integers(0, stop - 2 * MOTIF))  # in MAD up to the end, so that some are never shown
        while len(tokens) < stop:
            k = probe if probe not in presented and len(tokens) >= place else key()
            v = known.setdefault(k, value())
            tokens += [*k, *v]
            answers += [IGNORED] * len(k) + (list(v) if k in presented else [IGNORED] * len(v))
            presented.add(k)
        tokens += [*probe, *known[probe]]
        answers += [IGNORED] * len(probe) + list(known[probe])
        ids[row, -len(tokens) :], labels[row, -len(tokens) :] = tokens, answers
    return ids[:, :-1], (labels if asked else ids)[:, 1:]


def selective_copying(
    vocabulary: int, length: int, copied: int, rows: int, random: np.random.Generator, asked: bool
) -> Rows:
    """`copied` tokens among blanks, a token that asks, and as many blanks, at which they are named in their order."""
    ask, blank = vocabulary - 1, vocabulary - 2
    room = length - copied - 1
    tokens = random.integers(0, vocabulary - 2, (rows, copied))
    # MAD puts every blank before one of the tokens, drawn evenly, so that the last token stands just before the ask.
    before = random.integers(0, copied, (rows, room - copied))
    at = np.stack([(before <= n).sum(1) for n in range(copied)], 1) + np.arange(copied)
    ids, labels = np.full((rows, length), blank), np.full((rows, length), IGNORED)
    np.put_along_axis(ids, at, tokens, 1)
    ids[:, room] = ask
    labels[:, room + 1 :] = tokens
    return ids, labels


def compression(vocabulary: int, length: int, rows: int, random: np.random.Generator, asked: bool) -> Rows:
    """Random tokens and a last one, at which all of them must be known."""
    ids = random.integers(0, vocabulary - 1, (rows, length))
    ids[:, -1] = vocabulary - 1
    return ids, ids.copy()


def memorisation(vocabulary: int, length: int, rows: int, random: np.random.Generator, asked: bool) -> Rows:
    """Keys, each followed by a token that asks for its value, which is the same in all sequences."""
    half, ask = (vocabulary - 1) // 2, vocabulary - 1
    values = np.random.default_rng(MAP_SEED).permutation(np.arange(half, vocabulary - 1))[:half]
    keys = random.integers(0, half, (rows, length // 2))
    ids, labels = np.full((rows, length), ask), np.full((rows, length), IGNORED)
    ids[:, ::2], labels[:, 1::2] = keys, values[keys]
    return ids, labels


TRAINED = 12_800  # sequences; of memorisation 256
ASKED = 1_280
MAD = [
    Task("compression", 16, 32, partial(compression, 16, 32), TRAINED, autoencodes=True),
    Task("recall", 16, 127, partial(in_context_recall, 16, 128, 0, 0.0), TRAINED),
    Task("noisy-recall", 32, 127, partial(in_context_recall, 32, 128, 16, 0.2), TRAINED),
    Task("fuzzy-recall", 16, 128, partial(fuzzy_recall, 16, 128), TRAINED),
    Task("selective-copying", 16, 256, partial(selective_copying, 16, 256, 16), TRAINED),
    Task("memorisation", 256, 32, partial(memorisation, 256, 32), 256),
]
"""The six tasks."""
