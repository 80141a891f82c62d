"""Memory beside attention and memory before attention: MAG and MAL (Titans, Secs. 4.2 and 4.3)."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..mathematics.state import State
from .attention import AttentionState, SlidingWindowAttention
from .documents import read_documents
from .memory import LayerState, NeuralMemory
from .persistent import PersistentTokens, WithPersistentTokens
from .stateful import Stateful


@dataclass(frozen=True, repr=False)
class HybridState(State):
    """The states of a memory and of the attention beside or after it."""

    memory: LayerState
    attention: AttentionState


class MemoryAsGate(Stateful):
    """The mixer "mag": sliding-window attention gated by the memory beside it (Titans, Eqs. 26-28).

    `y = norm(SW-Attn*(x)) * silu(norm(M([p || x])))`, with learnable vectors in the norms. Attention and memory M both
    read x. Persistent tokens p are seen from every window of the attention, and read by the memory before x.

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
        if persistent_tokens:
            self.memory = WithPersistentTokens(self.memory, PersistentTokens(persistent_tokens, dim))
        self.attention = SlidingWindowAttention(dim, heads, attention_window)
        self.memory_norm = nn.RMSNorm(dim, eps)
        self.attention_norm = nn.RMSNorm(dim, eps)

    def forward(
        self,
        x: Tensor,
        state: HybridState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, HybridState]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y `[batch, time, dim]` and the state."""
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        self.check_state(state, HybridState)
        prefix = self.memory.tokens.weight if isinstance(self.memory, WithPersistentTokens) else None
        memory, memory_state = self.memory(x, state.memory if state else None, mask)
        attention, attention_state = self.attention(x, state.attention if state else None, mask, prefix)
        y = self.attention_norm(attention) * F.silu(self.memory_norm(memory))
        return y, HybridState(memory_state, attention_state)


class MemoryAsLayer(Stateful):
    """The mixer "mal": `y = SW-Attn(M(x))` (Titans, Eqs. 29-31).

    Its persistent tokens are in front of the sequence (`WithPersistentTokens`), so what the memory makes of them slides
    out of the attention's window like any other token: Eq. 31 has no prefix, unlike Eq. 27.

    Args:
        dim: Width of the tokens.
        heads: Heads of the memory and of the attention.
        attention_window: Tokens that the attention sees, itself included.
        eps: Of the memory's norm.
        memory: Further arguments of `NeuralMemory`.
    """

    def __init__(self, dim: int, heads: int, *, attention_window: int = 64, eps: float = 1e-6, **memory: Any) -> None:
        super().__init__()
        self.dim = dim
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        self.attention = SlidingWindowAttention(dim, heads, attention_window)

    def forward(
        self,
        x: Tensor,
        state: HybridState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, HybridState]:
        """x `[batch, time, dim]`, mask and document_starts `[batch, time]`; y `[batch, time, dim]` and the state."""
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        self.check_state(state, HybridState)
        x, memory_state = self.memory(x, state.memory if state else None, mask)
        y, attention_state = self.attention(x, state.attention if state else None, mask)
        return y, HybridState(memory_state, attention_state)
