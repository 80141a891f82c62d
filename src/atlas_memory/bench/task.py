"""What a synthetic task is: sequences of tokens, and which token the model should name at which of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""The label of tokens at which nothing is asked, as of `torch.nn.functional.cross_entropy`."""

Rows = tuple[np.ndarray, np.ndarray]
"""Tokens and labels, int64 `[rows, time]`; the label at a token is what the model should name after it."""


@dataclass(frozen=True)
class Task:
    """A synthetic task.

    Attributes:
        name: Of the option `--tasks`.
        vocab_size: Tokens there are.
        length: Tokens of a sequence.
        make: `make(rows, random, asked)`: sequences and labels; `asked`: of the evaluation, whose labels may be fewer.
        sequences: To train on, in turn; None: always new ones.
        autoencodes: Whether all labels are named from what is left at the last token (MAD's compression).
    """

    name: str
    vocab_size: int
    length: int
    make: Callable[[int, np.random.Generator, bool], Rows]
    sequences: int | None = None
    autoencodes: bool = False

    def rows(self, count: int, seed: int, asked: bool) -> tuple[Tensor, Tensor]:
        """So many sequences of a seed: tokens and labels, int64 `[count, length]`. Those of the evaluation differ from
        those of training with the same seed."""
        ids, labels = self.make(count, np.random.default_rng([seed, int(asked)]), asked)
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))
