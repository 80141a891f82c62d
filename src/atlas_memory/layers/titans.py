"""The architectures of Titans (arXiv 2501.00663): a neural memory M and attention over the same tokens x.

    MAC    h = M_s*(x)    y = x + Attn([p || h || x])    o = (norm(y) + b) * silu(norm(M*(y)))             (Eqs. 21-25)
    MAG    o = (norm(SW-Attn(x; p)) + b) * silu(norm(M([p || x])))                                         (Eqs. 26-28)
    MAL    m = M([p || x])    o = m + SW-Attn(norm([p || x] + m))                                          (Eqs. 29-31)

p are persistent tokens (Eq. 19), learned and the same for every input. M* reads without writing; M_s is the memory as a
segment begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.banded import shift_right
from ..rules.state import State, check_count
from ..rules.validation import LONGEST, check_size
from .attention import AttentionState, SlidingWindowAttention, check_rotary_heads, rotary, rotate
from .neural_memory import LayerState, NeuralMemory
from .nonfinite_inputs import MAX_ABS_ATTENTION
from .padding import SegmentLayout, length_mask
from .stateful import Stateful
from .varlen import SequenceMixer, forward_packed

START_ATTENTION = 0.3
"""The weight of the norm of the attention's output, in a fresh `MemoryGate`."""


class PersistentTokens(nn.Module):
    """Learned tokens `weight` `[count, dim]`, at the scale of normed tokens. ValueError for a bad count."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"persistent_tokens must be a whole number, 0 for none; got {count!r}")
        check_size("persistent_tokens", count, LONGEST)
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class WithPersistentTokens(Stateful):
    """A mixer over `[p || x]`, persistent tokens p before the sequence x; its outputs at p are dropped.

    A call without a state reads p first, in all rows, whether or not they have real tokens yet.
    """

    def __init__(self, mixer: nn.Module, tokens: PersistentTokens) -> None:
        super().__init__()
        self.dim = tokens.weight.shape[1]
        self.mixer = mixer
        self.tokens = tokens

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """y `[batch, time, dim]` and the mixer's state; arguments as of `SequenceMixer.forward`."""
        if document_starts is not None:
            return forward_packed(self, x, state, mask, document_starts)
        before = state
        if state is None:
            _, before = self.mixer(self.tokens.weight.to(x.dtype).expand(x.shape[0], -1, -1))
        y, after = self.mixer(x, before, mask)
        return self.link_unused_parameters(y, state), after


