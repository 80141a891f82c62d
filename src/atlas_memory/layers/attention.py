"""Causal softmax attention: over a sliding window, which is the short-term memory of Titans (Sec. 4.2), and over all
earlier tokens.

Rotary positions (RoFormer, Eq. 15; base 10000).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.banded import overlapping, take
from ..rules.autograd import is_cheap_to_read
from ..rules.state import State, check_count
from ..rules.validation import LONGEST, check_size
from .nonfinite_inputs import FAR_OF_ATTENTION, admit, passes, spoilt
from .padding import pack, unpack
from .stateful import Stateful
from .varlen import read_documents


@dataclass(frozen=True, repr=False, eq=False)
class AttentionState(State):
    """What attention keeps of the past.

    Attributes:
        keys, values: `[batch, heads, slots, head_dim]`, those of the last tokens at the right. A sliding window has
            `window - 1` slots however much was read, and its keys are kept unrotated. Full attention has a slot for
            every token that it read, padding included, and its keys are kept rotated. The values of a token that is no
            number are NaN.
        seen: `[batch]` int64, how many real tokens each row (a sequence of the batch) has read. Slots further back than
            that are empty.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class FullAttentionState(AttentionState):
    """That of full attention, whose keys are rotated."""


class _Attention(Stateful):
    """What both attentions share: projections, padding and the check of a state."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def _look(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v `[batch, heads, time, head_dim]` of x, and which tokens are no numbers, as `admit` says."""
        x, bad = admit(x, FAR_OF_ATTENTION)
        qkv = self.qkv(x)
        if qkv.dtype == torch.float16:  # where the projection of a number may be none
            qkv, more = admit(qkv)
            bad = more if bad is None else bad if more is None else bad | more
        q, k, v = self._split(qkv)
        return q, k, v, bad

    def _after_past(
        self, k: Tensor, v: Tensor, bad: Tensor | None, state: AttentionState
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the state, and behind them k and v; and which of all these tokens are no numbers, bool
        `[batch, slots]`, whose keys and values are zero. None: none, or they were left NaN, as in `admit`."""
        keys, values = state.keys.to(k.dtype), state.values.to(v.dtype)
        before = values[:, 0, :, 0].isnan()
        if passes(k[:, 0]) or (bad is None and is_cheap_to_read(before) and not bool(before.any())):
            bad = None
        else:
            keys, values = (x.masked_fill(before[:, None, :, None], 0.0) for x in (keys, values))
            bad = torch.cat([before, before.new_zeros(k[:, 0, :, 0].shape) if bad is None else bad], 1)
        return torch.cat([keys, k], 2), torch.cat([values, v], 2), bad

    def _split(self, qkv: Tensor, parts: int = 3) -> Tensor:
        """`[batch, time, parts * dim]` to `[parts, batch, heads, time, head_dim]`."""
        return qkv.unflatten(-1, (parts, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)

    def _start(self, x: Tensor, slots: int, state: AttentionState | None, kind: type[AttentionState]) -> AttentionState:
        """`state`, or an empty one of this kind and of so many slots.

        Raises:
            ValueError: x or the state is of another kind, or of another batch size.
        """
        self.check_x(x, self.qkv)
        self.check_state(state, kind)
        batch = x.shape[0]
        if state is None:
            empty = x.new_zeros(batch, self.heads, slots, self.head_dim)
            return kind(empty, empty, torch.zeros(batch, dtype=torch.int64, device=x.device))
        check_count(state.seen)
        if state.seen.shape[0] != batch:
            raise ValueError(f"x has batch size {batch} but the state has {state.seen.shape[0]}; give the same rows")
        held = [state.keys.shape[1], state.keys.shape[3]]
        other = type(state) is not kind or (kind is AttentionState and state.keys.shape[2] != slots)
        if held != [self.heads, self.head_dim] or other:
            raise ValueError(
                f"state has keys {list(state.keys.shape)}, {type(state).__name__}: it is of an attention of "
                "another kind, window, head count or width"
            )
        return state


class FullAttention(_Attention):
    """Each token attends to itself and everything before it, with rotary positions: the attention of Transformer++.

    Its state grows with the sequence.

    Args:
        dim: Width of the tokens.
        heads: Number of heads; `dim / heads` must be a whole even number.

    Raises:
        ValueError: A bad argument.
    """

    grows = True

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Attend; continue from `state` if there is one. Arguments and results as for `SlidingWindowAttention`."""
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        state = self._start(x, 0, state, FullAttentionState)
        batch, time, dim = x.shape
        lengths: Tensor | int = time
        if mask is not None:
            x, lengths, order = pack(x, mask)
        q, k, v, bad = self._look(x)
        token = torch.arange(time, device=x.device)
        cos, sin = rotary((state.seen[:, None] + token)[:, None], self.head_dim, q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        past = state.keys.shape[2]
        if past:
            k, v, bad = self._after_past(k, v, bad, state)
        else:
            v = v.contiguous()  # a part of q, k and v together would keep all three in the state
        if not time:
            y = q
        elif not past:
            # Real tokens are in front, so that causality alone keeps them from padding: no mask, the fastest kernel.
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            slot = torch.arange(past + time, device=x.device)
            allowed = (slot <= past + token[:, None]) & (slot >= (past - state.seen)[:, None, None])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        y = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        if bad is not None:
            y, v = spoilt(y, bad.cumsum(1)[:, past:] > 0), v.masked_fill(bad[:, None, :, None], torch.nan)
        if mask is not None:
            y = unpack(y, order, mask)
            # Move the real tokens of each row to the right end; the slots that this leaves at the left are empty.
            source = torch.arange(past + time, device=x.device) - (time - lengths)[:, None]  # type: ignore[index]
            k, v = (take(slots, source.clamp(min=0)) for slots in (k, v))
        return y, FullAttentionState(k, v, state.seen + lengths)


class SlidingWindowAttention(_Attention):
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
        super().__init__(dim, heads)
        check_size("window", window, LONGEST)
        self.window = window

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """Attend; continue from `state` if there is one.

        Args:
            x: `[batch, time, dim]`, time may be 0.
            state: What the last call returned, or None at the start.
            mask: `[batch, time]`, nonzero for real tokens; padding may be anywhere and its outputs are zero.
            document_starts: `[batch, time]`, nonzero at the first token of every document, which sees none before it.
            prefix: `[tokens, dim]`, tokens that every token sees beside its window (Titans, Fig. 3b). They have no
                position: their distance would grow with the stream, beyond all distances met in training.

        Returns:
            y `[batch, time, dim]` in x's dtype, and the new state.

        Raises:
            ValueError: x or the state is of another kind, the state of another batch size, or the mask does not fit x.
        """
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts, prefix=prefix)
        state = self._start(x, self.window - 1, state, AttentionState)
        batch, time, dim = x.shape
        if prefix is not None and (prefix.dim() != 2 or prefix.shape[1] != dim):
            raise ValueError(f"prefix must be [tokens, {dim}], as wide as x, got {list(prefix.shape)}")
        if mask is None:
            lengths = torch.full((batch,), time, device=x.device)
        else:
            x, lengths, order = pack(x, mask)
        q, k, v, bad = self._look(x)
        keys, values, bad = self._after_past(k, v, bad, state)
        of_prefix = None if prefix is None else self._split(self.qkv(prefix[None].to(x.dtype)))[1:]
        y = self._attend(q, keys, values, state.seen, of_prefix) if time else q
        y = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        if bad is not None:
            met = F.pad(bad.cumsum(1), (1, 0))
            y = spoilt(y, met[:, self.window :] > met[:, :time])
        if mask is not None:
            y = unpack(y, order, mask)
        # The last window - 1 real tokens of each row: they end where the row's padding begins.
        last = lengths[:, None] + torch.arange(self.window - 1, device=x.device)
        keys, values = take(keys, last), take(values, last)
        if bad is not None:
            values = values.masked_fill(bad.gather(1, last)[:, None, :, None], torch.nan)
        return y, AttentionState(keys, values, state.seen + lengths)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, prefix: Tensor | None) -> Tensor:
        """Attention of q `[batch, heads, time, head_dim]` to keys and values of `window - 1 + time` tokens, and to
        those of a prefix, `[2, 1, heads, tokens, head_dim]`. Of the first `window - 1` tokens only the last `seen`
        `[batch]` are there; the others are empty."""
        batch, _, time, width = q.shape
        window, block = self.window, min(self.window, time)
        blocks = -(-time // block)
        ragged = blocks * block - time
        # One dead slot in front makes the past `window` long; block i of queries meets slots
        # [i * block, i * block + window + block).
        q = F.pad(q, (0, 0, 0, ragged)).unflatten(2, (blocks, block))
        keys, values = (F.pad(x, (0, 0, 1, ragged)) for x in (keys, values))
        keys, values = (overlapping(x, window + block, block) for x in (keys, values))

        row = torch.arange(block, device=q.device)[:, None]
        slot = torch.arange(window + block, device=q.device)
        band = (slot > row) & (slot <= row + window)
        first = window - seen.clamp(max=window - 1)
        start = torch.arange(blocks, device=q.device)[:, None] * block
        real = slot + start >= first[:, None, None]
        allowed = (band & real[:, :, None, :]).flatten(0, 1)[:, None]

        cos, sin = rotary(slot, width, q)
        turned = rotate(q, cos[window:], sin[window:])
        keys = rotate(keys, cos, sin)
        if prefix is not None:
            # Scores against the prefix are of unrotated queries. One product gives both kinds, with queries [turned,
            # plain] against keys [key, 0] of tokens and [0, key] of the prefix.
            prefix_keys, prefix_values = (x[:, :, None].expand(batch, -1, blocks, -1, -1) for x in prefix)
            turned = torch.cat([turned, q], -1)
            keys = torch.cat([F.pad(prefix_keys, (width, 0)), F.pad(keys, (0, width))], -2)
            values = torch.cat([prefix_values, values], -2)
            allowed = F.pad(allowed, (prefix.shape[-2], 0), value=True)
        q, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (turned, keys, values))
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed, scale=width**-0.5)
        return y.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]


def rotary(positions: Tensor, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[..., width / 2]` of integer positions `[...]`, in like's dtype but at least float32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)
    angle = positions[..., None].to(dtype) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + width / 2) of x `[..., length, width]`; the dtype is kept."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def check_heads(dim: int, heads: int) -> None:
    """Raise ValueError unless `dim` divides into `heads` heads of an even width, whose channels form pairs."""
    check_size("heads", heads)
    check_size("dim", dim)
    if dim % (2 * heads):
        raise ValueError(
            f"dim={dim} with heads={heads}: rotary attention needs heads of an even width; "
            f"choose dim as a multiple of {2 * heads}"
        )
