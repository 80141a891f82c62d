"""Padding of any pattern, moved to the right and back; and rows cut into segments at places of their own.

A recurrence must not see padding at all, so layers read the real tokens of each row in front, and put outputs back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.banded import take
from ..rules.autograd import is_cheap_to_read


def move_padding_right(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the real tokens of each row to the front, keeping their order.

    Args:
        x: `[batch, time, ...]`, any dtype.
        mask: `[batch, time]`, bool or numbers; nonzero marks a real token.

    Returns:
        x `[batch, time, ...]`, zero at its padding; how many tokens are real, `[batch]` int64; and the order
        `[batch, time]` int64: token j of row i came from `order[i, j]`.

    Raises:
        ValueError: `check_mask`.
    """
    check_mask("mask", mask, x)
    real = mask.bool()
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    lengths = real.sum(1)
    padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    x = x.gather(1, _expand_dims(order, x).expand_as(x)).masked_fill(_expand_dims(padding, x), 0)
    return x, lengths, order


def restore_padding(y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    """The inverse of `move_padding_right` for outputs y `[batch, time, ...]`; they are zero at padding."""
    # Inverting the permutation and gathering, rather than scattering, keeps the backward pass a gather's too.
    inverse = torch.argsort(order, dim=1)
    return y.gather(1, _expand_dims(inverse, y).expand_as(y)).masked_fill(_expand_dims(~mask.bool(), y), 0)


def _expand_dims(index: Tensor, x: Tensor) -> Tensor:
    return index.reshape(*index.shape, *(1,) * (x.dim() - 2))


def length_mask(x: Tensor, length: Tensor | None) -> Tensor | None:
    """The mask, bool `[batch, time]`, of right-padded x `[batch, time, ...]` with `length` `[batch]` real tokens."""
    return None if length is None else torch.arange(x.shape[1], device=x.device) < length[:, None]


def check_tensor(name: str, value: Any) -> None:
    """Raise ValueError for a list, or anything else that is no tensor with an entry for each token."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor [batch, time], got a {type(value).__name__}")


def check_mask(name: str, mask: Any, x: Tensor) -> None:
    """Raise ValueError for a mask that does not fit x `[batch, time, ...]`, or (seen on a CPU only) has negative
    numbers or NaN, as masks have that are added to attention scores."""
    check_tensor(name, mask)
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {list(mask.shape)} but the tokens are [batch, time] = {list(x.shape[:2])}")
    if mask.is_complex():
        raise ValueError(f"{name} must be bool or numbers, got {mask.dtype}")
    if mask.dtype != torch.bool and is_cheap_to_read(mask) and not bool((mask >= 0).all()):
        raise ValueError(f"{name} has negative numbers or NaN: give 1 for real tokens, 0 for padding")


class SegmentLayout:
    """The tokens of a call cut into segments of `size` tokens, counted from the first real token of each row, so that
    rows are cut at different places. The first segment of a row may have begun in an earlier call.

    `fold` makes segments rows of a larger batch: row `j * batch + i` is segment j of row i, right padded.

    Args:
        size: Tokens in a segment.
        x: `[batch, ..., time, dim]` of the call.
        seen: `[batch]`, tokens that each row has read before; None: none.
        length: `[batch]`, real tokens of each row, the rest being right padding; None: all.

    Attributes:
        count: Segments of a row.
        lengths: `[count * batch]`, real tokens of each folded row; None: all are real.
        ended: `[batch]`, whether the row stopped where a segment ends.
    """

    def __init__(self, size: int, x: Tensor, seen: Tensor | None, length: Tensor | None) -> None:
        batch, time, device = x.shape[0], x.shape[-2], x.device
        self._time, self._width = time, min(size, time)
        self.count = -(-(time if seen is None else time + size - 1) // size)
        self._sliced = seen is None  # then segments are plain slices
        phase = torch.zeros(batch, dtype=torch.int64, device=device) if seen is None else seen % size
        real = torch.full_like(phase, time) if length is None else length
        border = torch.arange(self.count, device=device)[:, None] * size - phase  # [count, batch]: where segments begin
        starts = border.clamp(min=0)
        lengths = (torch.minimum(border + size, real) - starts).clamp(min=0)
        whole = length is None and (self.count == 1 or (self._sliced and time % size == 0))
        self.lengths = None if whole else lengths.flatten()
        self.ended = (phase + real) % size == 0
        row, token = torch.arange(batch, device=device), torch.arange(time, device=device)
        self._last = ((phase + real) // size).clamp(max=self.count - 1) * batch + row
        # Where the tokens of the folded rows come from, and where those of the call go: [batch, n] each.
        source = starts[..., None] + torch.arange(self._width, device=device)
        self._source = source.clamp(max=time - 1).transpose(0, 1).flatten(1)
        segment = (phase[:, None] + token) // size
        self._target = segment * self._width + token - (segment * size - phase[:, None]).clamp(min=0)

    def fold(self, x: Tensor) -> Tensor:
        """`[batch, heads, time, ...]` to `[count * batch, heads, width, ...]`."""
        if self.count == 1:
            return x
        rows = x.flatten(3) if x.dim() > 3 else x[..., None]
        total = self.count * self._width
        rows = F.pad(rows, (0, 0, 0, total - self._time)) if self._sliced else take(rows, self._source)
        rows = rows.unflatten(2, (self.count, self._width)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return rows if x.dim() > 3 else rows[..., 0]

    def unfold(self, y: Tensor) -> Tensor:
        """`[count * batch, heads, width, dim]` back to `[batch, heads, time, dim]`."""
        if self.count == 1:
            return y
        rows = y.unflatten(0, (self.count, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return rows[..., : self._time, :] if self._sliced else take(rows, self._target)

    def last(self, x: Tensor) -> Tensor:
        """From `[count * batch, ...]` the segment in which each row of the call stopped: `[batch, ...]`."""
        return x if self.count == 1 else x[self._last]
