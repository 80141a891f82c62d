"""Training examples in order: documents one behind the other, dealt to rows, each row cut into segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from atlas_memory.data.text import Document
from atlas_memory.data.tokens import encode


@dataclass(frozen=True)
class Tokens:
    """Tokenised documents, one behind the other.

    Attributes:
        ids: `[tokens]` integers; each document begins with the end-of-text token, and one more follows the last, so
            that every end is predicted too.
        starts: `[documents]` int64, ascending from 0: where each begins.
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, tokenizer: Any, documents: Sequence[Document]) -> Tokens:
        """Tokenise documents, int32 ids."""
        end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
        parts, starts, length = [], [], 0
        for document in documents:
            ids = encode(tokenizer, document.text)
            starts.append(length)
            parts += [end, ids]
            length += 1 + len(ids)
        return cls(np.concatenate([*parts, end]), np.asarray(starts, dtype=np.int64))


class Segments(Dataset[dict[str, torch.Tensor]]):
    """Segments of `seq_len` tokens, of which row r reads number s at step s: item `s * rows + r`.

    In every epoch the documents, or pieces of them, are put one behind the other in another order, and the whole is cut
    into `rows` equal parts. A row reads its part in order, epoch after epoch, so segment s + 1 of a row goes on where
    segment s ended. An item depends on its index and the arguments alone: a resumed run sees what the first would have
    seen.

    Items are `{"input_ids", "shift_labels", "document_starts"}`, each `[seq_len]`: int64, int64 (the token that follows
    each token in its document) and bool (where a document, a piece or a part begins, and with it an empty memory).

    Args:
        tokens: The text.
        seq_len: Tokens in a segment.
        rows: Rows read side by side, of all processes and all accumulated batches together.
        steps: Segments a row.
        seed: Of the orders.
        carry: Cut documents into pieces of so many segments, so that a row soon goes on somewhere else: what is read in
            one step is then less like what was read in the step before. None: documents are whole.
        pass_states: The share of documents or pieces that are not marked as beginning: a row that carries its state
            begins them with what it remembers of the one before. A memory that is trained on short documents learns so
            to go on from states that only long ones lead to.

    Raises:
        ValueError: There is less than one segment a row.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        rows: int,
        steps: int,
        seed: int = 0,
        carry: int | None = None,
        pass_states: float = 0.0,
    ) -> None:
        self.ids, self.seq_len, self.rows, self.steps = tokens.ids, seq_len, rows, steps
        self.seed, self.pass_states = seed, pass_states
        total = len(tokens.ids) - 1
        self.part = total // rows  # tokens that a row reads in an epoch
        if self.part < seq_len:
            raise ValueError(
                f"data.seq_len={seq_len} times {rows} rows is more than the training text ({total} tokens): "
                "lower data.seq_len or train.batch_size, or give more text"
            )
        sizes = np.diff(tokens.starts, append=total)
        longest = total if carry is None else carry * seq_len
        inner = [np.arange(start, start + size, longest) for start, size in zip(tokens.starts, sizes, strict=True)]
        self._starts = np.concatenate(inner)
        self._sizes = np.diff(self._starts, append=total)
        self._orders: dict[int, _Order] = {}  # of this epoch and the one before

    def __len__(self) -> int:
        return self.rows * self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.rows)
        places, starts = [], []
        at, left = step * self.seq_len, self.seq_len
        while left:
            epoch, offset = divmod(at, self.part)
            length = min(left, self.part - offset)
            where, begun = self._order(epoch).read(row * self.part + offset, length)
            begun[0] |= offset == 0
            places.append(where)
            starts.append(begun)
            at, left = at + length, left - length
        place = np.concatenate(places)
        return {
            "input_ids": torch.from_numpy(self.ids[place].astype(np.int64)),
            "shift_labels": torch.from_numpy(self.ids[place + 1].astype(np.int64)),
            "document_starts": torch.from_numpy(np.concatenate(starts)),
        }

    def _order(self, epoch: int) -> _Order:
        if epoch not in self._orders:
            random = np.random.default_rng((self.seed, epoch))
            order = random.permutation(len(self._starts))
            marked = random.random(len(order)) >= self.pass_states
            made = _Order(self._starts[order], self._sizes[order], self._sizes[order].cumsum(), marked)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: made}
        return self._orders[epoch]


@dataclass(frozen=True)
class _Order:
    """The pieces of an epoch, one behind the other: where each begins in the text, how long it is, where in this order
    it ends, and whether it is marked as beginning."""

    starts: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    marked: np.ndarray

    def read(self, begin: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens `begin` to `begin + length` of this order stand in the text, int64, and which begin a piece."""
        places, begun = np.empty(length, np.int64), np.zeros(length, bool)
        n, filled = int(np.searchsorted(self.ends, begin, side="right")), 0
        while filled < length:
            inside = begin + filled - int(self.ends[n] - self.sizes[n])
            count = min(int(self.sizes[n]) - inside, length - filled)
            first = int(self.starts[n]) + inside
            places[filled : filled + count] = np.arange(first, first + count)
            begun[filled] = inside == 0 and bool(self.marked[n])
            filled, n = filled + count, n + 1
        return places, begun
