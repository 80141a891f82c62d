"""Bits per byte of held-out text, by position in the stream, with the memory's writes on or off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from atlas_memory.data.sources import Document
from atlas_memory.data.tokenization import bytes_per_token, encode
from atlas_memory.monitor.hooks import eval_mode, memory_writes

SEGMENT = 256  # tokens given to the model in one call
ROWS, WINDOWS = 8, 64  # streams, and windows of recent tokens, that are read side by side
Told = Callable[[float], None]
"""What is told, while something is read, which share of it has been."""


def check_read(cost: np.ndarray) -> None:
    """ValueError unless what a text costs a model are numbers."""
    if not np.isfinite(cost).all():
        raise ValueError(
            "the text is read with a loss that is nan or inf: weights of the model are damaged, or options of its rule "
            "let its memories diverge"
        )


def reading_length(seq_len: int) -> int:
    """How many tokens of a stream tell what a model that was trained on `seq_len` does beyond them."""
    return max(8 * seq_len, 8192)


@dataclass(frozen=True)
class Score:
    """Bits and bytes of every stream in every bucket of positions.

    edges: bucket j holds positions edges[j] <= t < edges[j + 1] of a stream, counted in tokens.
    bits, bytes: float64 `[streams, buckets]`.
    """

    edges: tuple[int, ...]
    bits: np.ndarray
    bytes: np.ndarray

    def checked(self) -> Score:
        """The score itself; ValueError if it is of a model that does not compute with numbers."""
        check_read(self.bits)
        return self

    @property
    def overall(self) -> float:
        """Bits per byte over everything that was read."""
        return float(self.bits.sum() / self.bytes.sum())

    @property
    def by_position(self) -> np.ndarray:
        """Bits per byte in each bucket, `[buckets]`."""
        return self.bits.sum(0) / self.bytes.sum(0)

    @property
    def reached(self) -> np.ndarray:
        """How many streams reach each bucket, `[buckets]`."""
        return (self.bytes > 0).sum(0)

    def margin(self, other: Score) -> tuple[float, float]:
        """How many bits per byte `other` needs more on the same streams, and the standard error over
        streams."""
        value, error = _paired((other.bits - self.bits).sum(1), self.bytes.sum(1))
        return float(value), float(error)

    def margin_by_position(self, other: Score) -> np.ndarray:
        """`margin` in each bucket, `[buckets, 2]`: value and standard error."""
        return np.stack(_paired(other.bits - self.bits, self.bytes), 1)

    def after(self, position: int) -> Score | None:
        """The buckets that lie wholly at or after `position`; None if there are none."""
        first = int(np.searchsorted(self.edges, position))
        if first >= len(self.edges) - 1:
            return None
        return Score(self.edges[first:], self.bits[:, first:], self.bytes[:, first:])

    def to_dict(self) -> dict[str, Any]:
        buckets = zip(self.edges, self.edges[1:], self.by_position, self.bytes.sum(0), self.reached, strict=False)
        return {
            "bits_per_byte": self.overall,
            "bytes": int(self.bytes.sum()),
            "streams": len(self.bits),
            "by_position": [
                {"from": start, "to": stop, "bits_per_byte": float(bits), "bytes": int(count), "streams": int(reached)}
                for start, stop, bits, count, reached in buckets
            ],
        }


def _paired(gaps: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ratio sum(gaps) / sum(sizes) over those streams (the first axis) that have any bytes, and its standard error,
    0 for one stream."""
    ratio = gaps.sum(0) / sizes.sum(0)
    n = (sizes > 0).sum(0)
    rest = gaps - ratio * sizes
    error = np.sqrt((rest**2).sum(0) * n / np.maximum(n - 1, 1)) / sizes.sum(0)
    return ratio, np.where(n > 1, error, 0.0)


