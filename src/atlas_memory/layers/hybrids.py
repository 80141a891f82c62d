"""Memory beside attention and memory before attention: MAG and MAL (Titans, Secs. 4.2 and 4.3)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..rules.state import State
from .attention import AttentionState, SlidingWindowAttention
from .documents import read_documents
from .memory import LayerState, NeuralMemory
from .padding import real_tokens
from .persistent import PersistentTokens, WithPersistentTokens
from .stateful import Stateful

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
