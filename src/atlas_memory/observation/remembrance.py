"""Effective remembrance: how much predictions hang on what is far back (Buitrago and Gu, arXiv 2507.02782)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def effective_remembrance(model: Any, ids: Tensor, back: int, piece: int = 256) -> float:
    """The mean distance between what a model predicts of the next token after the whole text and after its last tokens
    only: 0 if nothing older is remembered, at most 1.

    The distance is half the sum of |p - p'| over the vocabulary (total variation). p' is read with an empty memory that
    began between ``back`` and 2 ``back`` tokens before.

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
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            ids = ids.to(next(model.parameters()).device)
            whole = _predicted(model, ids, piece)
            distances = []
            # Windows that overlap by half; the second half of each counts.
            for start in range(back, ids.shape[1] - back, back):
                recent = _predicted(model, ids[:, start : start + 2 * back], piece)[:, back:]
                full = whole[:, start + back : start + 2 * back]
                distances.append(0.5 * (full - recent).abs().sum(-1))
            return float(torch.cat(distances, 1).mean())
    finally:
        model.train(training)


def _predicted(model: Any, ids: Tensor, piece: int) -> Tensor:
    """The distributions after each token, ``[batch, time, vocabulary]``."""
    cache, found = None, []
    for part in ids.split(piece, 1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits.float().softmax(-1))
    return torch.cat(found, 1)
