"""Causal softmax attention with rotary positions: over a sliding window, the short-term memory of Titans (Sec. 4.2),
and over all earlier tokens.

    y_t = W_o sum_s softmax_s(<R_t q_t, R_s k_s> / sqrt(d)) v_s    over s in (t - window, t], or s <= t

R_t rotates pairs of channels by t times their frequency (RoFormer, Eq. 15; base 10000).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.banded import overlapping, take
from ..rules.autograd import is_cheap_to_read
from ..rules.state import State, check_count
from ..rules.validation import LONGEST, check_size
from .nonfinite_inputs import MAX_ABS_ATTENTION, propagates_nan, replace_nonfinite, restore_nan
from .padding import move_padding_right, restore_padding
from .stateful import Stateful
from .varlen import forward_packed


@dataclass(frozen=True, repr=False, eq=False)
class AttentionState(State):
    """The key-value cache of attention.

    Attributes:
        keys, values: `[batch, heads, slots, head_dim]`, those of the last tokens at the right: `window - 1` with
            unrotated keys for a sliding window, all with rotated keys for full attention. Values of nonfinite tokens
            are NaN.
        seen: `[batch]` int64, real tokens that each row has read. Slots further back than that are empty.
    """

    keys: Tensor
    values: Tensor
    seen: Tensor


@dataclass(frozen=True, repr=False, eq=False)
class FullAttentionState(AttentionState):
    """That of full attention, whose keys are rotated."""


class _Attention(Stateful):
    """Projections, padding, the cache and tokens that are not finite, for both attentions."""

    state_type: ClassVar[type[AttentionState]]
    slots: int | None
    """Slots of the cache; None: one for every token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        check_rotary_heads(dim, heads)
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState]:
        """y `[batch, time, dim]` and the new state; arguments as of `SequenceMixer.forward`, and

        Args:
            prefix: `[tokens, dim]`, which every token sees beside its sliding window (Titans, Fig. 3b), without a
                position, since distances would grow beyond all those met in training.

        Raises:
            ValueError: x, state or mask of a shape or kind that does not fit.
        """
        if document_starts is not None:
            return forward_packed(self, x, state, mask, document_starts, prefix=prefix)
        state = self._check(x, state)
        batch, time, dim = x.shape
        lengths: Tensor | int = time
        if mask is not None:
            x, lengths, order = move_padding_right(x, mask)
        q, k, v, nonfinite = self._project(x, state)
        keys, values, nonfinite = self._append(k, v, nonfinite, state)
        y = self._attend(q, keys, values, state.seen, prefix) if time else q
        y = self.out(y.transpose(1, 2).reshape(batch, time, dim))
        if nonfinite is not None:
            y = restore_nan(y, self._attends_to(nonfinite, time))
            values = values.masked_fill(nonfinite[:, None, :, None], torch.nan)
        if mask is not None:
            y = restore_padding(y, order, mask)
        total = keys.shape[2]
        slots = total if self.slots is None else self.slots
        if mask is not None or slots < total:
            last = torch.arange(total - slots, total, device=x.device).expand(batch, -1)
            if mask is not None:  # the last real tokens end where padding begins; slots before the first stay empty
                last = (last - (time - lengths)[:, None]).clamp(min=0)  # type: ignore[index]
            keys, values = take(keys, last), take(values, last)
        return y, self.state_type(keys, values, state.seen + lengths)

    def _project(self, x: Tensor, state: AttentionState) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v `[batch, heads, time, head_dim]`, and which tokens are not finite, as `replace_nonfinite` says."""
        x, nonfinite = replace_nonfinite(x, MAX_ABS_ATTENTION)
        qkv = self.qkv(x)
        if qkv.dtype == torch.float16:  # where the projection of finite numbers may overflow
            qkv, more = replace_nonfinite(qkv)
            nonfinite = more if nonfinite is None else nonfinite if more is None else nonfinite | more
        q, k, v = self._split_heads(qkv)
        return q, k, v, nonfinite

    def _split_heads(self, qkv: Tensor, parts: int = 3) -> Tensor:
        """`[batch, time, parts * dim]` to `[parts, batch, heads, time, head_dim]`."""
        return qkv.unflatten(-1, (parts, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)

    def _append(
        self, k: Tensor, v: Tensor, nonfinite: Tensor | None, state: AttentionState
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """k and v behind those of the state, and which of all tokens are not finite, bool `[batch, slots]`."""
        if self.slots is None and not state.keys.shape[2]:
            return k, v.contiguous(), nonfinite  # a view of q, k and v together would keep all three in the state
        keys, values = state.keys.to(k.dtype), state.values.to(v.dtype)
        before = values[:, 0, :, 0].isnan()
        if propagates_nan(k[:, 0]) or (nonfinite is None and is_cheap_to_read(before) and not bool(before.any())):
            nonfinite = None
        else:
            keys, values = (x.masked_fill(before[:, None, :, None], 0.0) for x in (keys, values))
            new = before.new_zeros(k[:, 0, :, 0].shape) if nonfinite is None else nonfinite
            nonfinite = torch.cat([before, new], 1)
        return torch.cat([keys, k], 2), torch.cat([values, v], 2), nonfinite

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, prefix: Tensor | None) -> Tensor:
        """Attention of q `[batch, heads, time, head_dim]` to the keys and values of the cache and of this call."""
        raise NotImplementedError

    def _attends_to(self, some: Tensor, time: int) -> Tensor:
        """Which of the last `time` tokens attend to any of `some` tokens, bool `[batch, slots]`."""
        count = F.pad(some.cumsum(1), (1, 0))
        return count[:, some.shape[1] - time + 1 :] > (0 if self.slots is None else count[:, :time])

    def _check(self, x: Tensor, state: AttentionState | None) -> AttentionState:
        """`state`, or an empty one; ValueError for x or a state of another kind or batch size."""
        self.check_x(x, self.qkv)
        self.check_state(state, self.state_type)
        batch = x.shape[0]
        if state is None:
            empty = x.new_zeros(batch, self.heads, self.slots or 0, self.head_dim)
            return self.state_type(empty, empty, torch.zeros(batch, dtype=torch.int64, device=x.device))
        check_count(state.seen)
        slots = state.keys.shape[2] if self.slots is None else self.slots
        expected, got = (batch, self.heads, slots, self.head_dim), tuple(state.keys.shape)
        if got != expected or type(state) is not self.state_type:
            raise ValueError(
                f"state is a {type(state).__name__} with keys {got}, and must be a {self.state_type.__name__} with "
                f"{expected}: this one is of another batch or attention"
            )
        return state


class FullAttention(_Attention):
    """Each token attends to itself and everything before it: the attention of Transformer++. Its state grows.

    Args:
        dim: Width of the tokens.
        heads: Number of heads; ValueError unless `dim / heads` is a whole even number.
    """

    state_type = FullAttentionState
    grows = True
    slots = None

    def _project(self, x: Tensor, state: AttentionState) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, nonfinite = super()._project(x, state)
        positions = state.seen[:, None] + torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary(positions[:, None], self.head_dim, q)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, nonfinite

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, prefix: Tensor | None) -> Tensor:
        total, time = keys.shape[2], q.shape[2]
        past = total - time
        if not past:
            # Real tokens are in front, so that causality alone keeps them from padding: no mask, the fastest kernel.
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        slot, token = torch.arange(total, device=q.device), torch.arange(time, device=q.device)
        allowed = (slot <= past + token[:, None]) & (slot >= (past - seen)[:, None, None])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed[:, None])


class SlidingWindowAttention(_Attention):
    """Each token attends to itself and the `window - 1` tokens before it.

    Queries are taken in blocks of `window`, each against its own block and the one before, so the cost is linear in
    time. Rotary angles are measured from the start of those two blocks, and stay exact however long the stream is.

    Args:
        dim: Width of the tokens.
        heads: Number of heads; ValueError unless `dim / heads` is a whole even number.
        attention_window: Tokens that a token sees, itself included.
    """

    state_type = AttentionState

    def __init__(self, dim: int, heads: int, attention_window: int = 64) -> None:
        super().__init__(dim, heads)
        check_size("attention_window", attention_window, LONGEST)
        self.window, self.slots = attention_window, attention_window - 1

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, prefix: Tensor | None) -> Tensor:
        batch, _, time, width = q.shape
        window, block = self.window, min(self.window, time)
        blocks = -(-time // block)
        ragged = blocks * block - time
        # One unused slot in front makes the past `window` long; block i of queries meets slots
        # [i * block, i * block + window + block).
        plain = F.pad(q, (0, 0, 0, ragged)).unflatten(2, (blocks, block))
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
        q, keys = rotate(plain, cos[window:], sin[window:]), rotate(keys, cos, sin)
        if prefix is not None:
            # Scores against the prefix are of unrotated queries. One product gives both kinds, with queries [rotated,
            # plain] against keys [key, 0] of tokens and [0, key] of the prefix.
            of_prefix = self._split_heads(self.qkv(prefix[None].to(q.dtype)))[1:]
            prefix_keys, prefix_values = (x[:, :, None].expand(batch, -1, blocks, -1, -1) for x in of_prefix)
            q = torch.cat([q, plain], -1)
            keys = torch.cat([F.pad(prefix_keys, (width, 0)), F.pad(keys, (0, width))], -2)
            values = torch.cat([prefix_values, values], -2)
            allowed = F.pad(allowed, (prefix.shape[0], 0), value=True)
        q, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, keys, values))
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


def check_rotary_heads(dim: int, heads: int) -> None:
    """Raise ValueError unless `dim` divides into `heads` heads of an even width, whose channels form pairs."""
    check_size("heads", heads)
    check_size("dim", dim)
    if dim % (2 * heads):
        raise ValueError(f"dim={dim} with heads={heads}: rotary attention needs dim to be a multiple of {2 * heads}")
