"""The form for decoding: one or a few tokens that go on from a state, one after the other.

It computes what recurrent.py says, with three differences. Gradients have a closed form, sum_i gamma_i delta_i f_i^T
for every matrix, with f_i its input and delta_i the error at its output for window token i. Sequences of a batch may
stand at different places of their chunks and have different lengths. And Newton-Schulz is the fast one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.autograd import is_cheap_to_read, no_autocast
from ..rules.gates import CompleteGates, Gates, pick
from ..rules.networks import Apply, ForwardCache
from ..rules.retention import OldMatrix
from ..rules.rule import Params, Rule
from ..rules.state import Matrix, MemoryState, initial_state
from ..rules.step import TokenGates
from .dispatch import has_chunks
from .matrix_inputs import centred
from .newton_schulz import newton_schulz, saturated
from .precision import compute


def fused_recurrent(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read and write token by token; arguments and results are those of ``recurrent``. The work for a token depends on
    the window c, but neither on the chunk b nor on how much was read before (except with ``Exponential`` features)."""
    return compute(_by_token, rule, params, q, k, v, gates, state)


def retrieve(rule: Rule, params: Params, q: Tensor, state: MemoryState) -> Tensor:
    """M(phi(q)) at the memory as it is now, without writing; q and the result ``[batch, heads, time, dim]``."""
    return read_out(rule, params, q, state.readout_weights(rule), state.keys)


def read_out(rule: Rule, params: Params, q: Tensor, weights: tuple[Tensor, ...], keys: Tensor | None = None) -> Tensor:
    """As ``retrieve``, from a memory with these ``weights``; ``keys`` are those of the columns on phi*."""
    work = torch.promote_types(q.dtype, torch.float32)
    params, keys = params.map(lambda t: t.to(work)), (q[..., :0, :] if keys is None else keys).to(work)
    with no_autocast(q.device):
        apply = _applier(rule, params, tuple(w.to(work) for w in weights), keys)
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
    """``fused_recurrent`` on inputs that have been checked and are in the working precision. Where the bias reads the
    gate delta, it is v's last entry; ``length`` ``[batch]`` says how many tokens of each row are real, None: all."""
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
    """Read one token ``[batch, heads, 1, dim]``. In rows where it is not ``real``, bool ``[batch]``, it is padding and
    nothing changes; None: it is real in all."""
    when = _When.of(rule, state.seen, real)
    if rule.features.infinite:
        state = _with_column(rule, real, k, state)
    write_inputs = _write_inputs(
        rule, params, torch.cat([state.k, k], -2), torch.cat([state.v, v], -2), gate, state, when
    )
    written = [_written(rule, params, i, m, write_inputs, gate, when, state.keys) for i, m in enumerate(state.matrices)]
    matrices, after = zip(*written, strict=True)
    answering = after if rule.window.read == "after" else state.frozen
    answering = state.readout_weights(rule) if rule.window.read == "before" else answering
    y = rule.network.forward(_applier(rule, params, answering, state.keys), q, params.norm)
    past = (write_inputs.k[..., 1:, :], write_inputs.v[..., 1:, :])
    past_k, past_v = (pick(when.exists, a, b) for a, b in zip(past, (state.k, state.v), strict=True))
    end = MemoryState(matrices, past_k, past_v, state.keys, state.seen + (1 if real is None else real))
    return y, _forget(rule, end, when.ends)


class _When(NamedTuple):
    """What is so at the token: bool ``[batch]``, or one bool for all rows.

    Attributes:
        first, last: it is the first or the last of its chunk.
        follows, due: a step was taken just before it, or is to be taken after it.
        exists: it is real and no padding.
        ends: it is real, and the last of its chunk.
        full: all places of its window are tokens of the sequence, in every row. False: not known.
    """

    first: Tensor | bool
    last: Tensor | bool
    follows: Tensor | bool
    due: Tensor | bool
    exists: Tensor | bool
    ends: Tensor | bool
    full: bool

    @staticmethod
    def of(rule: Rule, seen: Tensor, real: Tensor | None) -> _When:
        """Of a token after ``seen`` others, ``[batch]``. Where all rows agree, as they do unless there is padding,
        nothing of the memory need be computed twice or copied to choose between."""
        places = seen.tolist() if is_cheap_to_read(seen) else []
        if real is not None and is_cheap_to_read(real) and bool(real.all()):
            real = None

        def at(after: int, every: int) -> Tensor | bool:
            found = {(place + after) % every == 0 for place in places}
            return found.pop() if len(found) == 1 else (seen + after) % every == 0

        last = at(1, rule.window.chunk)
        return _When(
            first=at(0, rule.window.chunk),
            last=last,
            follows=at(0, rule.every),
            due=at(1, rule.every),
            exists=True if real is None else real,
            ends=last if real is None else real & last,
            full=min(places, default=0) >= rule.window.size - 1,
        )


