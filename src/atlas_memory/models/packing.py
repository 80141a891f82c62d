"""The forms in which other libraries say where the documents of a packed row begin, as `document_starts`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs

from ..layers.padding import check_tensor
from ..layers.varlen import at_real_tokens, before_each

logger = logging.get_logger(__name__)

# What transformers, peft and their like pass to every model; a memory needs none of it, and the loss reads its own.
_PASSED = set(TransformersKwargs.__annotations__) | {"cache_position", "token_type_ids", "tokenizer", "ignore_index"}
_READ = {"input_ids", "attention_mask", "past_key_values", "inputs_embeds", "labels", "shift_labels", "document_starts"}
_READ |= {"position_ids", "document_ids", "seq_idx", "cu_seq_lens_q", "logits_to_keep"}
_OF_DOCUMENTS = re.compile("cu_?seq|seq.*(len|id)|sequence|segment|doc|pack|mask|label")
"""What a name of an argument has in it that says which tokens belong together, or which of them count."""


def refuse_unknown(arguments: dict[str, Any]) -> None:
    """ValueError for an argument that it would be wrong not to heed: a form of packing that `forward` does not know,
    by which documents would run into each other unseen, or one that is misspelt. Others are passed over, as by models
    of transformers, whose next version may pass what this one does not."""
    for name, value in arguments.items():
        if value is None or name in _PASSED:
            continue
        near = get_close_matches(name, _READ, 1, 0.8)
        if near or _OF_DOCUMENTS.search(name):
            remedy = "give cu_seq_lens_q" if name == "cu_seqlens" else f"give {near[0]}" if near else "leave it out"
            raise ValueError(
                f"an Atlas model does not know the argument {name!r}: {remedy}; packed documents are marked by "
                "document_starts, position_ids, document_ids, seq_idx or cu_seq_lens_q"
            )
        logger.warning_once(f"an Atlas model has no use for the argument {name!r}")


def starts_of_documents(
    x: Tensor,
    mask: Tensor | None = None,
    read_before: Tensor | bool = False,
    document_starts: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """Where documents begin, bool `[batch, time]`, by all that is given; None if nothing is.

    Args:
        x: `[batch, time, ...]`, what is read.
        mask: `[batch, time]`, nonzero for real tokens: positions and ids of others say nothing.
        read_before: `[batch]` or one for all, whether the state that rows go on from has read anything.
        document_starts: `[batch, time]`, nonzero at the first token of every document, or at padding before it.
        position_ids: `[batch, time]` or `[1, time]`; a document begins where they do not grow, and, in rows that
            go on, at a 0.
        document_ids: `[batch, time]`, another number for each document that follows another.
        cu_seq_lens_q: `[documents + 1]` from 0 to time, where the documents of a single row begin and the last ends.
            What is padding alone is none.

    Raises:
        ValueError: One is of another shape; or it does not tell whether the first document of a row goes on.
    """
    found = [] if document_starts is None else [document_starts]
    if position_ids is not None:
        found.append(_where_positions_restart(position_ids, x, mask, read_before))
    for name, value in (("document_ids", document_ids), ("cu_seq_lens_q", cu_seq_lens_q)):
        if value is not None and torch.as_tensor(read_before).any():
            raise ValueError(
                f"{name} does not tell whether rows go on from past_key_values, which have read something: give "
                "document_starts, with the first token marked where a document begins"
            )
    if document_ids is not None:
        found.append(_where_ids_change(_of_the_tokens("document_ids", document_ids, x), mask))
    if cu_seq_lens_q is not None:
        starts = _where_lengths_end(cu_seq_lens_q, x)
        found.append(starts if mask is None else mask.bool() & at_real_tokens(starts, mask))
    if len(found) < 2:
        return found[0] if found else None
    return torch.stack([_of_the_tokens("document_starts", starts, x).bool() for starts in found]).any(0)


def _of_the_tokens(name: str, value: Any, x: Tensor) -> Tensor:
    check_tensor(name, value)
    if value.dim() != 2 or value.shape[1] != x.shape[1] or value.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"{name} has shape {list(value.shape)} but the tokens are [batch, time] = {list(x.shape[:2])}; "
            "give a number for every token of this call"
        )
    return value.to(x.device).expand(x.shape[:2])


def _where_positions_restart(
    position_ids: Tensor, x: Tensor, mask: Tensor | None, read_before: Tensor | bool
) -> Tensor:
    """Where the position of a real token is not above that of the real token before it."""
    positions = _of_the_tokens("position_ids", position_ids, x)
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    nearest = before_each(real)
    before = positions.gather(1, nearest.clamp(min=0))
    going_on = torch.as_tensor(read_before, device=x.device).expand(len(positions))[:, None]
    return real & torch.where(nearest < 0, going_on & (positions == 0), positions <= before)


def _where_ids_change(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Where the id of a real token is not that of the real token before it."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    nearest = before_each(real)
    return real & ((nearest < 0) | (ids != ids.gather(1, nearest.clamp(min=0))))


def _where_lengths_end(cu_seq_lens_q: Any, x: Tensor) -> Tensor:
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
