"""Persistent memory: learned tokens, the same for every input, in front of the sequence (Titans, Eq. 19).

Memory as a context of attention: MAC (Titans, Sec. 4.1).

Memory beside attention and memory before attention: MAG and MAL (Titans, Secs. 4.2 and 4.3).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.banded import shift_right, take
from ..rules.state import State, check_count
from ..rules.validation import LONGEST, check_size
from .attention import AttentionState, SlidingWindowAttention, check_heads, rotary, rotate
from .neural_memory import LayerState, NeuralMemory
from .nonfinite_inputs import FAR_OF_ATTENTION
from .padding import real_tokens
from .stateful import Stateful
from .varlen import read_documents


class PersistentTokens(nn.Module):
    """Learned tokens `weight` `[count, dim]`; they start at the scale of normed tokens, in front of which they stand.

    Raises:
        ValueError: `count` below 1.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"persistent_tokens must be a whole number, 0 for none; got {count!r}")
        check_size("persistent_tokens", count, LONGEST)
        self.weight = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, with a standard deviation of 1."""
        nn.init.normal_(self.weight)


class WithPersistentTokens(Stateful):
    """A mixer over `[p_1 .. p_N || x]`, the persistent tokens p before the sequence x; its outputs at p are dropped.

    A call without a state reads p first, in all sequences of the batch, whether or not they have real tokens yet. So p
    is read once, and padding on the left needs no further care.

    Args:
        mixer: A mixer, as `blocks` describes them.
        tokens: p.
    """

    def __init__(self, mixer: nn.Module, tokens: PersistentTokens) -> None:
        super().__init__()
        self.dim = tokens.weight.shape[1]
        self.mixer = mixer
        self.tokens = tokens

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y like x, and the mixer's state."""
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        before = state
        if state is None:
            _, before = self.mixer(self.tokens.weight.to(x.dtype).expand(x.shape[0], -1, -1))
        y, after = self.mixer(x, before, mask)
        return self.with_every_parameter(y, state), after


@dataclass(frozen=True, repr=False, eq=False)
class ContextState(State):
    """What `MemoryAsContext` carries; its size is constant.

    Attributes:
        memory: The memory's state.
        start: The memory's matrices as they carried_prediction when the segment began.
        keys, values: `[batch, heads, 2, segment, head_dim]` of the segment so far: first those of h, which the memory
            answered, then those of the tokens; keys are unrotated. Slots that a row has not reached yet hold the
            segment before.
        seen: `[batch]` int64, tokens that each row (a sequence of the batch) has read; `seen % segment` is its place in
            its segment. (The memory counts those that it has written.)
    """

    memory: LayerState
    start: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    seen: Tensor


_Piece = tuple[Tensor, Tensor, Tensor | None]
"""The tokens of one call that fall into one segment; each row may be at another place in it: x `[batch, width, dim]`,
the real tokens of each row in front; `[batch]`, the slot of the segment in which the first one belongs; and which are
real, bool `[batch, width]`, None: all."""