class _WriteInputs(NamedTuple):
    """What a token teaches the memory. The c tokens of its window are in order, the oldest first.

    Attributes:
        k, v: keys and values of the window, ``[batch, heads, c, dim]``.
        at_frozen: the pass of these keys through M_f.
        deltas: for every matrix the errors at what it puts out, times gamma, ``[batch, heads, c, rows]``.
        sizes: for every matrix the number that bounds its step, ``[batch, heads]``; None: steps are raw.
        gamma: ``[batch, heads, c]``, 0 for tokens before the sequence's first.
    """

    k: Tensor
    v: Tensor
    at_frozen: ForwardCache
    deltas: tuple[Tensor, ...]
    sizes: tuple[Tensor | None, ...]
    gamma: Tensor


def _write_inputs(
    rule: Rule, params: Params, k: Tensor, v: Tensor, gate: CompleteGates, state: MemoryState, when: _When
) -> _WriteInputs:
    network, frozen = rule.network, state.frozen
    gamma = gate.gamma.flip(-1)
    if not when.full:
        age = torch.arange(rule.window.size - 1, -1, -1, device=k.device)  # of the window tokens, the oldest first
        gamma = torch.where((age <= state.seen[:, None])[:, None], gamma, 0.0)
    at_frozen = network.forward_cache(_applier(rule, params, frozen, state.keys), k, params.norm)
    error = network.pre_norm_error(at_frozen, rule.bias.derivative(at_frozen.prediction, v), params.norm)
    sizes: tuple[Tensor | None, ...] = (None,) * len(frozen)
    if rule.online or rule.optimiser.normalised:
        curvature_bound = rule.curvature_bound(at_frozen, v, params)
        if rule.online:
            error = error + curvature_bound[..., None] * _moved(rule, params, at_frozen, state)
        if rule.optimiser.normalised:
            counted = torch.cat([gamma[..., :-1], torch.ones_like(gamma[..., -1:])], -1)
            sizes = tuple(
                (counted * x).sum(-1) for x in rule.step_normalisers(frozen, at_frozen, curvature_bound, params)
            )
    return _WriteInputs(k, v, at_frozen, network.back(frozen, at_frozen, gamma[..., None] * error), sizes, gamma)


def _written(
    rule: Rule,
    params: Params,
    i: int,
    old: Matrix,
    write_inputs: _WriteInputs,
    gate: CompleteGates,
    when: _When,
    keys: Tensor,
) -> tuple[Matrix, Tensor]:
    """Matrix i after the token, and the matrix with which it answers then (``InnerOptimiser.readout_weights``)."""
    optimiser, u = rule.optimiser, write_inputs.at_frozen.inputs[i]
    rates = optimiser.rates(gate.theta, gate.eta, write_inputs.sizes[i], rule.every, rule.window.chunk)
    alpha = gate.alpha if rule.retention.gated else torch.ones_like(gate.theta)

    def along_key(w: Tensor) -> Tensor:
        now = u[..., -1:, :]
        return _outer(rule, params, i, _apply(rule, params, i, w, now, keys), now, w)

    if rule.every > 1:
        rates = rates._replace(theta=pick(when.follows, rates.theta, torch.ones_like(rates.theta)))
    # The library's own optimisers read directions in their steps only; one from outside may do so at any token.
    idle = when.due is False and has_chunks(rule)
    directions = (_no_step, _no_step) if idle else (newton_schulz, saturated)
    at = TokenGates(*rates, alpha, write_inputs.gamma[..., -1], along_key, *directions)
    g = _outer(rule, params, i, write_inputs.deltas[i], u, old.frozen)
    sums, step = optimiser.step(old.sums, old.weights, g, at)
    step = step if rule.every == 1 else pick(when.due, step, torch.zeros_like(step))
    initial = params.initial[i]
    before = OldMatrix(old.weights, old.frozen, old.dual, initial, *rule.decay_target(initial, old.weights))
    kept = rule.retention.keep(before, step, alpha, when.first, when.last)
    readout_weights = optimiser.readout_weights(sums, kept.weights, when.due)
    if optimiser.ends_chunk:
        sums = tuple(pick(when.last, a, b) for a, b in zip(optimiser.end_chunk(sums), sums, strict=True))
    after = Matrix(
        weights=pick(when.exists, kept.weights, old.weights),
        frozen=pick(when.ends, kept.mirrored, old.frozen),
        sums=tuple(pick(when.exists, a, b) for a, b in zip(sums, old.sums, strict=True)),
        dual=None if old.dual is None or kept.dual is None else pick(when.exists, kept.dual, old.dual),
    )
    return after, readout_weights


