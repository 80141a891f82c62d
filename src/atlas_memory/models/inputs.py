"""Checks of ids, labels and masks; and where documents begin in packed rows, from `position_ids` or `cu_seq_lens_q`."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs

from ..layers.padding import check_mask, check_tensor
from ..layers.varlen import previous_real_token, starts_at_real_tokens
from ..rules.autograd import can_read, is_cheap_to_read

logger = logging.get_logger(__name__)
IGNORE_INDEX = -100
# What transformers and peft pass to every model.
_PASSED = set(TransformersKwargs.__annotations__) - {"seq_idx"}
_PASSED |= {"cache_position", "token_type_ids", "tokenizer", "ignore_index"}
_CHANGES_MEANING = re.compile("cu_?seq|seq.*(len|id|idx)|sequence|segment|doc|pack|mask|label|past_key")
"""Names of arguments that say which tokens belong together, or which count."""


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """ValueError for an unknown or misspelt argument that would change the result; others are ignored."""
    for name, value in arguments.items():
        if value is None or name in _PASSED:
            continue
        if _CHANGES_MEANING.search(name):
            remedy = "packed documents are marked by position_ids, cu_seq_lens_q or document_starts"
            raise ValueError(f"an Atlas model does not know the argument {name!r}: leave it out; {remedy}")
        logger.warning_once(f"an Atlas model has no use for the argument {name!r}")


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """ValueError unless ids are int64 or int32 `[batch, time]`, and (checked on a CPU) of the vocabulary."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be token ids [batch, time] of int64, got {_got(ids)}")
    _check_range(name, ids, vocab_size)


def check_embeds(embeds: Any, width: int) -> None:
    """ValueError unless embeddings are floating `[batch, time, width]`."""
    if not isinstance(embeds, Tensor) or embeds.shape[2:] != (width,) or not embeds.is_floating_point():
        raise ValueError(f"inputs_embeds must be floating [batch, time, {width}], got {_got(embeds)}")


