"""PyTorch's count of FLOPs, with one operator that it leaves out."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_memory.memory import Rule
from atlas_memory.ops.triangular import BLOCK


def flop_counter() -> FlopCounterMode:
    """Counts FLOPs of matrix products, those added in place among them."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _added_in_place})


def triangular(rule: Rule, dim: int) -> int:
    """Multiply-adds of a chunk's triangular systems for one head, which PyTorch does not count."""
    rows = [m for m, _ in rule.shapes(dim)]
    solved = rows if rule.optimiser.erases else rows[-1:] if rule.online else []
    chunk, size = rule.window.chunk, rule.window.size if rule.online else 1
    tokens = max(BLOCK // size, 1) if size > 1 else chunk  # in a block of pairs
    updates = [min(tokens, chunk - start) * size for start in range(0, chunk, tokens)]
    return sum(n**2 * m // 2 for m in solved for n in updates)


def _added_in_place(x: list[int], a: list[int], b: list[int], *others: Any, **options: Any) -> int:
    """FLOPs of a product ``[n, rows, inner] x [n, inner, columns]``, from shapes."""
    n, rows, inner = a
    return 2 * n * rows * inner * b[-1]
