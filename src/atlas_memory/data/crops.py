"""Training examples: crops at random places of the documents, one behind the other."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset


class RandomCrops(Dataset[dict[str, torch.Tensor]]):
    """`count` crops of `seq_len` tokens; crop i depends on `(seed, i)` alone, so a resumed run sees the same
    ones.

    Items are `{"input_ids", "labels"}`, both int64 `[seq_len]` and equal but for the first label, which nothing
    predicts: it is -100, so that whoever counts labels counts what is predicted. The model shifts its labels itself.
    ValueError if `tokens` is shorter than one crop.
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