def check_labels(name: str, labels: Any, inputs: Tensor, vocab_size: int, ignore_index: int) -> None:
    """ValueError unless labels are int64 `[batch, time]`, and (on a CPU) of the vocabulary or `ignore_index`."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != inputs.shape[:2]:
        raise ValueError(f"{name} must be int64 [batch, time] = {list(inputs.shape[:2])}, got {_got(labels)}")
    if is_cheap_to_read(labels):
        also = f", or {ignore_index} where a token does not count"
        _check_range(name, labels[labels != ignore_index], vocab_size, also)


def _got(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_range(name: str, ids: Tensor, vocab_size: int, also: str = "") -> None:
    if ids.numel() and is_cheap_to_read(ids):
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name} must be from 0 to {vocab_size - 1}{also}; they are from {low} to {high}")


def mask_of_call(mask: Tensor | dict[str, Tensor | None] | None, x: Tensor, has_cache: bool) -> Tensor | None:
    """The attention mask of this call's tokens x `[batch, time, ...]`, bool `[batch, time]`; None if all are real. With
    a cache, entries of earlier tokens may precede them."""
    batch, time = x.shape[:2]
    mask = one_mask(mask)
    if mask is None:
        return None
    check_tensor("attention_mask", mask)
    if mask.dim() != 2 or len(mask) != batch or mask.shape[1] < time or (mask.shape[1] > time and not has_cache):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; give [batch, time] with {batch} rows and an entry for each "
            f"of the {time} tokens of this call (those of earlier tokens may stand before them, beside past_key_values)"
        )
    mask = mask[:, mask.shape[1] - time :]
    check_mask("attention_mask", mask, x)
    mask = mask.bool()
    # Layers are faster without a mask. A compiled graph must not branch on data.
    return None if can_read(mask) and mask.all() else mask


def one_mask(mask: Tensor | dict[str, Tensor | None] | None) -> Tensor | None:
    """The mask itself, or the first of a dict."""
    return next((m for m in mask.values() if m is not None), None) if isinstance(mask, dict) else mask


def mask_labels(labels: Tensor, unpredicted: Tensor, ignore_index: int, arguments: dict[str, Any]) -> Tensor:
    """Labels `[batch, time]` with `ignore_index` where `unpredicted`, which `num_items_in_batch` of `arguments` then
    leaves out too.

    Trainer counts the labels of all batches of a step; the others are assumed to lose the same share as this one, with
    a warning.
    """
    kept = labels.masked_fill(unpredicted, ignore_index)
    if arguments.get("num_items_in_batch") is None:
        return kept
    before, after = ((x != ignore_index).sum() for x in (labels, kept))
    items = torch.as_tensor(arguments["num_items_in_batch"], device=before.device)
    if can_read(before) and after < before and (items != before).any():
        warnings.warn(
            f"num_items_in_batch={int(items.max())} counts labels behind padding, which do not count, of other batches "
            f"than this one with {int(before)}: the loss of this step is close to the mean over its labels, and not "
            f"equal. Pad on the right (padding_side='right'), or let the first label behind padding be {ignore_index}",
            stacklevel=3,
        )
    arguments["num_items_in_batch"] = items * (after.clamp(min=1) / before.clamp(min=1))
    return kept


def find_document_starts(
    x: Tensor,
    mask: Tensor | None,
    has_read: Tensor | bool,
    document_starts: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """Where documents begin in x `[batch, time, ...]`, bool `[batch, time]`; None if no argument says.

    Args:
        mask: `[batch, time]`, nonzero for real tokens.
        has_read: Bool `[batch]` or one for all, whether the initial state has read anything.
        document_starts: `[batch, time]`, nonzero at the first token of every document, or at padding before it.
        position_ids: `[batch, time]` or `[1, time]`; documents begin where they do not grow, and, after earlier tokens,
            at a 0.
        cu_seq_lens_q: `[documents + 1]` from 0 to time, the cumulative lengths of the documents of a single row.
    """
    found = [] if document_starts is None else [_per_token("document_starts", document_starts, x)]
    if position_ids is not None:
        found.append(_position_restarts(_per_token("position_ids", position_ids, x), mask, has_read))
    if cu_seq_lens_q is not None:
        if torch.as_tensor(has_read).any():
            raise ValueError(
                "cu_seq_lens_q does not tell whether rows continue past_key_values: give document_starts, with the "
                "first token marked where a document begins"
            )
        starts = _sequence_starts(cu_seq_lens_q, x)
        found.append(starts if mask is None else mask.bool() & starts_at_real_tokens(starts, mask))
    return torch.stack([starts.bool() for starts in found]).any(0) if found else None


def _per_token(name: str, value: Any, x: Tensor) -> Tensor:
    check_tensor(name, value)
    if value.dim() != 2 or value.shape[1] != x.shape[1] or value.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"{name} has shape {list(value.shape)} but the tokens are [batch, time] = {list(x.shape[:2])}; "
            "give a number for every token of this call"
        )
    return value.to(x.device).expand(x.shape[:2])


def _position_restarts(positions: Tensor, mask: Tensor | None, has_read: Tensor | bool) -> Tensor:
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    nearest = previous_real_token(real)
    before = positions.gather(1, nearest.clamp(min=0))
    goes_on = torch.as_tensor(has_read, device=positions.device).expand(len(positions))[:, None]
    return real & torch.where(nearest < 0, goes_on & (positions == 0), positions <= before)


def _sequence_starts(cu_seq_lens_q: Any, x: Tensor) -> Tensor:
    if not isinstance(cu_seq_lens_q, Tensor):
        raise ValueError(f"cu_seq_lens_q must be a tensor [documents + 1], got a {type(cu_seq_lens_q).__name__}")
    ends = cu_seq_lens_q.to(x.device).long()
    batch, time = x.shape[:2]
    whole = ends.dim() == 1 and len(ends) > 1 and int(ends[0]) == 0 and int(ends[-1]) == time
    if batch != 1 or not whole or bool((ends.diff() < 0).any()):
        raise ValueError(
            f"cu_seq_lens_q of shape {list(ends.shape)} does not cut tokens [batch, time] = [{batch}, {time}]: it "
            "ascends from 0 to the tokens of a single row; for several rows give document_starts"
        )
    starts = torch.zeros(1, time, dtype=torch.bool, device=x.device)
    starts[0, ends[:-1][ends[:-1] < time]] = True
    return starts
