"""The definition on any batch: its rows, which are sequences, may be of different length, and may go on from a state in
which they have read different numbers of tokens."""

from __future__ import annotations

from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import definition
from .gates import CompleteGates, Gates
from .precision import compute
from .rules import Params, Rule
from .state import MemoryState, initial_state


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
        y ``[batch, heads, time, dim]`` and the state after the last token, with a graph where an argument has one.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    if not torch.is_inference_mode_enabled():
        y, end = compute(_by_rows, rule, params, q, k, v, gates, state)
        asked = [q.requires_grad, k.requires_grad, v.requires_grad]

        def ask(t: Tensor) -> Tensor:
            asked.append(t.requires_grad)
            return t

        for arguments in (params, gates, state):
            if arguments is not None:
                arguments.map(ask)
        # The definition differentiates by tensors of its own, of which nobody has asked for a graph.
        return (y, end) if any(asked) else (y.detach(), end.detach())
    with torch.inference_mode(False), torch.no_grad():  # autograd cannot see inference tensors; copies it can
        params, state = params.map(torch.clone), None if state is None else state.map(torch.clone)
        return compute(_by_rows, rule, params, q.clone(), k.clone(), v.clone(), gates.map(torch.clone), state)


def _by_rows(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None
) -> tuple[Tensor, MemoryState]:
    """If all rows have read equally many tokens and are equally long, they go together; otherwise one by one."""
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
    results = []
    for part in parts:
        seen, n = where[part.start or 0]
        q_n, k_n, v_n = (x[part, :, :n] for x in (q, k, v))
        of_part = CompleteGates(*(g[part, :, :n] for g in gate))
        y, end = _together(rule, params, q_n, k_n, v_n, of_part, state.map(itemgetter(part)), seen)
        results.append((F.pad(y, (0, 0, 0, time - n)), end))
    outputs, states = zip(*results, strict=True)
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
    """``definition`` on rows of which each has read ``seen`` tokens before these, and none of which is padded."""
    time = q.shape[-2]
    past_k, past_v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    keys, values = past_k, past_v
    if rule.features.endless:
        keys = torch.cat([state.keys, k], -2)
        values = F.pad(past_v, (0, 0, keys.shape[-2] - past_v.shape[-2], 0))
        state = state.map_lifted(rule, lambda w: F.pad(w, (0, time)), keys)
    y, memory = definition(rule, params, q, keys, values, gate, list(state.matrices), seen)
    past_k, past_v = past_k[..., time:, :], past_v[..., time:, :]
    state = MemoryState(tuple(memory), past_k, past_v, state.keys, state.seen + time)
    if rule.features.horizon is None:
        return y, state
    held = rule.features.horizon + rule.window.chunk + rule.window.size - 2
    return y, _with_columns(rule, state, min(keys.shape[-2], held))


def _with_columns(rule: Rule, state: MemoryState, count: int) -> MemoryState:
    """For phi*: the state with ``count`` columns of keys. The oldest are left out, or empty ones put before them."""
    if not rule.features.endless:
        return state
    room = count - state.keys.shape[-2]
    return state.map_lifted(rule, lambda w: F.pad(w, (room, 0)), F.pad(state.keys, (0, 0, room, 0)))
