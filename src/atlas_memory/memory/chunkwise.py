"""The fast form: exact, chunk by chunk, with nothing materialised per token that a kernel can replace.

Within a chunk all gradients are taken at the memory frozen at its start, so every token's (f_i, delta_i) comes from one
batched pass, and reading at every t is the primitive of fast_weight.py, matrix after matrix. Between chunks it is a
recurrence. Computes the same function as recurrent.py (ATLAS sections 3.3 and 5.1) at any split of a sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import supports
from .chunk import Chunk, Columns, Memory, Weights, read_chunk
from .features import Exponential
from .gates import Gates
from .precision import compute
from .rules import Params, Rule
from .state import MemoryState, initial_state
from .windows import band, shift_right, take


def chunkwise(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """The outputs y_t = M_t(phi(q_t)) and the state after the last token; arguments as for ``recurrent``.

    FLOPs a token and matrix (m x F), N = b + c - 1: about 8 m F for reads and writes at the chunk's ends and
    4 N (m + d) inside for gradient descent and momentum; Muon adds about 40 m^3 / every in output space.
    """
    return compute(_chunkwise, rule, params, q, k, v, gates, state)


def _chunkwise(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None
) -> tuple[Tensor, MemoryState]:
    size, chunk = rule.window.size, rule.window.chunk
    time, length, gate = q.shape[-2], gates.length, gates.complete(q, size)
    by_kernel = length is None and supports(rule, q.device.type, q.dtype, q.shape, gate)
    if by_kernel and (state is None or not (state.seen % chunk).any()):  # it begins where a chunk begins
        from ..kernels.chunk import chunk_recurrence

        return chunk_recurrence(rule, q, k, v, gate, state or initial_state(rule, params.initial, k))
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    phase = None if state is None else state.seen % chunk
    state = initial_state(rule, params.initial, k) if state is None else state
    if time == 0:
        return q.new_zeros(q.shape), state

    count = -(-(time if phase is None else time + chunk - 1) // chunk)
    past_k, past_v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    q_grid, inside = shift_right(q, phase, count * chunk)
    k_grid, exists = shift_right(past_k, phase, count * chunk + size - 1)
    v_grid, _ = shift_right(past_v, phase, count * chunk + size - 1)
    if length is not None:
        start = 0 if phase is None else phase[:, None]
        inside = inside & (torch.arange(inside.shape[1], device=q.device) - start < length[:, None])
        exists = exists & (torch.arange(exists.shape[1], device=q.device) - start < length[:, None] + size - 1)
    # Tokens before the sequence's first are not in any window.
    first = state.seen if phase is None else state.seen - phase
    exists = exists & (first[:, None] + torch.arange(exists.shape[1], device=q.device) >= size - 1)

    def on_grid(values: Tensor, neutral: float) -> Tensor:
        grid, channels = values[..., None] if values.dim() == 3 else values, values.dim() == 4
        grid = torch.where(inside[:, None, :, None], shift_right(grid, phase, count * chunk)[0], neutral)
        return (grid if channels else grid[..., 0]).unflatten(2, (count, chunk))

    alpha = on_grid(gate.alpha if rule.retention.gated else torch.ones_like(gate.theta), 1.0)
    theta, eta, gamma = on_grid(gate.theta, 1.0), on_grid(gate.eta, 0.0), on_grid(gate.gamma, 0.0)
    windows = band(gamma, exists.unfold(-1, chunk + size - 1, chunk)[:, None])

    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    per_chunk = zip(
        q_grid.unflatten(-2, (count, chunk)).unbind(2),
        k_grid.unfold(-2, chunk + size - 1, chunk).mT.unbind(2),
        v_grid.unfold(-2, chunk + size - 1, chunk).mT.unbind(2),
        *(x.unbind(2) for x in (windows, alpha, theta, eta)),
        inside.unflatten(-1, (count, chunk))[:, None].unbind(2),
        strict=True,
    )
    memory = Memory(state.frozen, state.weights, state.momentum, state.dual)
    keys, lifted = state.keys, rule.network.lifted
    if isinstance(rule.features, Exponential):
        keys = torch.cat([keys, F.pad(k, (0, 0, 0, count * chunk - time))], -2)
        memory = Memory(*(_widen(part, lifted, count * chunk) for part in memory))
    end = (time if length is None else length) + (0 if phase is None else phase)
    outputs = []
    for j, inputs in enumerate(per_chunk):
        filled, columns = (j + 1) * chunk <= end, None
        if isinstance(rule.features, Exponential):
            columns = _columns(keys, state.keys.shape[-2] + j * chunk, phase, chunk, size)
        y, memory = read_chunk(rule, params, memory, Chunk(*inputs), first + j * chunk, filled, columns)
        if isinstance(rule.features, Exponential) and rule.features.horizon is not None:
            memory = _forget(rule, memory, columns, filled)
        outputs.append(y)

    y = torch.cat(outputs, -2)
    y = y[..., :time, :] if phase is None else take(y, phase[:, None] + torch.arange(time, device=q.device))
    read = torch.full_like(state.seen, time) if length is None else length
    last = read[:, None] + torch.arange(size - 1, device=q.device)
    past_k, past_v = (x[..., time:, :] if length is None else take(x, last) for x in (past_k, past_v))
    if isinstance(rule.features, Exponential):
        held = state.keys.shape[-2] + time
        if rule.features.horizon is not None:
            held = min(held, rule.features.horizon + chunk + size - 2)
        at = read[:, None] + state.keys.shape[-2] - held + torch.arange(held, device=q.device)
        memory = Memory(*(_narrow(part, lifted, at) for part in memory))
        keys = torch.where((at >= 0)[:, None, :, None], take(keys, at.clamp_min(0)), 0.0)
    return y, MemoryState(*memory, past_k, past_v, keys, state.seen + read)


def _columns(keys: Tensor, filled: int, phase: Tensor | None, chunk: int, size: int) -> Columns:
    """The columns of a chunk whose slots, were the phase 0, would begin at column ``filled``."""
    window = torch.arange(chunk + size - 1, device=keys.device)[None] + (filled - size + 1)
    window = window if phase is None else window - phase[:, None]
    # Below zero lie tokens before the sequence's first, which have no weight in any window.
    return Columns(keys, filled, window.clamp_min(0))


def _widen(weights: Weights, lifted: tuple[bool, ...], by: int) -> Weights:
    """Room for new columns in the lifted matrices."""
    return tuple(F.pad(w, (0, by)) if up else w for w, up in zip(weights, lifted, strict=False))


def _narrow(weights: Weights, lifted: tuple[bool, ...], at: Tensor) -> Weights:
    """The columns ``at`` ``[batch, n]`` of the lifted matrices, zero where below 0."""
    index = at.clamp_min(0)[:, None, None]

    def pick(w: Tensor) -> Tensor:
        picked = w.gather(-1, index.expand(*w.shape[:3], -1))
        return torch.where((at >= 0)[:, None, None], picked, 0.0)

    return tuple(pick(w) if up else w for w, up in zip(weights, lifted, strict=False))


def _forget(rule: Rule, memory: Memory, columns: Columns | None, filled: Tensor | bool) -> Memory:
    """Clear the columns of lifted matrices that lie beyond the horizon, where the chunk is ``filled``."""
    assert columns is not None and isinstance(rule.features, Exponential) and rule.features.horizon is not None
    newest = columns.window[:, -1:]
    old = torch.arange(columns.keys.shape[-2], device=newest.device) <= newest - rule.features.horizon
    if isinstance(filled, Tensor):
        old = old & filled[:, None]
    elif not filled:
        return memory

    def clear(weights: Weights) -> Weights:
        pairs = zip(weights, rule.network.lifted, strict=False)
        return tuple(torch.where(old[:, None, None], 0.0, w) if up else w for w, up in pairs)

    return Memory(*map(clear, memory))
