"""Residual blocks: a mixer over time, then a SwiGLU MLP over channels.

A mixer is a module with `y, state = mixer(x, state, mask)`, x and y `[batch, time, dim]`, whose state has
`map(fn)`. `BLOCKS` names the mixers: a new one is a class or function here and one line there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .attention import AttentionState, SlidingWindowAttention
from .memory import NeuralMemory


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020, Eq. 6), `[..., dim]` to `[..., dim]`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def memory_alone(dim: int, heads: int, *, attention_window: int | None, eps: float, **memory: Any) -> NeuralMemory:
    """The mixer "lmm": the neural memory and no attention (Titans, Sec. 4.1; its LMM rows)."""
    return NeuralMemory(dim, heads, eps=eps, **memory)


@dataclass(frozen=True)
class GateState:
    """State of `MemoryAsGate`: that of its two branches."""

    memory: Any
    attention: AttentionState

    def map(self, fn: Callable[[Tensor], Tensor]) -> "GateState":
        """The same state with fn applied to every tensor."""
        return GateState(self.memory.map(fn), self.attention.map(fn))


class MemoryAsGate(nn.Module):
    """The mixer "mag": sliding-window attention gated by the memory beside it (Titans, Eqs. 26-28).

    Both branches read x; `y = norm(attention) * silu(norm(memory))`, the norms with learnable vectors.
    """

    def __init__(self, dim: int, heads: int, *, attention_window: int, eps: float, **memory: Any) -> None:
        super().__init__()
        self.memory = NeuralMemory(dim, heads, eps=eps, **memory)
        self.attention = SlidingWindowAttention(dim, heads, attention_window)
        self.memory_norm = nn.RMSNorm(dim, eps)
        self.attention_norm = nn.RMSNorm(dim, eps)

    def forward(
        self, x: Tensor, state: GateState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, GateState]:
        """x `[batch, time, dim]`, mask `[batch, time]`; returns y `[batch, time, dim]` and the state."""
        memory, memory_state = self.memory(x, state.memory if state else None, mask)
        attention, attention_state = self.attention(x, state.attention if state else None, mask)
        y = self.attention_norm(attention) * F.silu(self.memory_norm(memory))
        return y, GateState(memory_state, attention_state)


BLOCKS: dict[str, Callable[..., nn.Module]] = {"lmm": memory_alone, "mag": MemoryAsGate}


class MemoryBlock(nn.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`, with RMSNorm before each.

    Args:
        dim: Width of the tokens.
        mixer: A mixer over time, as this module describes them.
        hidden: Channels of the MLP.
        eps: Of the norms.
    """

    def __init__(self, dim: int, mixer: nn.Module, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(dim, eps)
        self.mixer = mixer
        self.mlp_norm = nn.RMSNorm(dim, eps)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """x `[batch, time, dim]`, mask `[batch, time]`; returns y `[batch, time, dim]` and the state."""
        mixed, state = self.mixer(self.mixer_norm(x), state, mask)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state
