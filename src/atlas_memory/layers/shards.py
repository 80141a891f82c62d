"""Tokens cut where shards end, for memories that begin anew there (hierarchy.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.bands import take


class Shards:
    """The tokens of a call cut where shards end, which is at another place in every row (a sequence of the batch).

    ``fold`` makes the shards rows of a larger batch: row ``j * batch + i`` of a folded tensor is the j-th shard of row
    i, right padded. The first shard of a row may have begun in an earlier call.

    Args:
        shard: tokens in a shard.
        q: ``[batch, heads, time, dim]`` of the call, for its sizes and device.
        seen: ``[batch]``, tokens that each row has read before; None: none.
        length: ``[batch]``, real tokens of each row, the rest being right padding; None: all.

    Attributes:
        count: shards of a row.
        lengths: ``[count * batch]``, real tokens of each folded row; None: all.
        ended: ``[batch]``, whether the row stopped where a shard ends.
    """

    def __init__(self, shard: int, q: Tensor, seen: Tensor | None, length: Tensor | None) -> None:
        batch, _, time, _ = q.shape
        self._time, self._width = time, min(shard, time)
        self.count = -(-(time if seen is None else time + shard - 1) // shard)
        self._sliced = seen is None  # then shards are plain slices
        phase = torch.zeros(batch, dtype=torch.int64, device=q.device) if seen is None else seen % shard
        real = torch.full_like(phase, time) if length is None else length
        border = torch.arange(self.count, device=q.device)[:, None] * shard - phase  # [count, batch]: shards' begins
        starts = border.clamp(min=0)
        lengths = (torch.minimum(border + shard, real) - starts).clamp(min=0)
        whole = length is None and (self.count == 1 or (self._sliced and time % shard == 0))
        self.lengths = None if whole else lengths.flatten()
        self.ended = (phase + real) % shard == 0
        row, token = torch.arange(batch, device=q.device), torch.arange(time, device=q.device)
        self._last = ((phase + real) // shard).clamp(max=self.count - 1) * batch + row
        # Where the tokens of the folded rows come from, and where those of the call go: [batch, n] each.
        at = starts[..., None] + torch.arange(self._width, device=q.device)
        self._source = at.clamp(max=time - 1).transpose(0, 1).flatten(1)
        shard_of = (phase[:, None] + token) // shard
        self._goal = shard_of * self._width + token - (shard_of * shard - phase[:, None]).clamp(min=0)

    def fold(self, x: Tensor) -> Tensor:
        """``[batch, heads, time, ...]`` to ``[count * batch, heads, width, ...]``."""
        if self.count == 1:
            return x
        rows = x.flatten(3) if x.dim() > 3 else x[..., None]
        total = self.count * self._width
        rows = F.pad(rows, (0, 0, 0, total - self._time)) if self._sliced else take(rows, self._source)
        rows = rows.unflatten(2, (self.count, self._width)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return rows if x.dim() > 3 else rows[..., 0]

    def unfold(self, y: Tensor) -> Tensor:
        """``[count * batch, heads, width, dim]`` back to ``[batch, heads, time, dim]``."""
        if self.count == 1:
            return y
        rows = y.unflatten(0, (self.count, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return rows[..., : self._time, :] if self._sliced else take(rows, self._goal)

    def last(self, x: Tensor) -> Tensor:
        """From ``[count * batch, ...]`` the shard in which each row of the call stopped: ``[batch, ...]``."""
        return x if self.count == 1 else x[self._last]
