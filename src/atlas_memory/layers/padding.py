"""Padding of any pattern, turned into padding on the right and back.

A recurrence over time must not see padding at all: a padded token would move the memory, shift the window and
advance the position. So every layer moves the real tokens of each row (a sequence of the batch) to the front, in
their order, reads the packed rows, and puts the results back.
"""

from typing import Any

import torch
from torch import Tensor

from ..rules.autograd import is_cheap_to_read


def pack(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the real tokens of each row to the front, keeping their order.

    Args:
        x: `[batch, time, ...]`, any dtype.
        mask: `[batch, time]`, bool or numbers; nonzero marks a real token.

    Returns:
        The packed x, `[batch, time, ...]`, zero behind the real tokens; how many tokens are real, `[batch]`
        int64; and the order `[batch, time]` int64 with `packed[i, j] = x[i, order[i, j]]`, for `unpack`.

    Raises:
        ValueError: mask is not of shape `[batch, time]`, or (seen on a CPU only) has negative numbers or NaN, as masks
            have that are added to scores of attention.
    """
    check_tensor("mask", mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"mask has shape {list(mask.shape)} but x has [batch, time] = {list(x.shape[:2])}; "
            "give one mask entry for every token of this call"
        )
    check_mask("mask", mask)
    real = mask.bool()
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    lengths = real.sum(1)
    behind = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    packed = x.gather(1, _like(order, x).expand_as(x)).masked_fill(_like(behind, x), 0)
    return packed, lengths, order


def real_tokens(x: Tensor, length: Tensor | None) -> Tensor | None:
    """The mask, bool `[batch, time]`, of packed x `[batch, time, ...]` with `length` `[batch]` real tokens; or None."""
    return None if length is None else torch.arange(x.shape[1], device=x.device) < length[:, None]


def check_tensor(name: str, value: Any) -> None:
    """ValueError for a list, or anything else that is no tensor with an entry for each token."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor [batch, time], got a {type(value).__name__}")


def check_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError for a mask that would be added to scores, or that holds NaN or complex numbers."""
    if mask.is_complex():
        raise ValueError(f"{name} must be bool or numbers, got {mask.dtype}")
    if mask.dtype != torch.bool and is_cheap_to_read(mask) and not bool((mask >= 0).all()):
        raise ValueError(
            f"{name} has negative numbers or NaN; it is not added to anything: give 1 for real tokens, 0 for padding"
        )


def unpack(y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """Put packed outputs `[batch, time, ...]` back in their places; padded places are zero."""
    # Inverting the permutation and gathering, rather than scattering, keeps the backward pass a gather's too.
    inverse = torch.argsort(order, dim=1)
    return y.gather(1, _like(inverse, y).expand_as(y)).masked_fill(_like(~mask.bool(), y), 0)


def _like(index: Tensor, x: Tensor) -> Tensor:
    """`[batch, time]` with as many trailing axes of size 1 as x has further axes."""
    return index.reshape(*index.shape, *(1,) * (x.dim() - 2))
