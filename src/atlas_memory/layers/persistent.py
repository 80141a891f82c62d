"""Persistent memory: learned tokens, the same for every input, in front of the sequence (Titans, Eq. 19)."""

from typing import Any

import torch
from torch import Tensor, nn

from ..rules.sizes import LONGEST, check_size
from .documents import read_documents
from .stateful import Stateful


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
