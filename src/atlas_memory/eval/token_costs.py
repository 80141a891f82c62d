"""The cost of each token of a text, what the memory saved on it, and repeats of passages."""

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

SHORTEST_REPEAT = 64  # tokens


@dataclass(frozen=True)
class TokenCosts:
    """What the tokens of a text, read from its beginning, cost a model.

    Attributes:
        pieces: What each token adds to the text.
        cost: Bits of each token, float64 ``[tokens]``; NaN for the first, which nothing predicts.
        saved: Bits more without writes of the memories, ``[tokens]``; None for a model without memories.
        older: Bits more with only the last ``recent // 2`` to ``recent`` tokens, or None.
        recent: Tokens, see ``older``.
        before: The place of the token in the first reading of a repeated passage, int64 ``[tokens]``; else -1.
    """

    pieces: list[str]
    cost: np.ndarray
    saved: np.ndarray | None
    older: np.ndarray | None
    recent: int | None
    before: np.ndarray

    def of_repeats(self) -> tuple[int, float, float] | None:
        """The number of repeated tokens, and their mean bits in the first and the second reading; None without any."""
        second = np.flatnonzero(self.before > 0)  # the first token has no cost
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
    """Read tokens ``[tokens]`` with a model; ``cost`` in bits, if known. ``recent``, at least 2, gives ``older``.
    ``progress`` is called with the share of each reading."""
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
    """The place of each token in the first reading of its passage, int64 ``[tokens]``; -1 outside of passages of
    ``shortest`` or more tokens that are repeated without overlap."""
    found = np.full(len(ids), -1, dtype=np.int64)
    known: dict[bytes, int] = {}
    for begin in range(len(ids) - shortest + 1):
        first = known.setdefault(ids[begin : begin + shortest].tobytes(), begin)
        if begin - first >= shortest:
            found[begin : begin + shortest] = np.arange(first, first + shortest)
    return found


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens belongs to the last of them."""
    found: list[str] = []
    pending: list[int] = []
    behind: list[int] = []
    before = ""
    for token in ids:
        pending.append(int(token))
        text = tokenizer.decode(behind + pending, clean_up_tokenization_spaces=False)[len(before) :]
        whole = not text.endswith("\ufffd") or len(pending) > DECODING_CONTEXT
        found.append(text if whole else "")
        if whole:
            behind, pending = (behind + pending)[-DECODING_CONTEXT:], []
            before = tokenizer.decode(behind, clean_up_tokenization_spaces=False)
    return found
