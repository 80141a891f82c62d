"""The checks of ids and labels, whose own errors deep in PyTorch say little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mathematics.precision import at_hand

IGNORED = -100
"""The label of a token that does not count."""


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """ValueError unless ids are int64 or int32 `[batch, time]`, and (seen on a CPU only) of the vocabulary."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} must be token ids [batch, time] of int64, got {got}")
    _check_range(name, ids, 0, vocab_size)


def check_labels(name: str, labels: Any, inputs: Tensor, vocab_size: int) -> None:
    """ValueError unless labels are int64 `[batch, time]` for inputs `[batch, time, ...]`, and (seen on a CPU only) of
    the vocabulary or -100."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != inputs.shape[:2]:
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"{name} must be int64 [batch, time] = {list(inputs.shape[:2])}, got {got}")
    _check_range(name, labels, IGNORED, vocab_size)


def _check_range(name: str, ids: Tensor, lowest: int, vocab_size: int) -> None:
    if not ids.numel() or not at_hand(ids):
        return
    low, high = map(int, torch.aminmax(ids))
    if low < lowest or high >= vocab_size:
        also = f", or {IGNORED} where a token does not count" if lowest < 0 else ""
        raise ValueError(f"{name} must be from 0 to {vocab_size - 1}{also}; they are from {low} to {high}")
