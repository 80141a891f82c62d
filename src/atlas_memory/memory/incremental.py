"""The decoder: the definition for one or a few tokens from a state, as fast as a token can be read alone.

What differs from definition.py: gradients in closed form, sum_i gamma_i delta_i f_i^T for every matrix; rows at any
phase and of any length together; the fast Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .fast_newton_schulz import newton_schulz
from .gates import CompleteGates, Gates, pick
from .networks import Apply, Trace
from .optimisers import At
from .precision import compute
from .retention import Old
from .rules import Params, Rule
from .state import MemoryState, initial_state

Weights = tuple[Tensor, ...]


def incremental(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Arguments and result as for ``recurrent``. Its work a token depends on the window c but neither on the chunk b
    nor on how much was read (``Exponential`` features apart)."""
    return compute(_by_token, rule, params, q, k, v, gates, state)


def retrieve(rule: Rule, params: Params, q: Tensor, state: MemoryState) -> Tensor:
    """M(phi(q)) at the memory as it is now, without writing; q and the result ``[batch, heads, time, dim]``."""
    work = torch.promote_types(q.dtype, torch.float32)
    params = params.map(lambda t: t.to(work))
    with torch.autocast(q.device.type, enabled=False):
        apply = _applier(rule, params, tuple(w.to(work) for w in state.weights), state.keys.to(work))
        return rule.network.forward(apply, q.to(work), params.norm).to(q.dtype)


def _by_token(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None
) -> tuple[Tensor, MemoryState]:
    gate = gates.complete(q, rule.window.size)
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    state = initial_state(rule, params.initial, k) if state is None else state
    return read_tokens(rule, params, q, k, v, gate, gates.length, state)


def read_tokens(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: CompleteGates,
    length: Tensor | None,
    state: MemoryState,
) -> tuple[Tensor, MemoryState]:
    """Token after token, for inputs that have been checked and are in the working precision; v carries delta."""
    outputs = [q[..., :0, :]]
    for t in range(q.shape[-2]):
        real = None if length is None else t < length
        q_t, k_t, v_t = (x[..., t : t + 1, :] for x in (q, k, v))
        y, state = _read_token(rule, params, q_t, k_t, v_t, gates.at(t), real, state)
        outputs.append(y)
    return torch.cat(outputs, -2), state


def _read_token(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: CompleteGates,
    real: Tensor | None,
    state: MemoryState,
) -> tuple[Tensor, MemoryState]:
    """One token ``[batch, heads, 1, dim]``, which is there for the rows where ``real``, None for all."""
    optimiser, retention, network, chunk = rule.optimiser, rule.retention, rule.network, rule.window.chunk
    first, last, due = ((state.seen + n) % m == 0 for n, m in ((0, chunk), (1, chunk), (1, rule.every)))
    exists: Tensor | bool = True if real is None else real
    ends = last if real is None else real & last
    if rule.features.endless:
        state = _with_column(rule, real, k, state)
    k_window, v_window = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    frozen, weights, keys = state.frozen, state.weights, state.keys
    age = torch.arange(rule.window.size - 1, -1, -1, device=q.device)  # of the window tokens, the oldest first
    gamma = torch.where((age <= state.seen[:, None])[:, None], gate.gamma.flip(-1), 0.0)
    at_frozen = network.trace(_applier(rule, params, frozen, keys), k_window, params.norm)
    error = network.body_error(at_frozen, rule.bias.derivative(at_frozen.prediction, v_window), params.norm)
    sizes: tuple[Tensor | None, ...] = (None,) * len(weights)
    if rule.live or optimiser.bounded:
        response = rule.response(at_frozen, v_window, params)
        if rule.live:
            error = error + response[..., None] * _moved(rule, params, at_frozen, state)
        if optimiser.bounded:
            whole = torch.cat([gamma[..., :-1], torch.ones_like(gamma[..., -1:])], -1)
            sizes = tuple((whole * x).sum(-1) for x in rule.sizes(frozen, at_frozen, response, params))
    deltas = network.back(frozen, at_frozen, gamma[..., None] * error)
    alpha = gate.alpha if retention.gated else torch.ones_like(gate.theta)
    homes = [_each(rule, part, len(weights)) for part in retention.home(params.initial)]
    new: list[tuple[Tensor, ...]] = []
    all_sums: list[tuple[Tensor, ...]] = []
    for i, (size, u, delta) in enumerate(zip(sizes, at_frozen.inputs, deltas, strict=True)):
        rates = optimiser.rates(gate.theta, gate.eta, size, rule.every, chunk)

        def under(w: Tensor, i: int = i, u: Tensor = u) -> Tensor:
            now = u[..., -1:, :]
            held = _applier(rule, params, (w,) * len(weights), keys)(i, now)
            return _outer(rule, params, i, held, now, w)

        at = At(*rates, alpha, gamma[..., -1], under, newton_schulz)
        g = _outer(rule, params, i, delta, u, frozen[i])
        before = state.momentum[i :: len(weights)]
        sums, step = optimiser.step(before, weights[i], g, at)
        step = step if rule.every == 1 else pick(due, step, torch.zeros_like(step))
        dual = state.dual[i] if state.dual else None
        old = Old(weights[i], frozen[i], dual, params.initial[i], *(home[i] for home in homes))
        kept = retention.keep(old, step, alpha, first, last)
        turned = optimiser.turn(sums) if optimiser.turns else ()
        after = tuple(pick(last, a, b) for a, b in zip(turned, sums, strict=True)) if turned else sums
        all_sums.append(tuple(pick(exists, a, b) for a, b in zip(after, before, strict=True)))
        parts = [pick(exists, kept.weights, weights[i]), pick(ends, kept.settled, frozen[i])]
        if dual is not None and kept.dual is not None:
            parts.append(pick(exists, kept.dual, dual))
        new.append(tuple(parts))
    now, settled, *others = zip(*new, strict=True)
    read = {"after": now, "before": weights, "frozen": frozen}[rule.window.read]
    y = network.forward(_applier(rule, params, read, keys), q, params.norm)
    past = (k_window[..., 1:, :], v_window[..., 1:, :])
    past_k, past_v = (pick(exists, a, b) for a, b in zip(past, (state.k, state.v), strict=True))
    state = MemoryState(
        settled,
        now,
        tuple(s for of_all in zip(*all_sums, strict=True) for s in of_all),
        others[0] if others else (),
        past_k,
        past_v,
        keys,
        state.seen + (1 if real is None else real),
    )
    return y, _forget(rule, state, ends)


