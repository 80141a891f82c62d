"""The cost of a text token by token, what writing saved on it, and whether it had been read before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atlas_memory.data.tokenization import DECODING_CONTEXT
from atlas_memory.eval.perplexity import Progress, check_finite, token_nats
from atlas_memory.monitor.hooks import eval_mode, memory_layers, memory_writes

SHORTEST_REPEAT = 64
"""Tokens of a passage that has to stand a second time, at the least, to count as a repeat."""


@dataclass(frozen=True)
class TokenCosts:
    """What the tokens of a text, read from its beginning, cost a model.

    Attributes:
        pieces: What each token adds to the text.
        cost: Bits of each token, float64 ``[tokens]``; NaN for the first, which nothing predicts.
        saved: How many bits more the token costs if the memories stay as training left them, ``[tokens]``; None for a
            model without memories.
        older: How many bits more it costs if all but the last ``recent // 2`` to ``recent`` tokens are taken away; None
            where that was not asked.
        recent: Tokens, see ``older``.
        before: Where the same token stood in the same passage when it was read first, int64 ``[tokens]``; -1 where
            nothing is read again.
    """

    pieces: list[str]
    cost: np.ndarray
    saved: np.ndarray | None
    older: np.ndarray | None
    recent: int | None
    before: np.ndarray

    def of_repeats(self) -> tuple[int, float, float] | None:
        """How many tokens are of passages that were read before, and the bits each of them cost on average when they
        were read first and when they were read again; None where there are none."""
        second = np.flatnonzero(self.before > 0)  # the first token of all has no cost
        if not len(second):
            return None
        return len(second), float(self.cost[self.before[second]].mean()), float(self.cost[second].mean())


def token_costs(
    model: Any,
    tokenizer: Any,
    ids: np.ndarray,
    cost: np.ndarray | None = None,
    recent: int | None = None,
    progress: Progress | None = None,
) -> TokenCosts:
    """Read tokens ``[tokens]`` with a model; ``cost`` in bits, where it is known. With ``recent``, of at least 2, read
    them without what is older too. ``progress`` is called for each of these readings with its share."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)

    def bits(last: int | None = None) -> np.ndarray:
        with eval_mode(model), torch.inference_mode():
            nats = token_nats(model, tokens, last, progress)
        check_finite(nats)
        return np.append(np.nan, nats[0] / math.log(2))

    cost, saved = bits() if cost is None else cost, None
    older = None if recent is None else bits(recent) - cost
    if memory_layers(model):
        with memory_writes(model, False):
            saved = bits() - cost
    return TokenCosts(token_texts(tokenizer, ids.tolist()), cost, saved, older, recent, find_repeats(ids))


def find_repeats(ids: np.ndarray, shortest: int = SHORTEST_REPEAT) -> np.ndarray:
    """For each token the place at which it stood when its passage was first read, int64 ``[tokens]``; -1 outside of
    passages of ``shortest`` tokens or more that are read a second time. Passages do not overlap with themselves."""
    found = np.full(len(ids), -1, dtype=np.int64)
    known: dict[bytes, int] = {}
    for begin in range(len(ids) - shortest + 1):
        first = known.setdefault(ids[begin : begin + shortest].tobytes(), begin)
        if begin - first >= shortest:
            found[begin : begin + shortest] = np.arange(first, first + shortest)
    return found


def insert_repeat(ids: np.ndarray, length: int, distance: int) -> np.ndarray:
    """Tokens ``[tokens]`` in which the passage of ``length`` tokens that begins after a quarter of them stands a second
    time, ``distance`` tokens after its end, or at the end of all."""
    begin = len(ids) // 4
    passage = ids[begin : begin + length]
    at = min(len(ids), begin + length + distance)
    return np.concatenate([ids[:at], passage, ids[at:]])


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens stands with the last of them. Each is decoded
    behind a few before it."""
    found: list[str] = []
    held: list[int] = []
    behind: list[int] = []
    before = ""
    for token in ids:
        held.append(int(token))
        text = tokenizer.decode(behind + held, clean_up_tokenization_spaces=False)[len(before) :]
        whole = not text.endswith("\ufffd") or len(held) > DECODING_CONTEXT
        found.append(text if whole else "")
        if whole:
            behind, held = (behind + held)[-DECODING_CONTEXT:], []
            before = tokenizer.decode(behind, clean_up_tokenization_spaces=False)
    return found
