"""Residual blocks: a mixer over time, then a SwiGLU MLP over channels.

A mixer is a `Stateful` module with `y, state = mixer(x, state, mask)`, x and y `[batch, time, dim]`. Its state is a
`State`, a frozen dataclass of tensors with the batch first in each. `BLOCKS` names the mixers: a new one is a class and
one line there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from .attention import FullAttention, SlidingWindowAttention
from .hope import SelfModifyingMemory
from .mlp import ContinuumMLP, SwiGLU
from .neural_memory import NeuralMemory
from .stateful import Stateful
from .titans import MemoryAsContext, MemoryAsGate, MemoryAsLayer, PersistentTokens, WithPersistentTokens
from .varlen import PackedRows, forward_packed


def behind_persistent_tokens(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`make`, a mixer's class, with an argument `persistent_tokens`: their number."""

    def build(dim: int, heads: int, *, persistent_tokens: int = 0, **options: Any) -> nn.Module:
        mixer = make(dim, heads, **options)
        if persistent_tokens == 0:
            return mixer
        return WithPersistentTokens(mixer, PersistentTokens(persistent_tokens, dim))

    return build


def self_modifying(
    dim: int, heads: int, *, gate_rank: None = None, hierarchy: None = None, **options: Any
) -> nn.Module:
    """`SelfModifyingMemory`, which takes neither `gate_rank` nor `hierarchy`."""
    for name, value in (("gate_rank", gate_rank), ("hierarchy", hierarchy)):
        if value is not None:
            raise ValueError(f"{name}={value} has no use in block='hope', whose memories make one another; drop it")
    return SelfModifyingMemory(dim, heads, **options)


@dataclass(frozen=True)
class Mixer:
    """How to make a mixer, `make(dim, heads, **options)`, and which options it takes.

    Attributes:
        make: The mixer's class, or a function that makes one.
        memory: Whether it takes `persistent_tokens`, `eps` and the arguments of `NeuralMemory`. A language model gives
            it `key_lag=1` where its configuration leaves that out.
        window: Whether it takes `attention_window`.
    """

    make: Callable[..., nn.Module]
    memory: bool = True
    window: bool = True


BLOCKS: dict[str, Mixer] = {
    "lmm": Mixer(behind_persistent_tokens(NeuralMemory), window=False),
    "mag": Mixer(MemoryAsGate),
    "mal": Mixer(behind_persistent_tokens(MemoryAsLayer)),
    "mac": Mixer(MemoryAsContext),
    "hope": Mixer(behind_persistent_tokens(self_modifying), window=False),
    "swa": Mixer(SlidingWindowAttention, memory=False),
    "attention": Mixer(FullAttention, memory=False, window=False),
}


def check_blocks() -> None:
    """Raise ValueError unless every entry of `BLOCKS` is a `Mixer`."""
    for name, kind in BLOCKS.items():
        if not isinstance(kind, Mixer):
            raise ValueError(f"BLOCKS[{name!r}] must be a Mixer(...), got {kind!r}")


def build_mixer(name: str, dim: int, heads: int, **options: Any) -> Stateful:
    """The mixer of that name for tokens of width `dim`, as `BLOCKS` makes it.

    Raises:
        ValueError: It refuses the options, or is no mixer. ``atlas_memory.testing.check_mixer`` checks what it
    computes.
    """
    kind = BLOCKS[name]
    try:
        mixer = kind.make(dim, heads, **options)
    except TypeError as error:
        raise ValueError(
            f"it could not be made with the options {', '.join(options) or '(none)'}: {error}. Its Mixer says which "
            f"it takes: memory={kind.memory}, window={kind.window}"
        ) from error
    what = type(mixer).__name__
    if not isinstance(mixer, Stateful):
        raise ValueError(
            f"{what} must derive from Stateful (atlas_memory.layers.stateful), and return a State beside y"
        )
    try:
        signature(mixer.forward).bind("x", "state", "mask")
    except TypeError as error:
        raise ValueError(
            f"{what}.forward must take x, state and mask, as forward(self, x, state=None, mask=None); {error}"
        ) from error
    if getattr(mixer, "dim", None) != dim:
        raise ValueError(f"{what} must set self.dim to the width that it is made for, {dim}")
    return mixer


class MemoryBlock(nn.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`, with RMSNorm before each.

    Args:
        dim: Width of the tokens.
        mixer: A mixer over time, as this module describes them.
        hidden: Channels of the MLP.
        eps: Of the norms.
        periods: If given, a chain of MLPs in place of one, each `hidden` wide; see `ContinuumMLP`.
    """

    def __init__(
        self, dim: int, mixer: nn.Module, hidden: int, eps: float = 1e-6, periods: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(dim, eps)
        self.mixer = mixer
        self.mlp_norm = None if periods else nn.RMSNorm(dim, eps)
        self.mlp = ContinuumMLP(dim, hidden, periods, eps) if periods else SwiGLU(dim, hidden)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        mask: Tensor | None = None,
        document_starts: Tensor | PackedRows | None = None,
        straight_through: bool = False,
    ) -> tuple[Tensor, Any]:
        """y `[batch, time, dim]` and the state; arguments as of `SequenceMixer.forward`, and:

        Args:
            document_starts: Also the `PackedRows` made of them.
            straight_through: Let gradients flow from `state` to M_0 (`State.straight_through`); here, since a block
                whose weights are sharded has its M_0 only while it is called.
        """
        if state is not None and straight_through and torch.is_grad_enabled():
            state = state.straight_through(cast(Stateful, self.mixer).initial_state())
        if mask is not None:  # padding would reach the gradients of norms and MLP
            x = x.where(mask.bool()[..., None], 0.0)
        mixed, state = forward_packed(self.mixer, self.mixer_norm(x), state, mask, document_starts)
        x = x + mixed
        return self.mlp(x) if self.mlp_norm is None else x + self.mlp(self.mlp_norm(x)), state
