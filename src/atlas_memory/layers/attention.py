"""Causal softmax attention over a sliding window: the short-term memory of Titans, Sec. 4.2."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .padding import pack, unpack


@dataclass(frozen=True)
class AttentionState:
    """What attention keeps of the past; its size does not depend on how much was read.

    Attributes:
        keys, values: `[batch, heads, window - 1, head_dim]`, the last tokens at the right, keys unrotated.
        seen: `[batch]` int64, real tokens read by each row. Slots further back than that are empty.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> "AttentionState":
        """The same state with fn applied to every tensor."""
        return AttentionState(fn(self.keys), fn(self.values), fn(self.seen))


class SlidingWindowAttention(nn.Module):
    """Each token attends to itself and the `window - 1` tokens before it, with rotary positions.

    Queries are taken in blocks of `window`, each against its own block and the one before, so the cost is
    linear in time. Rotary angles are measured from the start of those two blocks: only differences of
    positions count, and so they stay small and exact however long the stream is.

    Args:
        dim: Width of the tokens.
        heads: Number of heads; `dim / heads` must be a whole even number.
        window: Tokens that a token sees, itself included.

    Raises:
        ValueError: A bad argument.
    """

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or dim % (2 * heads):
            raise ValueError(
                f"dim={dim} with heads={heads}: rotary attention needs heads of an even width; "
                f"choose dim as a multiple of {2 * max(heads, 1)}"
            )
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.heads, self.head_dim, self.window = heads, dim // heads, window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, state: AttentionState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        """Attend; continue from `state` if there is one.

        Args:
            x: `[batch, time, dim]`, time may be 0.
            state: What the last call returned, or None at the start.
            mask: `[batch, time]`, nonzero for real tokens; padding may be anywhere and its outputs are zero.

        Returns:
            y `[batch, time, dim]` in x's dtype, and the new state.

        Raises:
            ValueError: The state is of another batch size, or the mask does not fit x.
        """
        batch, time, dim = x.shape
        if state is None:
            empty = x.new_zeros(batch, self.heads, self.window - 1, self.head_dim)
            state = AttentionState(empty, empty, torch.zeros(batch, dtype=torch.int64, device=x.device))
        if state.seen.shape[0] != batch:
            raise ValueError(f"x has batch size {batch} but the state has {state.seen.shape[0]}; give the same rows")
        if mask is None:
            lengths = torch.full((batch,), time, device=x.device)
        else:
            x, lengths, order = pack(x, mask)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        keys = torch.cat([state.keys.to(k.dtype), k], dim=2)
        values = torch.cat([state.values.to(v.dtype), v], dim=2)
        y = self._attend(q, keys, values, state.seen) if time else q
        y = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        if mask is not None:
            y = unpack(y, order, mask)
        # The last window - 1 real tokens of each row: they end where the row's padding begins.
        last = lengths[:, None] + torch.arange(self.window - 1, device=x.device)
        last = last[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
        return y, AttentionState(keys.gather(2, last), values.gather(2, last), state.seen + lengths)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """q `[batch, heads, time, head_dim]` against keys and values of `window - 1 + time` tokens."""
        batch, _, time, width = q.shape
        window, block = self.window, min(self.window, time)
        blocks = -(-time // block)
        ragged = blocks * block - time
        # One dead slot in front makes the past `window` long; block i of queries meets slots
        # [i * block, i * block + window + block).
        q = F.pad(q, (0, 0, 0, ragged)).unflatten(2, (blocks, block))
        keys, values = (F.pad(x, (0, 0, 1, ragged)) for x in (keys, values))
        keys, values = (x.unfold(2, window + block, block).transpose(-1, -2) for x in (keys, values))

        row = torch.arange(block, device=q.device)[:, None]
        slot = torch.arange(window + block, device=q.device)
        band = (slot > row) & (slot <= row + window)
        first = window - seen.clamp(max=window - 1)
        start = torch.arange(blocks, device=q.device)[:, None] * block
        real = slot + start >= first[:, None, None]
        allowed = (band & real[:, :, None, :]).flatten(0, 1)[:, None]

        cos, sin = _rotary(window + block, width, q)
        q = _rotate(q, cos[window:], sin[window:])
        keys = _rotate(keys, cos, sin)
        q, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, keys, values))
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
        return y.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]


def _rotary(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, width / 2]` of RoPE (RoFormer, Eq. 15), base 10000, at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)
    angle = torch.arange(length, device=like.device, dtype=dtype)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of x `[..., length, width]`; the dtype is kept."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)
