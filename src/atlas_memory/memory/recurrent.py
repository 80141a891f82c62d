"""The definition of every model: a literal loop over tokens.

For each token t, with c the window, b the chunk and M_f the memory before t's chunk (the frozen memory),

    l_t(M) = sum_{i = t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)                  (ATLAS Eq. 9)
    g_t    = grad l_t at M_f, errors at what the last matrix predicts now           (ATLAS Eqs. 15-16; optimisers.py)
    S_t    = theta_t S_{t-1} + a_t g_t,   M_t = alpha_t M_{t-1} - e_t O(S_t)        (optimisers.py, retention.py)
    y_t    = M_t(phi(q_t))                                                          (or as Window.read says)

``recurrent`` obtains g_t by automatic differentiation of l_t and of nothing else: it is the oracle. ``incremental`` is
the same loop with the closed-form gradient: constant work a token, for decoding. Both take rows at different phases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .features import Exponential
from .gates import Gates
from .networks import Trace
from .optimisers import DeltaGradientDescent, Muon
from .precision import compute
from .retention import NonLinearRetention
from .rules import Params, Rule
from .state import MemoryState, initial_state

Weights = tuple[Tensor, ...]
Apply = Callable[[int, Tensor], Tensor]
Gradient = Callable[[Rule, Params, Weights, Trace, Tensor, Tensor, Tensor, Tensor, Tensor | None], Weights]


def recurrent(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read and write token by token, gradients by autograd of the printed objective. Slow, literal, any float dtype.

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
        return compute(_by_autograd, rule, params, q, k, v, gates, state)
    with torch.inference_mode(False), torch.no_grad():  # autograd cannot see inference tensors; copies it can
        params, state = params.map(torch.clone), None if state is None else state.map(torch.clone)
        return compute(_by_autograd, rule, params, q.clone(), k.clone(), v.clone(), gates.map(torch.clone), state)


def incremental(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """As ``recurrent``, with closed-form gradients: the form for one or a few tokens from a state. Its work a token
    depends on the window c but neither on the chunk b nor on how much was read (``Exponential`` features apart)."""
    return compute(_by_closed_form, rule, params, q, k, v, gates, state)


def retrieve(rule: Rule, params: Params, q: Tensor, state: MemoryState) -> Tensor:
    """M(phi(q)) at the memory as it is now, without writing; q and the result ``[batch, heads, time, dim]``."""
    work = torch.promote_types(q.dtype, torch.float32)
    params = params.map(lambda t: t.to(work))
    with torch.autocast(q.device.type, enabled=False):
        apply = _applier(rule, params, tuple(w.to(work) for w in state.weights), state.keys.to(work))
        return rule.network.forward(apply, q.to(work), params.norm).to(q.dtype)


def _loop(
    gradient: Gradient,
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None,
) -> tuple[Tensor, MemoryState]:
    size, chunk, optimiser, retention = rule.window.size, rule.window.chunk, rule.optimiser, rule.retention
    length, gate = gates.length, gates.complete(q, size)
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    state = initial_state(rule, params.initial, k) if state is None else state
    frozen, weights, momentum, dual, seen = state.frozen, state.weights, state.momentum, state.dual, state.seen
    past_k, past_v, keys = state.k, state.v, state.keys
    age = torch.arange(size - 1, -1, -1, device=q.device)  # of the window tokens, oldest first
    alphas = gate.alpha if retention.gated else torch.ones_like(gate.alpha)
    start, dual_start = retention.home(params.initial)
    if start is not None and isinstance(rule.features, Exponential):  # a lifted M_0 is zero there
        start = tuple(m.new_zeros(()) if up else m for m, up in zip(start, rule.network.lifted, strict=True))
    outputs, last_matrix = [], len(weights) - 1
    for t in range(q.shape[-2]):
        real = None if length is None else t < length
        first, last = seen % chunk == 0, (seen + 1) % chunk == 0
        ends = last if real is None else real & last
        k_t, v_t, q_t = (x[..., t : t + 1, :] for x in (k, v, q))
        k_window, v_window = torch.cat([past_k, k_t], -2), torch.cat([past_v, v_t], -2)
        if isinstance(rule.features, Exponential):
            keys, (frozen, weights, momentum) = _new_column(rule, real, keys, k_t, (frozen, weights, momentum))
        gamma = gate.gamma[:, :, t].flip(-1)
        gamma = torch.where((age <= seen[:, None])[:, None], gamma, 0.0)
        at_frozen = rule.network.trace(_applier(rule, params, frozen, keys), k_window, params.norm)
        response, moved = rule.response(at_frozen, v_window, params), None
        if rule.live:  # what the chunk's writes have changed for the window's keys
            changed = -momentum[-1] if optimiser.waits else weights[-1] - frozen[-1]
            moved = response[..., None] * _applier(rule, params, (changed,) * len(weights), keys)(
                last_matrix, at_frozen.inputs[-1]
            )
        g = gradient(rule, params, frozen, at_frozen, k_window, v_window, gamma, keys, moved)
        sizes: tuple[Tensor | None, ...] = (None,) * len(weights)
        if optimiser.bounded:
            whole = torch.cat([gamma[..., :-1], torch.ones_like(gamma[..., -1:])], -1)
            sizes = tuple((whole * x).sum(-1) for x in rule.sizes(frozen, at_frozen, response, params))
        rates = [optimiser.rates(gate.theta[..., t], gate.eta[:, :, t], size, rule.every, chunk) for size in sizes]
        alpha = alphas[:, :, t]
        if optimiser.has_momentum:
            faded = tuple(_rows(gate.theta[..., t], m) * m for m in momentum)
            old_sums, new_sums = faded[: -len(g)], faded[-len(g) :]  # with a horizon there are two sums a matrix
            new_sums = tuple(m + _rows(r.write, d) * d for m, d, r in zip(new_sums, g, rates, strict=True))
            momentum = _choose(real, (*old_sums, *new_sums), momentum)
            if old_sums:
                forgets = isinstance(optimiser, Muon) and optimiser.horizon is not None
                passed = new_sums if forgets else tuple(map(torch.add, old_sums, new_sums))
                momentum = _choose(ends, (*passed, *map(torch.zeros_like, new_sums)), momentum)
            g = tuple(map(torch.add, old_sums, new_sums)) if old_sums else new_sums
        takes_step = ((seen + 1) % rule.every == 0)[:, None]
        if isinstance(optimiser, Muon):  # at every token, whoever takes a step: rows are at different phases
            g = tuple(map(optimiser.step, g))
        if isinstance(optimiser, DeltaGradientDescent):
            now = tuple(_rows(alpha, w) * w for w in weights) if optimiser.after_decay else weights
            under = _under(rule, params, at_frozen.inputs, now, keys)
            g = tuple(d + _rows(gamma[..., 0], u) * u for d, u in zip(g, under, strict=True))
        steps = tuple(
            _rows(torch.where(takes_step[..., None] if r.apply.dim() == 3 else takes_step, r.apply, 0.0), d) * d
            for r, d in zip(rates, g, strict=True)
        )
        new = tuple(w - d for w, d in zip(_faded(alpha, weights, start), steps, strict=True))
        settled: Weights = new
        if isinstance(retention, NonLinearRetention):
            a = tuple(x - d for x, d in zip(_faded(alpha, dual, dual_start), steps, strict=True))
            settled = tuple(map(retention.settle, a, frozen, params.initial))
            new = _choose(first if retention.lag else last, settled, new)
            restarted = tuple(map(retention.restart, a, settled))
            dual = _choose(real, _choose(last, restarted, a), dual)
        before, weights = weights, _choose(real, new, weights)

        read = {"after": weights, "before": before, "frozen": frozen}[rule.window.read]
        outputs.append(rule.network.forward(_applier(rule, params, read, keys), q_t, params.norm))
        if size > 1:
            past_k, past_v = _choose(real, (k_window[..., 1:, :], v_window[..., 1:, :]), (past_k, past_v))
        seen = seen + (1 if real is None else real)
        frozen = _choose(ends, settled if dual else weights, frozen)
        if isinstance(rule.features, Exponential) and rule.features.horizon is not None:
            held = min(keys.shape[-2], rule.features.horizon + chunk + size - 2)
            kept = torch.arange(keys.shape[-2], 0, -1, device=q.device) <= rule.features.horizon
            forget = ~kept & ends[:, None]
            lifted = rule.network.lifted
            frozen, weights, momentum = (_forget(m, lifted, forget, held) for m in (frozen, weights, momentum))
            keys = keys[..., keys.shape[-2] - held :, :]
    y = torch.cat(outputs, -2) if outputs else q.new_zeros(q.shape)
    return y, MemoryState(frozen, weights, momentum, dual, past_k, past_v, keys, seen)


def _autograd_gradient(
    rule: Rule,
    params: Params,
    frozen: Weights,
    _: Trace,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    keys: Tensor,
    moved: Tensor | None,
) -> Weights:
    """grad of sum_i gamma_i (bias(M(phi(k_i)), v_i) + <moved_i, body of M(phi(k_i))>), summed over batch and heads:
    each has its own weights. Nothing but the printed objective, and what its errors are moved by, is looked at.

    A matrix on phi* cannot be a leaf. Where W phi*(k_i) is moved by z_i, dl/dW = sum_i (dl/dz_i) phi*(k_i)^T.
    """
    track = torch.is_grad_enabled()
    with torch.enable_grad():
        # Leaves of their own: `moved` depends on the memory too, and is a number here.
        at = tuple(w.clone() if w.requires_grad else w.detach().requires_grad_() for w in frozen)
        by_key = [up and isinstance(rule.features, Exponential) for up in rule.network.lifted]
        leaves = [
            w.new_zeros(*k.shape[:3], w.shape[-2]).requires_grad_() if moved else w
            for w, moved in zip(at, by_key, strict=True)
        ]
        held = _applier(rule, params, at, keys)
        body = rule.network.body(lambda i, u: held(i, u) + leaves[i] if by_key[i] else held(i, u), k)
        prediction = rule.network.end(k, body, params.norm)
        losses = rule.bias.value(prediction, v) + (0.0 if moved is None else (moved * body).sum(-1))
        objective = (gamma * losses).sum()
        grads = torch.autograd.grad(objective, leaves, create_graph=track, allow_unused=True, materialize_grads=True)
    if not track:
        grads = tuple(g.detach() for g in grads)
    spread = (_as_columns(g, w) if moved else g for g, w, moved in zip(grads, frozen, by_key, strict=True))
    return tuple(spread)


def _closed_form_gradient(
    rule: Rule,
    params: Params,
    frozen: Weights,
    trace: Trace,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    keys: Tensor,
    moved: Tensor | None,
) -> Weights:
    """sum_i gamma_i delta_i f_i^T for every matrix; ``trace`` is the pass at the frozen memory."""
    error = rule.network.body_error(trace, rule.bias.derivative(trace.prediction, v), params.norm)
    error = gamma[..., None] * (error if moved is None else error + moved)
    deltas = rule.network.back(frozen, trace, error)
    return tuple(
        _outer(rule, params, i, d, u, frozen[i]) for i, (d, u) in enumerate(zip(deltas, trace.inputs, strict=True))
    )


_by_autograd = partial(_loop, _autograd_gradient)
_by_closed_form = partial(_loop, _closed_form_gradient)


def _applier(rule: Rule, params: Params, weights: Weights, keys: Tensor) -> Apply:
    """``apply(i, u)``: W_i phi(u), or W_i u where matrix i is not lifted."""

    def apply(i: int, u: Tensor) -> Tensor:
        if not rule.network.lifted[i]:
            return u @ weights[i].mT
        if isinstance(rule.features, Exponential):
            return rule.features.kernel(u, keys) @ weights[i].mT
        return rule.features.expand(u, params.sqrt_a) @ weights[i].mT

    return apply


def _outer(rule: Rule, params: Params, i: int, deltas: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """sum over tokens of delta f^T, shaped as matrix i, ``like``; u are the last tokens read."""
    if not rule.network.lifted[i]:
        return deltas.mT @ u
    if isinstance(rule.features, Exponential):
        return _as_columns(deltas, like)
    return deltas.mT @ rule.features.expand(u, params.sqrt_a)


def _as_columns(deltas: Tensor, like: Tensor) -> Tensor:
    """``[..., n, rows]`` as the last n columns of a matrix of the shape of ``like``, the others zero."""
    return F.pad(deltas.mT, (like.shape[-1] - deltas.shape[-2], 0))


def _under(rule: Rule, params: Params, inputs: tuple[Tensor, ...], weights: Weights, keys: Tensor) -> Weights:
    """W f f^T for every matrix: what the memory holds under its input."""
    apply = _applier(rule, params, weights, keys)
    return tuple(_outer(rule, params, i, apply(i, u), u, weights[i]) for i, u in enumerate(inputs))


def _new_column(
    rule: Rule, real: Tensor | None, keys: Tensor, k: Tensor, memories: tuple[Weights, ...]
) -> tuple[Tensor, list[Weights]]:
    """A column for token k at the right of all matrices on phi*; rows without a token get an empty one at the left."""
    at_right = keys.new_ones((), dtype=torch.bool) if real is None else real[:, None, None, None]
    keys = torch.where(at_right, torch.cat([keys, k], -2), torch.cat([torch.zeros_like(k), keys], -2))
    grown = []
    for weights in memories:
        pairs = zip(weights, rule.network.lifted, strict=False)
        grown.append(tuple(torch.where(at_right, F.pad(w, (0, 1)), F.pad(w, (1, 0))) if up else w for w, up in pairs))
    return keys, grown


def _forget(weights: Weights, lifted: tuple[bool, ...], forget: Tensor, held: int) -> Weights:
    """Columns of lifted matrices cleared where ``forget`` ``[batch, n]``, and only the last ``held`` kept."""
    pairs = zip(weights, lifted, strict=False)
    return tuple(torch.where(forget[:, None, None], 0.0, w)[..., w.shape[-1] - held :] if up else w for w, up in pairs)


def _rows(gate: Tensor, matrix: Tensor) -> Tensor:
    """A gate ``[batch, heads]``, or ``[batch, heads, dim]`` for groups of adjoining rows, to multiply a matrix."""
    if gate.dim() == 2:
        return gate[..., None, None]
    return gate.repeat_interleave(matrix.shape[-2] // gate.shape[-1], -1)[..., None]


def _faded(alpha: Tensor, weights: Weights, home: Weights | None) -> Weights:
    """alpha W, or what is alpha of the way from ``home`` to W."""
    if home is None:
        return tuple(_rows(alpha, w) * w for w in weights)
    return tuple(m + _rows(alpha, w) * (w - m) for w, m in zip(weights, home, strict=True))


def _choose(rows: Tensor | None, new: Weights, old: Weights) -> Weights:
    """``new`` for the batch rows where ``rows`` is true, else ``old``; None: for all."""
    if rows is None:
        return new
    return tuple(torch.where(rows[:, None, None, None], n, o) for n, o in zip(new, old, strict=True))
