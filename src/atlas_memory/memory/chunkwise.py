"""The fast form: exact, chunk by chunk, with nothing materialised per token that a kernel can replace.

Within a chunk all gradients are taken at the memory frozen at its start, so every token's (f_i, delta_i) comes from one
batched pass, and reading at every t is the primitive of fast_weight.py, matrix after matrix. Between chunks it is a
recurrence. Computes the same function as recurrent.py (ATLAS sections 3.3 and 5.1) at any split of a sequence.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .fast_weight import Schedule, Tokens, identity_steps, muon_steps, rows_at, step_tokens
from .gates import Gates
from .optimisers import Muon
from .precision import compute
from .rules import Params, Rule
from .state import MemoryState, initial_state
from .windows import band, decay_matrix, shift_right, take

Weights = tuple[Tensor, ...]


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
    phase = None if state is None else state.seen % chunk
    state = initial_state(params.initial, rule.optimiser.has_momentum, size, k) if state is None else state
    if time == 0:
        return q.new_zeros(q.shape), state

    count = -(-(time if phase is None else time + chunk - 1) // chunk)
    keys, values = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    q_grid, inside = shift_right(q, phase, count * chunk)
    k_grid, exists = shift_right(keys, phase, count * chunk + size - 1)
    v_grid, _ = shift_right(values, phase, count * chunk + size - 1)
    if length is not None:
        start = 0 if phase is None else phase[:, None]
        inside = inside & (torch.arange(inside.shape[1], device=q.device) - start < length[:, None])
        exists = exists & (torch.arange(exists.shape[1], device=q.device) - start < length[:, None] + size - 1)
    # Tokens before the sequence's first are not in any window.
    first = state.seen if phase is None else state.seen - phase
    exists = exists & (first[:, None] + torch.arange(exists.shape[1], device=q.device) >= size - 1)

    def on_grid(values: Tensor, neutral: float) -> Tensor:
        grid = shift_right(values[..., None], phase, count * chunk)[0][..., 0]
        return torch.where(inside[:, None], grid, neutral).unflatten(-1, (count, chunk))

    alpha = on_grid(rule.retention.factor(gate.alpha), 1.0)
    theta, eta = on_grid(gate.theta, 1.0), on_grid(gate.eta, 0.0)
    gamma = torch.where(inside[:, None, :, None], shift_right(gate.gamma, phase, count * chunk)[0], 0.0)
    windows = band(gamma.unflatten(-2, (count, chunk)), exists.unfold(-1, chunk + size - 1, chunk)[:, None])

    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    per_chunk = zip(
        q_grid.unflatten(-2, (count, chunk)).unbind(2),
        k_grid.unfold(-2, chunk + size - 1, chunk).mT.unbind(2),
        v_grid.unfold(-2, chunk + size - 1, chunk).mT.unbind(2),
        *(x.unbind(2) for x in (windows, decay_matrix(alpha), alpha.cumprod(-1), theta, eta)),
        inside.unflatten(-1, (count, chunk))[:, None].unbind(2),
        strict=True,
    )
    frozen, weights, momentum = state.frozen, state.weights, state.momentum
    end = (time if length is None else length) + (0 if phase is None else phase)
    outputs = []
    for j, inputs in enumerate(per_chunk):
        position = first + j * chunk
        y, weights, momentum = _read_chunk(rule, params, frozen, weights, momentum, Chunk(*inputs), position)
        outputs.append(y)
        filled = (j + 1) * chunk <= end  # whether a row has read the chunk to its end
        if isinstance(filled, Tensor):
            frozen = tuple(torch.where(filled[:, None, None, None], w, f) for w, f in zip(weights, frozen, strict=True))
        elif filled:
            frozen = weights

    y = torch.cat(outputs, -2)
    y = y[..., :time, :] if phase is None else take(y, phase[:, None] + torch.arange(time, device=q.device))
    if length is None:
        past_k, past_v = keys[..., time:, :], values[..., time:, :]
    else:
        last = length[:, None] + torch.arange(size - 1, device=q.device)
        past_k, past_v = take(keys, last), take(values, last)
    seen = state.seen + (time if length is None else length)
    return y, MemoryState(frozen, weights, momentum, past_k, past_v, seen)


class Chunk(NamedTuple):
    """One chunk of b tokens and its N = b + c - 1 window tokens; leading dimensions ``[batch, heads]``.

    Attributes:
        q: ``[..., b, dim]``; k, v: ``[..., N, dim]``.
        window: Gamma ``[..., b, N]``.
        decay, retained: D_alpha ``[..., b, b]`` and cA ``[..., b]``.
        theta, eta: ``[..., b]``.
        inside: which slots are tokens of this call, bool ``[batch or 1, 1, b]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    window: Tensor
    decay: Tensor
    retained: Tensor
    theta: Tensor
    eta: Tensor
    inside: Tensor


