"""The definition of every model: a literal loop over tokens.

For each token t, with c the window, b the chunk and M_f the memory before t's chunk (the frozen memory),

    l_t(M) = sum_{i = t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)                  (ATLAS Eq. 9)
    g_t    = grad l_t at M_f                                                        (ATLAS Eqs. 15-16)
    S_t    = theta_t S_{t-1} + a_t g_t,   M_t = alpha_t M_{t-1} - e_t O(S_t)        (optimisers.py)
    y_t    = M_t(phi(q_t))

``recurrent`` obtains g_t by automatic differentiation of l_t and of nothing else: it is the oracle. ``incremental`` is
the same loop with the closed-form gradient: constant work a token, for decoding. Both take rows at different phases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .gates import Gates
from .newton_schulz import newton_schulz
from .optimisers import Muon
from .precision import compute
from .rules import Params, Rule
from .state import MemoryState, initial_state

Weights = tuple[Tensor, ...]
Gradient = Callable[[Rule, Params, Weights, Tensor, Tensor, Tensor], Weights]


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
        params: M_0 ``[heads, rows, columns]`` a matrix, and the feature coefficients.
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
        params = Params(
            tuple(m.clone() for m in params.initial), None if params.sqrt_a is None else params.sqrt_a.clone()
        )
        state = None if state is None else state.map(torch.clone)
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
    depends on the window c but neither on the chunk b nor on how much was read."""
    return compute(_by_closed_form, rule, params, q, k, v, gates, state)


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
    size, chunk, optimiser = rule.window.size, rule.window.chunk, rule.optimiser
    length, gate = gates.length, gates.complete(q, size)
    state = initial_state(params.initial, optimiser.has_momentum, size, k) if state is None else state
    frozen, weights, momentum, seen = state.frozen, state.weights, state.momentum, state.seen
    past_k, past_v = state.k, state.v
    age = torch.arange(size - 1, -1, -1, device=q.device)  # of the window tokens, oldest first
    alphas = rule.retention.factor(gate.alpha)
    start = rule.retention.start(params.initial)
    outputs = []
    for t in range(q.shape[-2]):
        real = torch.ones_like(seen, dtype=torch.bool) if length is None else t < length
        k_window, v_window = (
            torch.cat([past_k, k[..., t : t + 1, :]], -2),
            torch.cat([past_v, v[..., t : t + 1, :]], -2),
        )
        gamma = gate.gamma[:, :, t].flip(-1)
        gamma = torch.where((age <= seen[:, None])[:, None], gamma, 0.0)
        g = gradient(rule, params, frozen, k_window, v_window, gamma)

        curvature = torch.zeros_like(gamma[..., 0])
        if optimiser.bounded:
            trace = rule.network.trace(_applier(rule, params, frozen), k_window)
            curvature = (gamma * rule.token_curvature(frozen, trace, params.sqrt_a)).sum(-1)
        rates = optimiser.rates(gate.theta[..., t], gate.eta[..., t], curvature, chunk)
        if optimiser.has_momentum:
            g = tuple(_at(rates.theta) * s + _at(rates.write) * d for s, d in zip(momentum, g, strict=True))
            momentum = _choose(real, g, momentum)
        takes_step = ((seen + 1) % optimiser.every == 0)[:, None]
        if isinstance(optimiser, Muon) and (optimiser.every == 1 or bool(takes_step.any())):
            g = tuple(newton_schulz(s, optimiser.steps) for s in g)
        step = torch.where(takes_step, rates.apply, 0.0)
        new = tuple(_at(alphas[..., t]) * w - _at(step) * d for w, d in zip(weights, g, strict=True))
        if start is not None:
            new = tuple(n + _at(1.0 - alphas[..., t]) * m for n, m in zip(new, start, strict=True))
        weights = _choose(real, new, weights)

        outputs.append(rule.network.forward(_applier(rule, params, weights), q[..., t : t + 1, :]))
        if size > 1:
            past_k = torch.where(real[:, None, None, None], k_window[..., 1:, :], past_k)
            past_v = torch.where(real[:, None, None, None], v_window[..., 1:, :], past_v)
        seen = seen + real
        frozen = _choose(real & (seen % chunk == 0), weights, frozen)
    y = torch.cat(outputs, -2) if outputs else q.new_zeros(q.shape)
    return y, MemoryState(frozen, weights, momentum, past_k, past_v, seen)


def _autograd_gradient(rule: Rule, params: Params, frozen: Weights, k: Tensor, v: Tensor, gamma: Tensor) -> Weights:
    """grad of sum_i gamma_i bias(M(phi(k_i)), v_i), summed over batch and heads: each has its own weights."""
    track = torch.is_grad_enabled()
    with torch.enable_grad():
        at = tuple(w if w.requires_grad else w.detach().requires_grad_() for w in frozen)
        prediction = rule.network.forward(_applier(rule, params, at), k)
        objective = (gamma * rule.bias.value(prediction, v)).sum()
        grads = torch.autograd.grad(objective, at, create_graph=track, allow_unused=True, materialize_grads=True)
    return tuple(grads) if track else tuple(g.detach() for g in grads)


def _closed_form_gradient(rule: Rule, params: Params, frozen: Weights, k: Tensor, v: Tensor, gamma: Tensor) -> Weights:
    """sum_i gamma_i delta_i f_i^T for every matrix."""
    trace = rule.network.trace(_applier(rule, params, frozen), k)
    error = gamma[..., None] * rule.bias.derivative(trace.prediction, v)
    deltas = rule.network.deltas(frozen, trace, error)
    inputs = zip(rule.network.lifted, trace.inputs, strict=True)
    features = (rule.features.expand(u, params.sqrt_a) if lifted else u for lifted, u in inputs)
    return tuple(d.mT @ f for d, f in zip(deltas, features, strict=True))


_by_autograd = partial(_loop, _autograd_gradient)
_by_closed_form = partial(_loop, _closed_form_gradient)


def _applier(rule: Rule, params: Params, weights: Weights) -> Callable[[int, Tensor], Tensor]:
    def apply(i: int, u: Tensor) -> Tensor:
        return (rule.features.expand(u, params.sqrt_a) if rule.network.lifted[i] else u) @ weights[i].mT

    return apply


def _at(gate: Tensor) -> Tensor:
    return gate[..., None, None]


def _choose(rows: Tensor, new: Weights, old: Weights) -> Weights:
    """``new`` for the batch rows where ``rows`` is true, else ``old``."""
    return tuple(torch.where(rows[:, None, None, None], n, o) for n, o in zip(new, old, strict=True))
