"""Training examples: consecutive segments of documents, or random crops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from atlas_memory.data.sources import Document
from atlas_memory.data.tokenization import encode


@dataclass(frozen=True)
class Tokens:
    """Tokenised documents, concatenated.

    Attributes:
        ids: `[tokens]` integers; the end-of-text token begins each document and follows the last.
        starts: `[documents]` int64, ascending from 0: where each begins.
    """

    ids: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(
        cls, tokenizer: Any, documents: Sequence[Document], progress: Callable[[int], None] = lambda characters: None
    ) -> Tokens:
        """Tokenise documents, int32 ids; `progress` is called with the characters so far."""
        end = np.asarray([tokenizer.eos_token_id], dtype=np.int32)
        parts, starts, length, characters = [], [], 0, 0
        for document in documents:
            ids = encode(tokenizer, document.text)
            starts.append(length)
            parts += [end, ids]
            length += 1 + len(ids)
            characters += len(document.text)
            progress(characters)
        return cls(np.concatenate([*parts, end]), np.asarray(starts, dtype=np.int64))


class Segments(Dataset[dict[str, torch.Tensor]]):
    """Segments for truncated backpropagation through time: `rows * interleave` streams of `seq_len` tokens a segment,
    of which a step reads `rows`. Item `step * rows + r` is the next segment of stream `step % interleave * rows + r`.

    In every epoch the documents are shuffled, concatenated and cut into as many equal parts as there are streams, each
    of which reads its part in order. Items depend on their index and the arguments alone, so that a resumed run sees
    the same.

    Items are `{"input_ids", "shift_labels", "document_starts"}`, each `[seq_len]`: int64, int64 (the next token) and
    bool (where a document, a piece or a part begins with an empty memory).

    Args:
        tokens: The text.
        seq_len: Tokens in a segment.
        rows: Rows read in a step, of all processes and all accumulated batches together.
        steps: Of training.
        seed: Of the orders.
        interleave: Steps until the same streams are read again, so that successive steps see other documents.
        reset_every: Shuffle pieces of so many segments of the text instead of documents, so that a stream moves on
            after so many, not all at the same step. None: it reads documents to their ends.
        lengths: Longer segments, by the step from which they are read: tokens, a multiple of `seq_len` that divides
            `rows * seq_len`, ascending, each a multiple of the one before. A segment of n times the length is n
            consecutive items; a step then reads rows / n streams, each from where it was.
        pass_states: The share of documents or pieces that are not marked as beginning, and start from the state of the
            one before: a memory trained on short documents learns to continue from states of long ones.

    Raises:
        ValueError: There is less than one segment a stream.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        rows: int,
        steps: int,
        seed: int = 0,
        interleave: int = 1,
        reset_every: int | None = None,
        pass_states: float = 0.0,
        lengths: Mapping[int, int] | None = None,
    ) -> None:
        self.tokens, self.seq_len, self.rows, self.steps = tokens, seq_len, rows, steps
        self.seed, self.interleave, self.reset_every, self.pass_states = seed, interleave, reset_every, pass_states
        self._phases = [(0, 1), *((first, length // seq_len) for first, length in sorted((lengths or {}).items()))]
        total = len(tokens.ids) - 1
        piece = 1 if reset_every is None else reset_every * seq_len
        self.part = total // piece // (rows * interleave) * piece  # tokens that a row reads in an epoch
        if self.part < seq_len * self._phases[-1][1]:
            name = "data.seq_len" if len(self._phases) == 1 else "the last of data.seq_len_schedule"
            pieces = (f" times data.reset_every={reset_every}", ", data.reset_every") if reset_every else ("", "")
            raise ValueError(
                f"{name}={seq_len * self._phases[-1][1]} times {rows * interleave} rows{pieces[0]} is more than the "
                f"training text ({total} tokens): lower {name}{pieces[1]}, data.interleave or train.batch_size, or "
                "give more text"
            )
        self._orders: dict[int, _Order] = {}  # of this epoch and the one before

    def __len__(self) -> int:
        return self.rows * self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, item = divmod(index, self.rows)
        first, times = self._phase(step)
        item, nth = divmod(item, times)
        row = item + (step - first) % (self.interleave * times) * (self.rows // times)
        # Rows begin apart, so that they do not all move on at the same step.
        ahead = 0 if self.reset_every is None else row * self.reset_every // (self.rows * self.interleave)
        at, left = (self._read(row, step) + nth + ahead) * self.seq_len, self.seq_len
        places, starts = [], []
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
            "input_ids": torch.from_numpy(self.tokens.ids[place].astype(np.int64)),
            "shift_labels": torch.from_numpy(self.tokens.ids[place + 1].astype(np.int64)),
            "document_starts": torch.from_numpy(np.concatenate(starts)),
        }

    def times(self, step: int) -> int:
        """How many consecutive items are a segment of this step."""
        return self._phase(step)[1]

    def _phase(self, step: int) -> tuple[int, int]:
        """The step since which segments are as long as at `step`, and their items."""
        return max(phase for phase in self._phases if phase[0] <= step)

    def _read(self, row: int, step: int) -> int:
        """Items a row has read before a step."""
        items = 0
        for (first, times), (end, _) in zip(self._phases, [*self._phases[1:], (step, 0)], strict=True):
            rounds, turn = divmod(max(min(end, step) - first, 0), self.interleave * times)
            items += times * (rounds + (row // (self.rows // times) < turn))
        return items

    def _order(self, epoch: int) -> _Order:
        if epoch not in self._orders:
            made = self._new_order(np.random.default_rng((self.seed, epoch)))
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: made}
        return self._orders[epoch]

    def _new_order(self, random: np.random.Generator) -> _Order:
        documents = self.tokens.starts
        total = len(self.tokens.ids) - 1
        if self.reset_every is None:
            starts, sizes = documents, np.diff(documents, append=total)
        else:
            size = self.reset_every * self.seq_len
            starts = np.arange(random.integers(total % size + 1), total - size + 1, size)
            sizes = np.full(len(starts), size)
        order = random.permutation(len(starts))
        starts, sizes = starts[order], sizes[order]
        begins = starts if self.reset_every is None else np.union1d(starts, documents)
        marked = random.random(len(begins)) >= self.pass_states
        return _Order(starts, sizes, sizes.cumsum(), np.sort(begins[marked]))


@dataclass(frozen=True)
class _Order:
    """The pieces of an epoch: where each begins in the text, its size, where it ends in this order; and the places of
    the text where a memory begins empty."""

    starts: np.ndarray
    sizes: np.ndarray
    ends: np.ndarray
    empty: np.ndarray

    def read(self, begin: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The places of tokens `begin` to `begin + length` in the text, int64, and where memories begin."""
        places = np.empty(length, np.int64)
        n, filled = int(np.searchsorted(self.ends, begin, side="right")), 0
        while filled < length:
            inside = begin + filled - int(self.ends[n] - self.sizes[n])
            count = min(int(self.sizes[n]) - inside, length - filled)
            first = int(self.starts[n]) + inside
            places[filled : filled + count] = np.arange(first, first + count)
            filled, n = filled + count, n + 1
        nearest = np.searchsorted(self.empty, places).clip(max=max(len(self.empty) - 1, 0))
        return places, self.empty[nearest] == places if len(self.empty) else np.zeros(length, bool)


class RandomCrops(Dataset[dict[str, torch.Tensor]]):
    """`count` crops of `seq_len` tokens; crop i depends on `(seed, i)` alone, so that a resumed run sees the same.

    Items are `{"input_ids", "labels"}`, int64 `[seq_len]`, equal but for the first label, which is -100 since nothing
    predicts it; the model shifts labels itself.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, count: int, seed: int) -> None:
        if len(tokens) < seq_len:
            raise ValueError(
                f"data.seq_len={seq_len} is longer than the whole training text ({len(tokens)} tokens): "
                "lower data.seq_len or give more text"
            )
        self.tokens, self.seq_len, self.count, self.seed = tokens, seq_len, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        last = len(self.tokens) - self.seq_len
        start = int(np.random.default_rng((self.seed, index)).integers(last + 1))
        ids = torch.from_numpy(self.tokens[start : start + self.seq_len].astype(np.int64))
        labels = ids.clone()
        labels[:1] = -100
        return {"input_ids": ids, "labels": labels}
