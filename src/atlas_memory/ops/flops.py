"""What a rule costs: bytes of state, and multiply-adds a token, counted on tensors without numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..rules.gates import Gates
from ..rules.rule import Params, Rule
from ..rules.state import initial_state
from .chunkwise import chunkwise
from .dispatch import has_chunks
from .muon_space import MuonSpace

PRODUCTS = MuonSpace(eigenvalues=False)
"""Newton-Schulz by matrix products, which can be counted."""


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where the state grows with what is read; with a horizon, the size that it reaches.
    """
    features, window = rule.features, rule.window
    if features.infinite and features.horizon is None:
        return None
    k = torch.empty(1, heads, 0, dim, device="meta")
    state = initial_state(rule, _initial(rule, dim, heads), k)
    if not features.infinite:
        return state.nbytes
    more = (features.horizon or 0) + window.chunk + window.size - 2 - state.keys.shape[-2]  # columns, 4 bytes an entry
    matrices = sum(m * (2 + rule.accumulators) for i, (m, _) in enumerate(rule.shapes(dim)) if rule.kernelised(i))
    return state.nbytes + 4 * heads * more * (matrices + dim)


def flop_counter() -> FlopCounterMode:
    """PyTorch's count of FLOPs, with two operators that it leaves out: products added in place and triangular
    systems."""
    more = {torch.ops.aten.baddbmm_: _added_in_place, torch.ops.aten.linalg_solve_triangular: _triangular}
    return FlopCounterMode(display=False, custom_mapping=more)


def multiply_adds(rule: Rule, dim: int, heads: int, muon_space: MuonSpace = PRODUCTS) -> int | None:
    """Multiply-adds a token of the matrix products by which ``chunkwise`` reads and writes the ``heads`` memories of a
    layer (``flop_counter``): those of one chunk more, divided by its tokens. Element-wise work is left out.

    None where they grow with what is read, and where a rule has no fast form.
    """
    if rule.features.infinite or not has_chunks(rule):
        return None
    chunk, counts = rule.window.chunk, []
    for chunks in (2, 3):
        q = torch.empty(1, heads, chunks * chunk, dim, device="meta")
        gates = Gates(q[..., 0], q[..., 0], q[..., 0])
        with flop_counter() as counter, torch.no_grad():
            chunkwise(rule, Params(_initial(rule, dim, heads)), q, q, q, gates, muon_space=muon_space, kernels=False)
        counts.append(counter.get_total_flops() // 2)
    return round((counts[1] - counts[0]) / chunk)


def _initial(rule: Rule, dim: int, heads: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(heads, *shape, device="meta") for shape in rule.shapes(dim))


def _added_in_place(x: list[int], a: list[int], b: list[int], *others: Any, **options: Any) -> int:
    """FLOPs of a product ``[n, rows, inner] x [n, inner, columns]``, from shapes."""
    n, rows, inner = a
    return 2 * n * rows * inner * b[-1]


def _triangular(a: list[int], b: list[int], *others: Any, **options: Any) -> int:
    """FLOPs of a triangular system ``[..., n, n]`` with right sides ``[..., n, m]``."""
    return int(torch.Size(b).numel()) * a[-1]
