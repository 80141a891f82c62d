"""What a rule costs: bytes of state, and multiply-adds a token, counted on tensors without numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ..rules.gates import Gates
from ..rules.rule import Params, Rule
from ..rules.state import MemoryState, initial_state
from .chunkwise import chunkwise
from .dispatch import has_chunks
from .muon_space import MuonSpace

PRODUCTS = MuonSpace(eigenvalues=False)
"""Newton-Schulz by matrix products, which can be counted."""


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where the state grows with what is read; with a horizon, the size that it reaches.
    """
    if rule.features.infinite and rule.features.horizon is None:
        return None
    return _state(rule, dim, heads).nbytes


def flop_counter() -> FlopCounterMode:
    """PyTorch's count of FLOPs, with two operators that it leaves out: products added in place and triangular
    systems."""
    more = {torch.ops.aten.baddbmm_: _added_in_place, torch.ops.aten.linalg_solve_triangular: _triangular}
    return FlopCounterMode(display=False, custom_mapping=more)


def multiply_adds(rule: Rule, dim: int, heads: int, muon_space: MuonSpace = PRODUCTS) -> int | None:
    """Multiply-adds a token of the matrix products and triangular systems by which ``chunkwise`` reads a chunk and
    writes it to the ``heads`` memories of a layer (``flop_counter``). Element-wise work is left out.

    None where they grow with what is read, and where a rule has no fast form.
    """
    if not has_chunks(rule) or (rule.features.infinite and rule.features.horizon is None):
        return None
    q = torch.empty(1, heads, rule.window.chunk, dim, device="meta")
    gates, state = Gates(q[..., 0], q[..., 0], q[..., 0]), _state(rule, dim, heads)
    with flop_counter() as counter, torch.no_grad():
        params = Params(_initial(rule, dim, heads))
        chunkwise(rule, params, q, q, q, gates, state, muon_space=muon_space, kernels=False, starts=True)
    return round(counter.get_total_flops() / 2 / rule.window.chunk)


def _state(rule: Rule, dim: int, heads: int) -> MemoryState:
    """A state without numbers; with a horizon, with all the columns that it comes to have."""
    state = initial_state(rule, _initial(rule, dim, heads), torch.empty(1, heads, 0, dim, device="meta"))
    if not rule.features.infinite:
        return state
    more = (rule.features.horizon or 0) + rule.window.chunk + rule.window.size - 2 - state.keys.shape[-2]
    keys = F.pad(state.keys, (0, 0, 0, more))
    return state.map_key_columns(rule, lambda w: F.pad(w, (0, more)), keys)


def _initial(rule: Rule, dim: int, heads: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(heads, *shape, device="meta") for shape in rule.shapes(dim))


def _added_in_place(x: list[int], a: list[int], b: list[int], *others: Any, **options: Any) -> int:
    """FLOPs of a product ``[n, rows, inner] x [n, inner, columns]``, from shapes."""
    n, rows, inner = a
    return 2 * n * rows * inner * b[-1]


def _triangular(a: list[int], b: list[int], *others: Any, **options: Any) -> int:
    """FLOPs of a triangular system ``[..., n, n]`` with right sides ``[..., n, m]``."""
    return int(torch.Size(b).numel()) * a[-1]
