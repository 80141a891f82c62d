"""The definition on any batch: rows at different tokens of theirs, of different length, going on from a state."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import Matrix, definition
from .gates import CompleteGates, Gates
from .precision import compute
from .rules import Params, Rule
from .state import MemoryState, initial_state

Weights = tuple[Tensor, ...]


def recurrent(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read and write token by token, as the definition says (definition.py). Slow, literal, any float dtype.

    Args:
        rule: what kind of memory.
        params: M_0 ``[heads, rows, columns]`` a matrix, and the other outer parameters.
        q, k, v: ``[batch, heads, time, dim]``, one floating dtype; time may be 0.
        gates: see ``Gates``.
        state: where an earlier call stopped, or None at the start of the sequences.

    Returns:
        y ``[batch, heads, time, dim]`` and the state after the last token.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    if not torch.is_inference_mode_enabled():
        return compute(_by_rows, rule, params, q, k, v, gates, state)
    with torch.inference_mode(False), torch.no_grad():  # autograd cannot see inference tensors; copies it can
        params, state = params.map(torch.clone), None if state is None else state.map(torch.clone)
        return compute(_by_rows, rule, params, q.clone(), k.clone(), v.clone(), gates.map(torch.clone), state)


def _by_rows(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None
) -> tuple[Tensor, MemoryState]:
    """Rows that stand at the same token and are equally long go together, others one by one."""
    time = q.shape[-2]
    gate = gates.complete(q, rule.window.size)
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    state = initial_state(rule, params.initial, k) if state is None else state
    length = torch.full_like(state.seen, time) if gates.length is None else gates.length
    where = list(zip(state.seen.tolist(), length.tolist(), strict=True))
    if len(set(where)) <= 1:
        parts = [slice(None)] if where else []
    else:
        parts = [slice(row, row + 1) for row in range(len(where))]
    if not parts:
        return q, state
    read = []
    for part in parts:
        seen, n = where[part.start or 0]
        q_n, k_n, v_n = (x[part, :, :n] for x in (q, k, v))
        of_part = CompleteGates(*(g[part, :, :n] for g in gate))
        y, end = _together(rule, params, q_n, k_n, v_n, of_part, state.map(itemgetter(part)), seen)
        read.append((F.pad(y, (0, 0, 0, time - n)), end))
    outputs, states = zip(*read, strict=True)
    most = max(end.keys.shape[-2] for end in states)
    flat = zip(*(_with_columns(rule, end, most).tensors() for end in states), strict=True)
    joined = iter([torch.cat(same) for same in flat])
    return torch.cat(outputs), states[0].map(lambda _: next(joined))


def _together(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: CompleteGates,
    state: MemoryState,
    seen: int,
) -> tuple[Tensor, MemoryState]:
    """Rows of which ``seen`` tokens have been read before these, and that all read these to their end."""
    count, time, size = len(state.weights), q.shape[-2], rule.window.size
    past_k, past_v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    keys, values = past_k, past_v
    if rule.features.endless:
        keys = torch.cat([state.keys, k], -2)
        values = F.pad(past_v, (0, 0, keys.shape[-2] - past_v.shape[-2], 0))
        state = _with_columns(rule, state, time, at_left=False)
    memory = [
        Matrix(state.weights[i], state.frozen[i], state.momentum[i::count], state.dual[i] if state.dual else None)
        for i in range(count)
    ]
    y, memory = definition(rule, params, q, keys, values, gate, memory, seen)
    sums = zip(*(m.sums for m in memory), strict=True)
    state = MemoryState(
        tuple(m.frozen for m in memory),
        tuple(m.weights for m in memory),
        tuple(s for of_all in sums for s in of_all),
        tuple(m.dual for m in memory if m.dual is not None),
        past_k[..., time:, :],
        past_v[..., time:, :],
        keys if rule.features.endless else state.keys,
        state.seen + time,
    )
    if rule.features.horizon is not None:
        held = rule.features.horizon + rule.window.chunk + size - 2
        state = _with_columns(rule, state, min(keys.shape[-2], held))
    return y, state


def _with_columns(rule: Rule, state: MemoryState, count: int, at_left: bool = True) -> MemoryState:
    """The state on phi* with ``count`` columns, the oldest left out or empty ones before them; or, where these are not
    ``at_left``, with so many more for keys that come."""
    if not rule.features.endless:
        return state
    have, matrices = state.keys.shape[-2], len(state.weights)
    room = (count - have, 0) if at_left else (0, count)

    def widen(part: Weights) -> Weights:
        lifted = (rule.network.lifted[i % matrices] for i in range(len(part)))
        return tuple(F.pad(w, room) if up else w for w, up in zip(part, lifted, strict=True))

    keys = F.pad(state.keys, (0, 0, *room)) if at_left else state.keys
    frozen, weights, momentum = (widen(part) for part in (state.frozen, state.weights, state.momentum))
    return replace(state, frozen=frozen, weights=weights, momentum=momentum, keys=keys)
