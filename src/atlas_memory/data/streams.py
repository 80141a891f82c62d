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

IGNORED = -100  # a label that does not count


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

    In every epoch the documents are put one behind the other in another order, and the whole is cut into `rows` equal
    parts. A row reads its part in order, epoch after epoch, so segment s + 1 of a row goes on where segment s ended.
    An item depends on its index and the arguments alone: a resumed run sees what the first would have seen.

    Items are `{"input_ids", "shift_labels", "document_starts"}`, each `[seq_len]`: int64, int64 (the token that follows
    each token; -100 where a row's part ends) and bool (the first token of every document, and of every part).

    Args:
        tokens: The text.
        seq_len: Tokens in a segment.
        rows: Rows read side by side, of all processes and all accumulated batches together.
        steps: Segments a row.
        seed: Of the orders.
        pass_states: The share of documents that are not marked as starting, so that a row which carries its state
            begins them with what it remembers of the document before: a memory that is trained on short documents
            learns so to go on from states that only long ones lead to.

    Raises:
        ValueError: There is less than one segment a row.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, rows: int, steps: int, seed: int = 0, pass_states: float = 0.0
    ) -> None:
        self.tokens, self.seq_len, self.rows, self.steps = tokens, seq_len, rows, steps
        self.seed, self.pass_states = seed, pass_states
        self._orders: dict[int, _Order] = {}  # of this epoch and the one before
        self.part = (len(tokens.ids) - 1) // rows  # tokens that a row reads in an epoch
        if self.part < seq_len:
            raise ValueError(
                f"data.seq_len={seq_len} times {rows} rows is more than the training text ({len(tokens.ids) - 1} "
                "tokens): lower data.seq_len or train.batch_size, or give more text"
            )

    def __len__(self) -> int:
        return self.rows * self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, row = divmod(index, self.rows)
        ids, labels, starts = [], [], []
        at, left = step * self.seq_len, self.seq_len
        while left:
            epoch, offset = divmod(at, self.part)
            length = min(left, self.part - offset)
            begin = row * self.part + offset
            taken, begun = self._order(epoch).read(begin, length + 1)
            ids.append(taken[:-1])
            labels.append(taken[1:].copy())
            starts.append(begun[:-1])
            if offset == 0:
                starts[-1][0] = True
            if offset + length == self.part:
                labels[-1][-1] = IGNORED
            at, left = at + length, left - length
        return {
            "input_ids": torch.from_numpy(np.concatenate(ids)),
            "shift_labels": torch.from_numpy(np.concatenate(labels)),
            "document_starts": torch.from_numpy(np.concatenate(starts)),
        }

    def _order(self, epoch: int) -> _Order:
        if epoch not in self._orders:
            starts, random = self.tokens.starts, np.random.default_rng((self.seed, epoch))
            documents = random.permutation(len(starts))
            sizes = np.diff(starts, append=len(self.tokens.ids) - 1)
            marked = random.random(len(starts)) >= self.pass_states
            made = _Order(self.tokens, documents, sizes[documents].cumsum(), marked)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: made}
        return self._orders[epoch]


@dataclass(frozen=True)
class _Order:
    """The documents of an epoch, one behind the other."""

    tokens: Tokens
    documents: np.ndarray  # which document is n-th
    ends: np.ndarray  # where the n-th ends
    marked: np.ndarray  # whether the n-th is marked as starting

    def read(self, begin: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`length` tokens from `begin` on, int64, and which of them start a document; behind the last document comes
        the token that ends it."""
        ids, starts = np.empty(length, np.int64), np.zeros(length, bool)
        n, filled = int(np.searchsorted(self.ends, begin, side="right")), 0
        while filled < length:
            if n == len(self.ends):
                ids[filled:] = self.tokens.ids[-1]
                break
            document = self.documents[n]
            first, size = int(self.tokens.starts[document]), self._size(n)
            inside = begin + filled - (int(self.ends[n]) - size)
            count = min(size - inside, length - filled)
            ids[filled : filled + count] = self.tokens.ids[first + inside : first + inside + count]
            starts[filled] = inside == 0 and bool(self.marked[n])
            filled, n = filled + count, n + 1
        return ids, starts

    def _size(self, n: int) -> int:
        return int(self.ends[n] - (self.ends[n - 1] if n else 0))