class MemoryGate(nn.Module):
    """Attention gated by a memory, `(norm(attention) + b) * silu(norm(memory))` (Titans, Secs. 4.1, 4.2 and 4.4).

    The norms have the learned weights of Sec. 4.4. The bias b is ours; it begins at 1, and the weight of the
    attention's norm at `START_ATTENTION`. Without b the attention would give the memory's answer another random sign
    for every token and channel, and small models learn nothing from their memory (notes/blocks.md)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps)
        self.memory_norm = nn.RMSNorm(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.attention_norm.weight, START_ATTENTION)
        nn.init.ones_(self.memory_norm.weight)
        nn.init.ones_(self.bias)

    def forward(self, attention: Tensor, memory: Tensor) -> Tensor:
        """The outputs of attention and memory, `[batch, time, dim]` each; the result has the same shape."""
        # Under autocast both are narrower than the norms' weights, for which PyTorch has no fused norm.
        wide = self.memory_norm.weight.dtype
        gate = F.silu(self.memory_norm(memory.to(wide)))
        return ((self.attention_norm(attention.to(wide)) + self.bias) * gate).to(memory.dtype)


@dataclass(frozen=True, repr=False, eq=False)
class ContextState(State):
    """What `MemoryAsContext` carries; its size is constant.

    Attributes:
        memory: The memory's state.
        start: The memory's weights as the segment began.
        keys, values: `[batch, heads, 2, segment, head_dim]` of the segment so far: first those of h, then those of x;
            keys are unrotated. Slots that a row has not reached yet hold the segment before.
        seen: `[batch]` int64, tokens that each row has read. (The memory counts those that it has written.)
    """

    memory: LayerState
    start: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    seen: Tensor


class MemoryAsContext(SequenceMixer):
    """The mixer "mac": attention within segments over persistent tokens, memories and tokens (Titans, Eqs. 21-25).

    M_s* reads the memory as it was when the segment began (the paper's M_0). A token attends to all p, and to the h and
    x of itself and earlier tokens of its segment: a later h_j, made of x_j, would leak the future. The memory then
    writes y token by token, and M* reads it after each write. Segments are counted from each row's first real token.
    Rotary positions are those of the concatenation.

    Args:
        dim: Width of the tokens.
        heads: Heads of the memory and of the attention.
        attention_window: Tokens in a segment.
        persistent_tokens: How many p there are.
        eps: Of all norms.
        memory: Further arguments of `NeuralMemory`; ValueError for a hierarchy or Exponential features.
    """

    state_type, input_projection = ContextState, "q"
    max_abs = MAX_ABS_ATTENTION

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        attention_window: int = 64,
        persistent_tokens: int = 0,
        eps: float = 1e-6,
        **memory: Any,
    ) -> None:
        super().__init__()
        check_rotary_heads(dim, heads)
        check_size("attention_window, the length of a segment,", attention_window, LONGEST)
        self.dim, self.heads, self.segment = dim, heads, attention_window
        self.persistent = PersistentTokens(persistent_tokens, dim) if persistent_tokens != 0 else None
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        if memory.get("hierarchy") is not None or self.memory.rule.features.infinite:
            raise ValueError(
                "mac copies the memory as each segment begins: take Polynomial features and no hierarchy, or mag or mal"
            )
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = MemoryGate(dim, eps)

    def _forward(self, x: Tensor, state: ContextState | None, length: Tensor | None) -> tuple[Tensor, ContextState]:
        seen = None if state is None else state.seen
        state = self._empty_state(x) if state is None else state
        check_count(state.seen)
        if (got := (len(state.seen), state.keys.shape[3])) != (len(x), self.segment):
            raise ValueError(
                f"state has batch and segment {got}, this call {(len(x), self.segment)}: give that of these rows"
            )
        if not x.shape[1]:
            return torch.zeros_like(x), state
        persistent = None if self.persistent is None else self.kv(self.persistent.weight[None].to(x.dtype))
        outputs = []
        if length is None and (seen is None or x.shape[1] == 1):  # segments are plain slices
            for segment in x.split(self.segment, 1):
                y, state = self._forward_segment(segment, None, persistent, state)
                outputs.append(y)
            return torch.cat(outputs, 1), state
        layout = SegmentLayout(self.segment, x, seen, length)
        counts = [None] if layout.lengths is None else layout.lengths.chunk(layout.count)
        for segment, count in zip(layout.fold(x[:, None])[:, 0].chunk(layout.count), counts, strict=True):
            y, state = self._forward_segment(segment, count, persistent, state)
            outputs.append(y)
        return layout.unfold(torch.cat(outputs)[:, None])[:, 0], state

    def _empty_state(self, x: Tensor) -> ContextState:
        memory = self.memory(x[:, :0])[1]
        empty = x.new_zeros(x.shape[0], self.heads, 2, self.segment, x.shape[2] // self.heads)
        none = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return ContextState(memory, memory.memory.readout_weights(self.memory.rule), empty, empty, none)

    def _forward_segment(
        self, x: Tensor, count: Tensor | None, persistent: Tensor | None, state: ContextState
    ) -> tuple[Tensor, ContextState]:
        """x's first `count` tokens are real and of each row's segment; `persistent`: keys and values of p."""
        real = length_mask(x, count)
        slot = state.seen % self.segment
        count = torch.full_like(slot, x.shape[1]) if count is None else count
        context = torch.stack([self.memory.retrieve(x, state.memory.memory.answering_with(state.start)), x], 1)
        k, v = self.kv(context).unflatten(-1, (2, self.heads, -1)).permute(3, 0, 4, 1, 2, 5)
        keys, values = (self._update_slots(new, old, slot, count) for new, old in ((k, state.keys), (v, state.values)))
        y = x + self._attend(x, slot, keys, values, persistent)
        recalled, memory = self.memory(y, state.memory, real)
        ended = (slot + count == self.segment)[:, None, None, None]
        start = tuple(
            torch.where(ended, w, s.to(w.dtype))
            for w, s in zip(memory.memory.readout_weights(self.memory.rule), state.start, strict=True)
        )
        return self.gate(y, recalled), ContextState(memory, start, keys, values, state.seen + count)

    def _update_slots(self, new: Tensor, old: Tensor, slot: Tensor, count: Tensor) -> Tensor:
        """`old` with the first `count` `[batch]` tokens of `new` in its slots from `slot` `[batch]` on."""
        shifted = shift_right(new, slot, self.segment)
        at = torch.arange(self.segment, device=slot.device) - slot[:, None]
        inside = (at >= 0) & (at < count[:, None])
        return torch.where(inside[:, None, None, :, None], shifted, old.to(shifted.dtype))

    def _attend(self, x: Tensor, slot: Tensor, keys: Tensor, values: Tensor, persistent: Tensor | None) -> Tensor:
        """Attention of x, whose first token has slot `slot` `[batch]`, over `[p || h || x]` of the segment so far."""
        batch, width, dim = x.shape
        keys, values = keys.flatten(2, 3), values.flatten(2, 3)
        own = (slot[:, None] + torch.arange(width, device=x.device)).clamp(max=self.segment - 1)
        allowed = (torch.arange(self.segment, device=x.device) <= own[..., None]).repeat(1, 1, 2)
        before = 0
        if persistent is not None:
            before = persistent.shape[1]
            k, v = persistent.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).expand(-1, batch, -1, -1, -1)
            keys, values = torch.cat([k, keys], 2), torch.cat([v, values], 2)
            allowed = F.pad(allowed, (before, 0), value=True)
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        cos, sin = rotary(torch.arange(before + 2 * self.segment, device=x.device), q.shape[-1], q)
        at = before + self.segment + own[:, None]
        q, keys = rotate(q, cos[at], sin[at]), rotate(keys, cos, sin)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed[:, None])
        return self.out(y.transpose(1, 2).reshape(batch, width, dim))


@dataclass(frozen=True, repr=False, eq=False)
class HybridState(State):
    """The states of a memory and of the attention beside or after it."""

    memory: LayerState
    attention: AttentionState


class MemoryAsGate(SequenceMixer):
    """The mixer "mag": sliding-window attention gated by the memory beside it (Titans, Eqs. 26-28); see `MemoryGate`.

    Persistent tokens are seen from every window of the attention, and read by the memory before x. The arguments are
    those of `MemoryAsContext`; `attention_window` tokens are seen, itself included and p not."""

    state_type, input_projection = HybridState, "attention.qkv"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        attention_window: int = 64,
        persistent_tokens: int = 0,
        eps: float = 1e-6,
        **memory: Any,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.memory: nn.Module = NeuralMemory(dim, heads, eps=eps, **memory)
        if persistent_tokens != 0:
            self.memory = WithPersistentTokens(self.memory, PersistentTokens(persistent_tokens, dim))
        self.attention = SlidingWindowAttention(dim, heads, attention_window)
        self.gate = MemoryGate(dim, eps)

    def _forward(self, x: Tensor, state: HybridState | None, length: Tensor | None) -> tuple[Tensor, HybridState]:
        mask = length_mask(x, length)
        prefix = self.memory.tokens.weight if isinstance(self.memory, WithPersistentTokens) else None
        memory, memory_state = self.memory(x, state.memory if state else None, mask)
        attention, attention_state = self.attention(x, state.attention if state else None, mask, prefix=prefix)
        return self.gate(attention, memory), HybridState(memory_state, attention_state)


class MemoryAsLayer(SequenceMixer):
    """The mixer "mal": a memory, then sliding-window attention (Titans, Eqs. 29-31), with the residuals of Sec. 4.4 and
    a norm before the attention as before every other layer.

    Eq. 31 prints SW-Attn(M(x)): a fresh attention takes a mean over its window, in which what the memory answers to one
    token is lost. Persistent tokens are those of `WithPersistentTokens`, and slide out of the window like any other:
    Eq. 31 has no prefix, unlike Eq. 27. The other arguments are those of `MemoryAsGate`.
    """

    state_type, input_projection = HybridState, "attention.qkv"

    def __init__(self, dim: int, heads: int, *, attention_window: int = 64, eps: float = 1e-6, **memory: Any) -> None:
        super().__init__()
        self.dim = dim
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        self.norm = nn.RMSNorm(dim, eps)
        self.attention = SlidingWindowAttention(dim, heads, attention_window)

    def _forward(self, x: Tensor, state: HybridState | None, length: Tensor | None) -> tuple[Tensor, HybridState]:
        mask = length_mask(x, length)
        m, memory_state = self.memory(x, state.memory if state else None, mask)
        normed = self.norm((x + m).to(self.norm.weight.dtype)).to(m.dtype)
        y, attention_state = self.attention(normed, state.attention if state else None, mask)
        return m + y, HybridState(memory_state, attention_state)