def _moved(rule: Rule, params: Params, at_frozen: Trace, state: MemoryState) -> Tensor:
    """What the chunk has changed so far of what the last matrix answers to the window's keys."""
    i = len(state.weights) - 1
    sums = state.momentum[i :: len(state.weights)]
    changed = rule.optimiser.written(sums, state.weights[i], state.frozen[i])
    apply = _applier(rule, params, (changed,) * len(state.weights), state.keys)
    return apply(i, at_frozen.inputs[i])


def _each(rule: Rule, home: Weights | None, count: int) -> tuple[Tensor | None, ...]:
    """What every matrix fades to: on phi* M_0 is zero."""
    if not home:
        return (None,) * count
    endless = rule.features.endless
    return tuple(None if up and endless else m for m, up in zip(home, rule.network.lifted, strict=True))


def _applier(rule: Rule, params: Params, weights: Weights, keys: Tensor) -> Apply:
    """``apply(i, u)``: W_i phi(u), or W_i u where matrix i is not lifted."""

    def apply(i: int, u: Tensor) -> Tensor:
        if not rule.network.lifted[i]:
            return u @ weights[i].mT
        if rule.features.endless:
            return rule.features.kernel(u, keys) @ weights[i].mT
        return rule.features.expand(u, params.sqrt_a) @ weights[i].mT

    return apply


def _outer(rule: Rule, params: Params, i: int, deltas: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """sum over tokens of delta f^T, shaped as matrix i, ``like``; u are the last tokens read."""
    if not rule.network.lifted[i]:
        return deltas.mT @ u
    if rule.features.endless:
        return _as_columns(deltas, like)
    return deltas.mT @ rule.features.expand(u, params.sqrt_a)


def _as_columns(deltas: Tensor, like: Tensor) -> Tensor:
    """``[..., n, rows]`` as the last n columns of a matrix of the shape of ``like``, the others zero."""
    return F.pad(deltas.mT, (like.shape[-1] - deltas.shape[-2], 0))


def _with_column(rule: Rule, real: Tensor | None, k: Tensor, state: MemoryState) -> MemoryState:
    """A column for token k at the right of all matrices on phi*; rows without a token get an empty one at the left."""
    at_right: Tensor | bool = True if real is None else real
    keys = pick(at_right, torch.cat([state.keys, k], -2), torch.cat([torch.zeros_like(k), state.keys], -2))
    return _map_lifted(rule, state, lambda w: pick(at_right, F.pad(w, (0, 1)), F.pad(w, (1, 0))), keys)


def _forget(rule: Rule, state: MemoryState, ends: Tensor) -> MemoryState:
    """At a chunk's end, without the tokens that are older than phi*'s horizon, if it has one; and of all columns only
    those that can be other than zero."""
    if rule.features.horizon is None:
        return state
    have = state.keys.shape[-2]
    held = min(have, rule.features.horizon + rule.window.chunk + rule.window.size - 2)
    old = torch.arange(have, 0, -1, device=ends.device) > rule.features.horizon
    gone = (old & ends[:, None])[:, None, None]
    return _map_lifted(
        rule, state, lambda w: torch.where(gone, 0.0, w)[..., have - held :], state.keys[..., have - held :, :]
    )


def _map_lifted(rule: Rule, state: MemoryState, fn: Callable[[Tensor], Tensor], keys: Tensor) -> MemoryState:
    """``fn`` of all lifted matrices, and other keys."""
    lifted = rule.network.lifted

    def each(part: Weights) -> Weights:
        return tuple(fn(w) if lifted[i % len(lifted)] else w for i, w in enumerate(part))

    return replace(
        state, frozen=each(state.frozen), weights=each(state.weights), momentum=each(state.momentum), keys=keys
    )