class MemoryAsContext(Stateful):
    """The mixer "mac": attention within segments over persistent tokens, memories and tokens (Titans, Eqs. 21-25).

    For each segment of tokens x, with p the persistent tokens, M* a read of the memory, and M_s* a read of it as it
    carried_prediction when the segment began (the paper's M_0),

        h = M_s*(x)    y = x + Attn([p || h || x])    o = (norm(y) + b) * silu(norm(M*(y)))

    A token attends to all p, and to the h and x of itself and earlier tokens of its segment: h_j is made of x_j, so a
    later one would tell the future. The memory then writes y token by token, and M* reads it after each write. Segments
    are counted from each sequence's first real token. Rotary positions are those of the concatenation.

    Args:
        dim: Width of the tokens.
        heads: Heads of the memory and of the attention.
        attention_window: Tokens in a segment.
        persistent_tokens: How many p there are.
        eps: Of all norms.
        memory: Further arguments of `NeuralMemory`.

    Raises:
        ValueError: A bad argument.
    """

    max_abs = FAR_OF_ATTENTION

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
        check_heads(dim, heads)
        check_size("attention_window, the length of a segment,", attention_window, LONGEST)
        self.dim, self.heads, self.segment = dim, heads, attention_window
        self.persistent = PersistentTokens(persistent_tokens, dim) if persistent_tokens != 0 else None
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        if memory.get("hierarchy") is not None:
            raise ValueError(
                "hierarchy has no use in mac, which keeps a copy of one memory as it was when a segment began"
            )
        if self.memory.rule.features.infinite:
            raise ValueError(
                "mac keeps a copy of the memory as each segment began, and Exponential features have none of constant "
                "size; take Polynomial features, or the memory in mag or mal"
            )
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate = MemoryGate(dim, eps)

    def forward(
        self,
        x: Tensor,
        state: ContextState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, ContextState]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y `[batch, time, dim]` and the state.

        Raises:
            ValueError: x, state or mask of a shape that does not fit.
        """
        self.check_x(x, self.q)
        self.check_state(state, ContextState)
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        return self.read_real(x, state, mask)

    def _read(self, x: Tensor, state: ContextState | None, length: Tensor | None) -> tuple[Tensor, ContextState]:
        """Read x, whose real tokens are the first `length` of each row."""
        time = x.shape[1]
        whole = state is None and length is None  # then segments are plain slices
        if state is None:
            memory = self.memory(x[:, :0])[1]
            empty = x.new_zeros(x.shape[0], self.heads, 2, self.segment, x.shape[2] // self.heads)
            none = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
            state = ContextState(memory, memory.memory.readout_weights(self.memory.rule), empty, empty, none)
        check_count(state.seen)
        phase = state.seen % self.segment
        if phase.shape[0] != x.shape[0]:
            raise ValueError(f"x has batch size {x.shape[0]} but the state has {phase.shape[0]}; give the same rows")
        if state.keys.shape[3] != self.segment:
            raise ValueError(f"state is of segments of {state.keys.shape[3]} tokens, this layer has {self.segment}")
        persistent = None if self.persistent is None else self.kv(self.persistent.weight[None].to(x.dtype))
        pieces = self._slices(x, phase) if whole else self._pieces(x, phase, length)
        outputs = []
        for piece in pieces:
            y, state = self._read_piece(piece, persistent, state)
            outputs.append(y)
        if not outputs:
            return torch.zeros_like(x), state
        y = torch.cat(outputs, 1)
        if whole:
            return y, state
        # Token n of a row is in piece (phase + n) // segment, where the first piece starts at token 0.
        token = torch.arange(time, device=x.device)
        piece_of = (phase[:, None] + token) // self.segment
        first = (piece_of * self.segment - phase[:, None]).clamp(min=0)
        return take(y, piece_of * outputs[0].shape[1] + token - first), state

    def _slices(self, x: Tensor, phase: Tensor) -> Iterator[_Piece]:
        for piece in x.split(self.segment, 1) if x.shape[1] else ():
            yield piece, phase, None

    def _pieces(self, x: Tensor, phase: Tensor, length: Tensor | None) -> Iterator[_Piece]:
        """x cut where segments end, which may be at another place in every row; `phase` `[batch]` is the place in its
        segment at which each row begins."""
        time, size = x.shape[1], self.segment
        width = min(size, time)
        for j in range(-(-(time + size - 1) // size) if time else 0):
            first = (j * size - phase).clamp(min=0)
            index = first[:, None] + torch.arange(width, device=x.device)
            end = ((j + 1) * size - phase).clamp(max=time if length is None else length)
            slot = phase if j == 0 else torch.zeros_like(phase)
            yield take(x, index.clamp(max=time - 1)), slot, index < end[:, None]

    def _read_piece(self, piece: _Piece, persistent: Tensor | None, state: ContextState) -> tuple[Tensor, ContextState]:
        """The outputs `[batch, width, dim]` of a piece, and the state after it."""
        x, slot, real = piece
        count = torch.full_like(slot, x.shape[1]) if real is None else real.sum(1)
        asked = torch.stack([self.memory.retrieve(x, state.memory.memory.answering_with(state.start)), x], 1)
        k, v = self.kv(asked).unflatten(-1, (2, self.heads, -1)).permute(3, 0, 4, 1, 2, 5)
        keys, values = (self._place(new, old, slot, count) for new, old in ((k, state.keys), (v, state.values)))
        y = x + self._attend(x, slot, keys, values, persistent)
        recalled, memory = self.memory(y, state.memory, real)
        ended = (slot + count == self.segment)[:, None, None, None]
        start = tuple(
            torch.where(ended, w, s.to(w.dtype))
            for w, s in zip(memory.memory.readout_weights(self.memory.rule), state.start, strict=True)
        )
        return self.gate(y, recalled), ContextState(memory, start, keys, values, state.seen + count)

    def _place(self, new: Tensor, old: Tensor, slot: Tensor, count: Tensor) -> Tensor:
        """`old`, the keys or values of a segment, with the first `count` `[batch]` tokens of `new`
        `[batch, heads, 2, width, head_dim]` in its slots from `slot` `[batch]` on."""
        layout = shift_right(new, slot, self.segment)
        at = torch.arange(self.segment, device=slot.device) - slot[:, None]
        inside = (at >= 0) & (at < count[:, None])
        return torch.where(inside[:, None, None, :, None], layout, old.to(layout.dtype))

    def _attend(self, x: Tensor, slot: Tensor, keys: Tensor, values: Tensor, persistent: Tensor | None) -> Tensor:
        """Attention of x `[batch, width, dim]`, whose first token has slot `slot` `[batch]` of its segment, over
        `[p || h || x]` of the segment so far; `persistent` are the keys and values of p, `[1, tokens, 2 dim]`."""
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


START_ATTENTION = 0.3
"""The vector of the norm on what attention gives, in a fresh `MemoryGate`."""


@dataclass(frozen=True, repr=False, eq=False)
class HybridState(State):
    """The states of a memory and of the attention beside or after it."""

    memory: LayerState
    attention: AttentionState


class MemoryGate(nn.Module):
    """Attention gated by a memory, `(norm(attention) + b) * silu(norm(memory))` (Titans, Secs. 4.1, 4.2 and 4.4).

    The norms have learned vectors, those of Sec. 4.4. The vector b is ours. It begins at 1, and the vector of the
    attention's norm at `START_ATTENTION`, so that a fresh gate passes on what the memory answers. Without b, what
    attention happens to give would multiply the memory's answer by another random sign for every token and channel:
    small models learned nothing from their memory in 300 steps, where they do now (docs/blocks.md).

    Args:
        dim: Width of the tokens.
        eps: Of the norms.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps)
        self.memory_norm = nn.RMSNorm(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The starts described above."""
        nn.init.constant_(self.attention_norm.weight, START_ATTENTION)
        nn.init.ones_(self.memory_norm.weight)
        nn.init.ones_(self.bias)

    def forward(self, attention: Tensor, memory: Tensor) -> Tensor:
        """What attention and memory give, `[batch, time, dim]` each; of the same shape."""
        # Under autocast both are narrower than the norms' vectors, for which PyTorch has no fused norm.
        wide = self.memory_norm.weight.dtype
        gate = F.silu(self.memory_norm(memory.to(wide)))
        return ((self.attention_norm(attention.to(wide)) + self.bias) * gate).to(memory.dtype)


class MemoryAsGate(Stateful):
    """The mixer "mag": sliding-window attention gated by the memory beside it (Titans, Eqs. 26-28).

    `y = (norm(SW-Attn*(x)) + b) * silu(norm(M([p || x])))`: see `MemoryGate`. Attention and memory M both read x.
    Persistent tokens p are seen from every window of the attention, and read by the memory before x.

    Args:
        dim: Width of the tokens.
        heads: Heads of the memory and of the attention.
        attention_window: Tokens that the attention sees, itself included and p not.
        persistent_tokens: How many p there are.
        eps: Of all norms.
        memory: Further arguments of `NeuralMemory`.
    """

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

    def forward(
        self,
        x: Tensor,
        state: HybridState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, HybridState]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y `[batch, time, dim]` and the state."""
        self.check_state(state, HybridState)
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        return self.read_real(x, state, mask)

    def _read(self, x: Tensor, state: HybridState | None, length: Tensor | None) -> tuple[Tensor, HybridState]:
        mask = real_tokens(x, length)
        prefix = self.memory.tokens.weight if isinstance(self.memory, WithPersistentTokens) else None
        memory, memory_state = self.memory(x, state.memory if state else None, mask)
        attention, attention_state = self.attention(x, state.attention if state else None, mask, prefix=prefix)
        return self.gate(attention, memory), HybridState(memory_state, attention_state)


class MemoryAsLayer(Stateful):
    """The mixer "mal": a memory, then sliding-window attention (Titans, Eqs. 29-31).

    `m = M(x), y = m + SW-Attn(norm(x + m))`, with the residuals that Sec. 4.4 has everywhere and a norm before the
    attention as before every other layer. Eq. 31 prints SW-Attn(M(x)): a fresh attention takes a mean over its window,
    in which what the memory answers to one token is lost.

    Its persistent tokens are in front of the sequence (`WithPersistentTokens`), so what the memory makes of them slides
    out of the attention's window like any other token: Eq. 31 has no prefix, unlike Eq. 27.

    Args:
        dim: Width of the tokens.
        heads: Heads of the memory and of the attention.
        attention_window: Tokens that the attention sees, itself included.
        eps: Of the norms.
        memory: Further arguments of `NeuralMemory`.
    """

    def __init__(self, dim: int, heads: int, *, attention_window: int = 64, eps: float = 1e-6, **memory: Any) -> None:
        super().__init__()
        self.dim = dim
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        self.norm = nn.RMSNorm(dim, eps)
        self.attention = SlidingWindowAttention(dim, heads, attention_window)

    def forward(
        self,
        x: Tensor,
        state: HybridState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, HybridState]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y `[batch, time, dim]` and the state."""
        self.check_state(state, HybridState)
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        return self.read_real(x, state, mask)

    def _read(self, x: Tensor, state: HybridState | None, length: Tensor | None) -> tuple[Tensor, HybridState]:
        mask = real_tokens(x, length)
        m, memory_state = self.memory(x, state.memory if state else None, mask)
        normed = self.norm((x + m).to(self.norm.weight.dtype)).to(m.dtype)
        y, attention_state = self.attention(normed, state.attention if state else None, mask)
        return m + y, HybridState(memory_state, attention_state)
