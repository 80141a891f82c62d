"""The checks of ids, labels and masks, whose own errors deep in PyTorch say little."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..layers.padding import check_mask, check_tensor
from ..rules.autograd import at_hand, can_look

IGNORED = -100
"""The label of a token that does not count."""


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """ValueError unless ids are int64 or int32 `[batch, time]`, and (seen on a CPU only) of the vocabulary."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} must be token ids [batch, time] of int64, got {got}")
    _check_range(name, ids, vocab_size)


def check_embeds(embeds: Any, width: int) -> None:
    """ValueError unless what stands for embedded tokens is floating `[batch, time, width]`."""
    if (
        not isinstance(embeds, Tensor)
        or embeds.dim() != 3
        or embeds.shape[2] != width
        or not embeds.is_floating_point()
    ):
        got = f"{embeds.dtype} {list(embeds.shape)}" if isinstance(embeds, Tensor) else f"a {type(embeds).__name__}"
        raise ValueError(f"inputs_embeds must be floating [batch, time, {width}], got {got}")


def check_labels(name: str, labels: Any, inputs: Tensor, vocab_size: int, ignored: int = IGNORED) -> None:
    """ValueError unless labels are int64 `[batch, time]` for inputs `[batch, time, ...]`, and (seen on a CPU only) of
    the vocabulary or ``ignored``."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != inputs.shape[:2]:
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"{name} must be int64 [batch, time] = {list(inputs.shape[:2])}, got {got}")
    if at_hand(labels):
        _check_range(name, labels[labels != ignored], vocab_size, f", or {ignored} where a token does not count")


def that_count(labels: Tensor, unpredicted: Tensor, ignored: int, arguments: dict[str, Any]) -> Tensor:
    """Labels of the tokens after each, `[batch, time]`, with ``ignored`` where nothing predicts them, bool
    `[batch, time]`. ``num_items_in_batch`` of ``arguments``, the number of labels that their sum is to be divided by,
    becomes one without those.

    transformers' Trainer counts the labels of all batches of a step before a model sees one. The others are taken to
    lose as large a share of their labels as this batch, and a warning says so.
    """
    kept = labels.masked_fill(unpredicted, ignored)
    if arguments.get("num_items_in_batch") is None:
        return kept
    before, after = ((x != ignored).sum() for x in (labels, kept))
    items = torch.as_tensor(arguments["num_items_in_batch"], device=before.device)
    if can_look(before) and after < before and (items != before).any():
        warnings.warn(
            f"num_items_in_batch={int(items.max())} counts labels behind padding, which do not count, of other batches "
            f"than this one with {int(before)}: the loss of this step is close to the mean over its labels, and not "
            f"equal. Pad on the right (padding_side='right'), or let the first label behind padding be {ignored}",
            stacklevel=3,
        )
    arguments["num_items_in_batch"] = items * (after.clamp(min=1) / before.clamp(min=1))
    return kept


def _check_range(name: str, ids: Tensor, vocab_size: int, also: str = "") -> None:
    if not ids.numel() or not at_hand(ids):
        return
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must be from 0 to {vocab_size - 1}{also}; they are from {low} to {high}")


def mask_of_call(mask: Tensor | dict[str, Tensor | None] | None, x: Tensor, goes_on: bool = True) -> Tensor | None:
    """The part of an attention mask about this call's tokens x `[batch, time, ...]`, bool `[batch, time]`; None if all
    are real. Entries for earlier tokens may stand before them where the call goes on from a cache."""
    batch, time = x.shape[:2]
    if isinstance(mask, dict):
        mask = next((m for m in mask.values() if m is not None), None)
    if mask is None:
        return None
    check_tensor("attention_mask", mask)
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < time or (mask.shape[1] > time and not goes_on):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; give [batch, time] with {batch} rows and an entry for each "
            f"of the {time} tokens of this call (entries for earlier tokens may stand before them, beside "
            "past_key_values)"
        )
    check_mask("attention_mask", mask)
    mask = mask[:, mask.shape[1] - time :].bool()
    # Most masks mask nothing; layers are faster without one. A compiled graph must not branch on data.
    return None if can_look(mask) and mask.all() else mask