def _read_chunk(
    rule: Rule, params: Params, frozen: Weights, weights: Weights, momentum: Weights, chunk: Chunk, first: Tensor
) -> tuple[Tensor, Weights, Weights]:
    """The outputs ``[..., b, dim]`` of one chunk, and W and S after it; ``first`` ``[batch]`` is where it starts."""
    q, k, v, window, decay, retained, theta, eta, inside = chunk
    phi = partial(rule.features.expand, sqrt_a=params.sqrt_a)
    kernel = partial(rule.features.kernel, sqrt_a=params.sqrt_a)
    start = rule.retention.start(params.initial)
    lifted = rule.network.lifted
    phi_k, phi_q = phi(torch.cat([k, q], -2)).split([k.shape[-2], q.shape[-2]], -2)

    trace = rule.network.trace(lambda i, u: (phi_k if lifted[i] else u) @ frozen[i].mT, k)
    deltas = rule.network.deltas(frozen, trace, rule.bias.derivative(trace.prediction, v))
    curvature = torch.zeros_like(eta)
    if rule.optimiser.bounded:
        curvature = (window @ rule.token_curvature(frozen, trace, params.sqrt_a)[..., None]).squeeze(-1)
    rates = rule.optimiser.rates(theta, eta, curvature, rule.window.chunk)

    mixed = rates.write[..., None] * window
    carried = rates.theta.cumprod(-1)
    if rule.optimiser.has_momentum:
        mixed = decay_matrix(rates.theta) @ mixed  # P
    at, valid = step_tokens(first, rule.optimiser.every, rule.window.chunk)
    steps = rows_at((decay * torch.where(inside, rates.apply, 0.0)[..., None, :]).mT, at)
    plan = Schedule(
        retained=retained,
        carried=carried,
        decay=(steps if valid is None else steps * valid[:, None, :, None]).mT,
        weights=rows_at(mixed, at),
        carried_steps=rows_at(carried[..., None], at)[..., 0],
        last=mixed[..., -1, :],
    )

    kernels: dict[str, Tensor] = {}  # the kernels of lifted keys and queries, shared by all lifted matrices

    def shared(name: str, x: Tensor, y: Tensor) -> Tensor:
        if name not in kernels:
            kernels[name] = kernel(x, y)
        return kernels[name]

    ends: list[tuple[Tensor, Tensor | None]] = []

    def apply_at_each_token(i: int, u: Tensor) -> Tensor:
        inputs = trace.inputs[i]
        if lifted[i]:
            tokens = Tokens(phi_k, partial(shared, "kk", k, k), deltas[i])
            features, kernel_qk = phi_q, shared("qk", q, k)
        else:
            tokens = Tokens(inputs, lambda: inputs @ inputs.mT, deltas[i])
            features, kernel_qk = u, u @ inputs.mT
        # A memory that fades to M_0 is M_0 plus a memory that fades to zero.
        w, s = weights[i] if start is None else weights[i] - start[i], momentum[i] if momentum else None
        if isinstance(rule.optimiser, Muon):
            assert s is not None
            read, end = muon_steps(w, s, tokens, plan, rule.optimiser.steps)
        else:
            read, end = identity_steps(w, s, tokens, plan)
        ends.append(end if start is None else (end[0] + start[i], end[1]))
        out = read(features, kernel_qk)
        return out if start is None else out + features @ start[i].mT

    y = rule.network.forward(apply_at_each_token, q)
    return y, tuple(w for w, _ in ends), tuple(s for _, s in ends if s is not None)
