"""The Omega window and the chunk schedule (ATLAS Eqs. 8-9 and 15-16).

The window: at token t the inner loss is a sum over the last c tokens, in which token i is weighted by a gate
gamma_i^(t). The chunk: a sequence is divided into chunks of b tokens. The gradient of every token is taken at the
*frozen* memory, which is the memory as it carried_prediction before the token's chunk, except that errors are taken at
what the last matrix of the memory answers now (step.py). With b = 1 this is the exact recurrence. A window reaches back
over the start of its chunk: the c - 1 tokens before a chunk are evaluated again at the new frozen memory. Chunks are
counted from each sequence's first token, wherever calls or padding fall."""

from __future__ import annotations

from dataclasses import dataclass

from .validation import LONGEST, check_size


@dataclass(frozen=True)
class Window:
    """``size`` = c, the tokens in the inner loss, and ``chunk`` = b, the tokens that have one frozen memory.

    ``read``: which memory answers q_t. "after" the write of token t, M_t (ATLAS); "before" it, M_{t-1} (Hope); or the
    "frozen" one before the chunk (TNT's global memory).
    """

    size: int = 1
    chunk: int = 16
    read: str = "after"

    def __post_init__(self) -> None:
        for name in ("size", "chunk"):
            check_size(f"Window {name}", getattr(self, name), LONGEST)
        if self.read not in ("after", "before", "frozen"):
            raise ValueError(f"Window read must be 'after', 'before' or 'frozen', got {self.read!r}")
