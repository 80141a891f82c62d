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
from atlas_memory.models.saved_memory import Memory
from atlas_memory.monitor.hooks import eval_mode, memory_writes

SEGMENT = 256  # tokens given to the model in one call
ROWS, WINDOWS = 8, 64  # streams, and windows of recent tokens, in a batch
Progress = Callable[[float], None]
"""Called with the share of a text that has been read."""


def check_finite(cost: np.ndarray) -> None:
    """ValueError unless all costs are finite."""
    if not np.isfinite(cost).all():
        raise ValueError(
            "the text is read with a loss that is nan or inf: weights of the model are damaged, or options of its rule "
            "let its memories diverge"
        )


def evaluation_length(seq_len: int) -> int:
    """Tokens of a stream by which a model trained on `seq_len` is evaluated."""
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
        """Itself; ValueError if not finite."""
        check_finite(self.bits)
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

    def standard_errors(self) -> np.ndarray:
        """Of `by_position` over streams, `[buckets]`; 0 for one stream."""
        return _paired(self.bits, self.bytes)[1]

    def margin(self, other: Score) -> tuple[float, float]:
        """The bits per byte that `other` needs more on the same streams, and their standard error over streams."""
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
    """sum(gaps) / sum(sizes) over streams (the first axis), and its standard error, 0 for one stream."""
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
    progress: Progress | None = None,
    memory: Memory | None = None,
) -> Score:
    """Read the documents as streams of at most `length` tokens, each from the end-of-text token and an empty memory, so
    that every byte is predicted once. Memory use does not depend on `length`.

    Args:
        writes: False: the memories stay as training left them.
        streams: How many are read: the longest, from documents in turn and random places. None: all.
        recent: Give each token only the last recent / 2 to `recent` tokens, to show what older ones are worth.
        memory: What has been read before each stream, in place of the end-of-text token alone; not with `recent`.

    Raises:
        ValueError: There is no text, or an argument is too small.
    """
    for name, value, least in (("length", length, 1), ("streams", streams, 1), ("recent", recent, 2)):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    rows = _streams(tokenizer, documents, length, streams)
    if not rows:
        raise ValueError("no text to evaluate: the documents are empty")
    if memory is not None:
        memory.check_model(model)
    begin = tokenizer.eos_token_id if memory is None else memory.last_token
    edges = _edges(max(len(ids) for ids, _ in rows))
    bits, counts = np.zeros((2, len(rows), len(edges) - 1))
    with eval_mode(model), memory_writes(model, writes), torch.inference_mode():
        for first in range(0, len(rows), ROWS):
            batch = rows[first : first + ROWS]
            longest = max(len(ids) for ids, _ in batch)
            tokens = torch.full((len(batch), longest + 1), begin)  # right-padded
            for i, (ids, _) in enumerate(batch):
                tokens[i, 1 : len(ids) + 1] = torch.from_numpy(ids.astype(np.int64))
            part = _part(progress, first / len(rows), len(batch) / len(rows))
            cache = None if memory is None else memory.cache()
            if cache is not None:
                cache.batch_repeat_interleave(len(batch))
            nats = token_nats(model, tokens.to(model.device), recent, part, cache)
            for i, (ids, sizes) in enumerate(batch):
                bucket = np.searchsorted(edges, np.arange(len(ids)), side="right") - 1
                np.add.at(bits[first + i], bucket, nats[i, : len(ids)] / math.log(2))
                np.add.at(counts[first + i], bucket, sizes)
    while bits.shape[1] > 1 and not counts[:, -1].any():  # only the ends of characters
        edges = (*edges[:-2], edges[-1])
        bits, counts = (np.concatenate([x[:, :-2], x[:, -2:].sum(1, keepdims=True)], 1) for x in (bits, counts))
    return Score(edges, bits, counts)


def _streams(
    tokenizer: Any, documents: Sequence[Document], length: int, limit: int | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, bytes per token) of the streams, longest first, one from each document before a second from any."""
    found, random = [], np.random.default_rng(0)
    for index, document in enumerate(documents):
        ids, sizes = encode(tokenizer, document.text), bytes_per_token(tokenizer, document.text)
        starts = range(0, len(ids), length)
        # In random order: beginnings of files differ from the rest, which would look like an effect of position.
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


def _part(progress: Progress | None, begin: float, share: float) -> Progress | None:
    return None if progress is None else lambda done: progress(begin + share * done)


def token_nats(
    model: Any,
    tokens: torch.Tensor,
    recent: int | None = None,
    progress: Progress | None = None,
    cache: Any = None,
) -> np.ndarray:
    """The negative log-likelihood of every token but the first, `[rows, tokens - 1]`; with `recent`, given the last
    ``recent // 2`` to `recent` tokens only: the second halves of windows that overlap by half. `cache`: what has been
    read before."""
    count = tokens.shape[1] - 1
    if recent is None:
        found = []
        for inputs, targets in zip(tokens[:, :-1].split(SEGMENT, 1), tokens[:, 1:].split(SEGMENT, 1), strict=True):
            out = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits.float().transpose(1, 2)
            found.append(nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
            if progress is not None:
                progress(min(1.0, len(found) * SEGMENT / max(1, count)))
        return torch.cat(found, 1).double().numpy()
    half = recent // 2
    whole = nn.functional.pad(tokens, (0, -count % half))  # padding on the right changes nothing
    first = token_nats(model, whole[:, : half + 1])
    if whole.shape[1] == half + 1:
        return first[:, :count]
    groups = whole.unfold(1, 2 * half + 1, half).flatten(0, 1).split(WINDOWS)  # [rows * windows, tokens]
    parts = [
        token_nats(model, group, None, _part(progress, n / len(groups), 1 / len(groups)))[:, half:]
        for n, group in enumerate(groups)
    ]
    return np.concatenate([first, np.concatenate(parts).reshape(len(tokens), -1)], 1)[:, :count]
