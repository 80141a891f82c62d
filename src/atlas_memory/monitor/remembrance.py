"""Effective remembrance: how much predictions hang on what is far back (Buitrago and Gu, arXiv 2507.02782)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .watching import evaluating


def effective_remembrance(model: Any, ids: Tensor, back: int, piece: int = 256) -> float:
    """The mean distance between what a model predicts of the next token after the whole text and after its last tokens
    only: 0 if nothing older is remembered, at most 1.

    The distance is half the sum of |p - p'| over the vocabulary (total variation). p' is read with an empty memory that
    began between ``back`` and 2 ``back`` tokens before. The memory needed does not depend on the length of the text.

    Args:
        model: a language model that is called as ``model(input_ids=..., past_key_values=...)``.
        ids: int64 ``[batch, time]``, without padding, longer than 2 ``back``.
        back: tokens that both have read, at least.
        piece: tokens of a call.

    Raises:
        ValueError: a text that is too short, or ``back`` below 1.
    """
    if back < 1:
        raise ValueError(f"back={back} must be at least 1")
    if ids.dim() != 2 or ids.shape[1] <= 2 * back:
        raise ValueError(f"ids must be [batch, time] of more than 2 back = {2 * back} tokens, got {list(ids.shape)}")
    with torch.inference_mode(), evaluating(model):
        ids = ids.to(next(model.parameters()).device)
        *_, (_, whole) = _read(model, ids[:, : 2 * back], None, piece)
        distances = []
        for start in range(2 * back, ids.shape[1], back):
            scored = ids[:, start : start + back]
            *_, (_, recent) = _read(model, ids[:, start - back : start], None, piece)
            pairs = list(zip(_read(model, scored, whole, piece), _read(model, scored, recent, piece), strict=True))
            distances += [0.5 * (p - q).abs().sum(-1) for (p, _), (q, _) in pairs]
            whole = pairs[-1][0][1]
        return float(torch.cat(distances, 1).mean())


def _read(model: Any, ids: Tensor, cache: Any, piece: int) -> Iterator[tuple[Tensor, Any]]:
    """The distributions after each token of a piece, ``[batch, piece, vocabulary]``, and the state after it."""
    for part in ids.split(piece, 1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        yield out.logits.float().softmax(-1), cache
