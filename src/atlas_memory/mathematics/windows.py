"""The Omega window and the chunk schedule (ATLAS Eqs. 8-9 and 15-16).

At token t the inner loss sums over the last c tokens, token i weighted by a gate gamma_i^(t). Its gradient is taken
at the memory as it stood before the chunk of b tokens to which t belongs (the *frozen* memory), with errors at what
its last matrix answers now (step.py); b = 1 is the exact recurrence. The window crosses chunk boundaries: the c
- 1 tokens before a chunk are evaluated again at the new frozen memory. Chunks are counted from each sequence's first
token, wherever calls or padding fall.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """``size`` = c tokens in the inner loss, ``chunk`` = b tokens between refreshes of the frozen memory.

    ``read``: which memory answers q_t. "after" the write of token t, M_t (ATLAS); "before" it, M_{t-1} (Hope); or the
    "frozen" one before the chunk (TNT's global memory).
    """

    size: int = 1
    chunk: int = 16
    read: str = "after"

    def __post_init__(self) -> None:
        for name in ("size", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Window {name} must be an integer >= 1, got {value!r}")
        if self.read not in ("after", "before", "frozen"):
            raise ValueError(f"Window read must be 'after', 'before' or 'frozen', got {self.read!r}")