def bits_per_byte(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    length: int,
    writes: bool = True,
    streams: int | None = None,
    recent: int | None = None,
    told: Told | None = None,
) -> Score:
    """Read the documents as streams of at most `length` tokens, in segments, carrying the state between them.

    Each document is cut into streams that start with the end-of-text token and an empty memory; every byte is
    predicted once. Memory use does not depend on `length`. `recent` empties the memory so often that each token is
    read with the last recent / 2 to `recent` tokens in it and nothing older: against the same text read without,
    it tells what older tokens are worth. `streams` limits how many are read: the longest
    ones, taken in turn from the documents at random places, so that with enough text all have the full length
    and every position is measured on the same streams. `told`: is told how much has been read, while it is. ValueError
    if there is no text or an argument is below 1.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    if streams is not None and streams < 1:
        raise ValueError(f"streams={streams} must be at least 1")
    if recent is not None and recent < 2:
        raise ValueError(f"recent={recent} must be at least 2")
    cut = _cut(tokenizer, documents, length, streams)
    if not cut:
        raise ValueError("no text to evaluate: the documents are empty")
    edges = _edges(max(len(ids) for ids, _ in cut))
    bits, counts = np.zeros((len(cut), len(edges) - 1)), np.zeros((len(cut), len(edges) - 1))
    with eval_mode(model), memory_writes(model, writes), torch.inference_mode():
        for first in range(0, len(cut), ROWS):
            rows = cut[first : first + ROWS]
            part = _part(told, first / len(cut), len(rows) / len(cut))
            for row, nats in enumerate(_nats(model, tokenizer.eos_token_id, [ids for ids, _ in rows], recent, part)):
                bucket = np.searchsorted(edges, np.arange(len(nats)), side="right") - 1
                np.add.at(bits[first + row], bucket, nats / math.log(2))
                np.add.at(counts[first + row], bucket, rows[row][1])
    return _with_bytes(Score(edges, bits, counts))


def _with_bytes(score: Score) -> Score:
    """The same with a last bucket that has no bytes, only the ends of characters, taken into the one before."""
    edges, bits, counts = score.edges, score.bits, score.bytes
    while bits.shape[1] > 1 and not counts[:, -1].any():
        edges = (*edges[:-2], edges[-1])
        bits, counts = (np.concatenate([x[:, :-2], x[:, -2:].sum(1, keepdims=True)], 1) for x in (bits, counts))
    return Score(edges, bits, counts)


def _cut(
    tokenizer: Any, documents: Sequence[Document], length: int, limit: int | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, bytes per token) of the streams, longest first, and of equally long ones one from each document
    before a second from any."""
    found, random = [], np.random.default_rng(0)
    for index, document in enumerate(documents):
        ids, sizes = encode(tokenizer, document.text), bytes_per_token(tokenizer, document.text)
        starts = range(0, len(ids), length)
        # Not in the order of the text: the beginnings of files are unlike the rest, which would look like an
        # effect of position.
        for turn, start in zip(random.permutation(len(starts)).tolist(), starts, strict=True):
            piece = slice(start, start + length)
            found.append((-len(ids[piece]), turn, index, ids[piece], sizes[piece]))
    found.sort(key=lambda stream: stream[:3])
    return [(ids, sizes) for *_, ids, sizes in found[:limit]]


def _edges(longest: int) -> tuple[int, ...]:
    """0, 64, 128, 256, ... up to the longest stream."""
    edges = [0]
    while edges[-1] < longest:
        edges.append(min(longest, max(64, 2 * edges[-1])))
    return tuple(edges)


def _part(told: Told | None, begin: float, share: float) -> Told | None:
    """What is told of a part what `told` is told of the whole."""
    return None if told is None else lambda done: told(begin + share * done)


def _nats(model: Any, start: int, rows: list[np.ndarray], recent: int | None, told: Told | None) -> list[np.ndarray]:
    """The negative log-likelihood of every token of every row, float64 `[tokens of the row]`."""
    longest = max(len(row) for row in rows)
    tokens = torch.full((len(rows), longest + 1), start, dtype=torch.long)  # padding on the right changes nothing
    for i, row in enumerate(rows):
        tokens[i, 1 : len(row) + 1] = torch.from_numpy(row.astype(np.int64))
    tokens = tokens.to(model.device)
    nats = token_nats(model, tokens, told) if recent is None else recent_nats(model, tokens, recent, told)
    return [nats[i, : len(row)] for i, row in enumerate(rows)]


def token_nats(model: Any, tokens: torch.Tensor, told: Told | None = None) -> np.ndarray:
    """The negative log-likelihood of every token but the first, from an empty memory: `[rows, tokens - 1]`."""
    cache, found = None, []
    for inputs, targets in zip(tokens[:, :-1].split(SEGMENT, 1), tokens[:, 1:].split(SEGMENT, 1), strict=True):
        out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits.float().transpose(1, 2)
        found.append(nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
        if told is not None:
            told(min(1.0, len(found) * SEGMENT / max(1, tokens.shape[1] - 1)))
    return torch.cat(found, 1).double().numpy()


def recent_nats(model: Any, tokens: torch.Tensor, recent: int, told: Told | None = None) -> np.ndarray:
    """As ``token_nats``, from a memory of the last ``recent // 2`` to ``recent`` tokens only: windows of so many that
    overlap by half, read side by side, of which the second halves count."""
    half, count = recent // 2, tokens.shape[1] - 1
    whole = nn.functional.pad(tokens, (0, -count % half))  # padding on the right changes nothing
    found = [token_nats(model, whole[:, : half + 1])]
    if whole.shape[1] > half + 1:
        windows = whole.unfold(1, 2 * half + 1, half)  # [rows, windows, tokens]
        groups = windows.flatten(0, 1).split(WINDOWS)
        parts = [
            token_nats(model, group, _part(told, n / len(groups), 1 / len(groups)))[:, half:]
            for n, group in enumerate(groups)
        ]
        found.append(np.concatenate(parts).reshape(len(tokens), -1))
    return np.concatenate(found, 1)[:, :count]