def _no_step(s: Tensor, steps: int) -> Tensor:
    """In place of Newton-Schulz where no step is due."""
    return torch.zeros_like(s)


def _moved(rule: Rule, params: Params, at_frozen: ForwardCache, state: MemoryState) -> Tensor:
    """What the chunk has changed so far of what the last matrix answers to the window's keys."""
    i, m = len(state.matrices) - 1, state.matrices[-1]
    changed = rule.optimiser.chunk_change(m.sums, m.weights, m.frozen)
    return _apply(rule, params, i, changed, at_frozen.inputs[i], state.keys)


def _apply(rule: Rule, params: Params, i: int, w: Tensor, u: Tensor, keys: Tensor) -> Tensor:
    """What matrix i puts out if its weights are w: W phi(u), or W u where it is not feature-mapped; ``[..., n,
    rows]``."""
    if not rule.network.feature_mapped[i]:
        return centred(rule, u, i + 1 == len(rule.network.feature_mapped)) @ w.mT
    return rule.features.columns(u, keys, params.sqrt_a) @ w.mT


def _applier(rule: Rule, params: Params, weights: tuple[Tensor, ...], keys: Tensor) -> Apply:
    """``_apply`` of a memory's matrices, as a network asks for it."""
    return lambda i, u: _apply(rule, params, i, weights[i], u, keys)


def _outer(rule: Rule, params: Params, i: int, deltas: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """A write to matrix i: the sum over n tokens of delta f^T, shaped as the matrix, ``like``. ``deltas`` are
    ``[..., n, rows]``; f is made of u ``[..., n, width]``. On phi* the n tokens must have the last n columns."""
    if rule.kernelised(i):
        return _as_columns(deltas, like)
    f = rule.features.expand(u, params.sqrt_a) if rule.network.feature_mapped[i] else u
    return deltas.mT @ rule.retention.tangent(f)


def _as_columns(deltas: Tensor, like: Tensor) -> Tensor:
    """``[..., n, rows]`` as the last n columns of a matrix of the shape of ``like``, the others zero."""
    return F.pad(deltas.mT, (like.shape[-1] - deltas.shape[-2], 0))


def _with_column(rule: Rule, real: Tensor | None, k: Tensor, state: MemoryState) -> MemoryState:
    """The state with one more column in all matrices on phi*: at the right for a token with key k, or in rows without a
    token an empty one at the left."""
    at_right: Tensor | bool = True if real is None else real
    keys = pick(at_right, torch.cat([state.keys, k], -2), torch.cat([torch.zeros_like(k), state.keys], -2))
    return state.map_key_columns(rule, lambda w: pick(at_right, F.pad(w, (0, 1)), F.pad(w, (1, 0))), keys)


def _forget(rule: Rule, state: MemoryState, ends: Tensor | bool) -> MemoryState:
    """The state without what the horizon of phi*, if there is one, makes it forget: in rows whose chunk ``ends``, the
    columns of too old tokens are zero; and columns that can only be zero in all rows are cut off."""
    if rule.features.horizon is None:
        return state
    have = state.keys.shape[-2]
    held = min(have, rule.features.horizon + rule.window.chunk + rule.window.size - 2)
    old = torch.arange(have, 0, -1, device=state.seen.device) > rule.features.horizon
    gone = (old & torch.as_tensor(ends, device=old.device)[..., None])[..., None, None, :]
    return state.map_key_columns(
        rule, lambda w: torch.where(gone, 0.0, w)[..., have - held :], state.keys[..., have - held :, :]
    )
