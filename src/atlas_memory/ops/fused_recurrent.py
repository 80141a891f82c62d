"""The form for decoding: one or a few tokens that go on from a state, one after the other.

It computes what recurrent.py says, with four differences. Gradients have a closed form, sum_i gamma_i delta_i f_i^T
for every matrix, with f_i its input and delta_i the error at its output for window token i. Sequences of a batch may
stand at different places of their chunks and have different lengths. Newton-Schulz is the fast one. And the spectral
norms of frozen matrices are computed once a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..rules.autograd import is_cheap_to_read, no_autocast
from ..rules.gates import CompleteGates, Gates, pick
from ..rules.networks import MatrixInput, squared_spectral_norm
from ..rules.retention import NewMatrix, OldMatrix
from ..rules.rule import Params, Rule
from ..rules.state import Matrix, MemoryState, initial_state
from ..rules.step import Rates, Sums, TokenGates
from .dispatch import adds_gradients, has_chunks, keeps_linearly
from .matrix_inputs import centred
from .newton_schulz import newton_schulz, saturated
from .precision import compute, working_dtype


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


def decode_token(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState
) -> tuple[Tensor, MemoryState] | None:
    """``fused_recurrent`` of one token that needs no check, on a CPU and without gradients. None where it would take
    another precision, or what is read is not finite: then ``fused_recurrent`` has to be called."""
    work = working_dtype(rule, q)
    if not (q.dtype == gates.eta.dtype == params.initial[0].dtype == state.k.dtype == work):
        return None
    if gates.length is not None or not is_cheap_to_read(q) or torch.is_autocast_enabled("cpu"):
        return None
    y, after = _by_token(rule, params, q, k, v, gates, state)
    return (y, after) if math.isfinite(y.sum()) else None


def retrieve(rule: Rule, params: Params, q: Tensor, state: MemoryState) -> Tensor:
    """M(phi(q)) at the memory as it is now, without writing; q and the result ``[batch, heads, time, dim]``."""
    return read_out(rule, params, q, state.readout_weights(rule), state.keys)


def read_out(rule: Rule, params: Params, q: Tensor, weights: tuple[Tensor, ...], keys: Tensor | None = None) -> Tensor:
    """As ``retrieve``, from a memory with these ``weights``; ``keys`` are those of the columns on phi*."""
    work = torch.promote_types(q.dtype, torch.float32)
    params, keys = params.map(lambda t: t.to(work)), (q[..., :0, :] if keys is None else keys).to(work)
    with no_autocast(q.device):
        return _answer(rule, params, q.to(work), [w.to(work) for w in weights], keys).to(q.dtype)


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
    if q.shape[-2] == 1:  # as in decoding
        return _read_token(rule, params, q, k, v, gates.at(0), None if length is None else length > 0, state)
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
    when, infinite, size = _When.of(rule, state.seen, real), rule.features.infinite, rule.window.size
    if infinite:
        state = _with_column(rule, real, k, state)
    if size > 1:
        k, v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
    write = _write_inputs(rule, params, k, v, gate, state, when)
    matrices, after = [], []
    for i, old in enumerate(state.matrices):
        new, answering = _write(rule, params, i, old, write, gate, when)
        matrices.append(new)
        after.append(answering)
    read: Sequence[Tensor] = after if rule.window.read == "after" else state.frozen
    read = state.readout_weights(rule) if rule.window.read == "before" else read
    y = _answer(rule, params, q, read, state.keys)
    past_k, past_v = state.k, state.v
    if size > 1:
        past_k, past_v = pick(when.exists, k[..., 1:, :], past_k), pick(when.exists, v[..., 1:, :], past_v)
    end = MemoryState(tuple(matrices), past_k, past_v, state.keys, state.seen + (1 if real is None else real))
    return y, _forget(rule, end, when.ends) if infinite else end


class _When(NamedTuple):
    """Where the token is in its chunk: bool ``[batch]``, or one bool for all rows.

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
        places = set(seen.tolist()) if is_cheap_to_read(seen) else set()
        if real is not None and is_cheap_to_read(real) and bool(real.all()):
            real = None

        def divides(period: int, after: int) -> Tensor | bool:
            found = {(place + after) % period == 0 for place in places}
            return found.pop() if len(found) == 1 else (seen + after) % period == 0

        chunk, every = rule.window.chunk, rule.every
        last = divides(chunk, 1)
        follows, due = (True, True) if every == 1 else (divides(every, 0), divides(every, 1))
        return _When(
            first=divides(chunk, 0),
            last=last,
            follows=follows,
            due=due,
            exists=True if real is None else real,
            ends=last if real is None else real & last,
            full=min(places, default=0) >= rule.window.size - 1,
        )


class _WriteInputs(NamedTuple):
    """What a token writes to the memory. The c tokens of its window are in order, the oldest first.

    Attributes:
        f: for every matrix its inputs for the window's keys, ``[batch, heads, c, columns]``.
        deltas: for every matrix the errors at what it puts out, times gamma, ``[batch, heads, c, rows]``.
        sizes: for every matrix the number that normalises its step, ``[batch, heads]``; None: raw steps.
        gamma: ``[batch, heads, c]``, 0 for tokens before the sequence's first.
    """

    f: list[Tensor]
    deltas: tuple[Tensor, ...]
    sizes: list[Tensor | None]
    gamma: Tensor


def _write_inputs(
    rule: Rule, params: Params, k: Tensor, v: Tensor, gate: CompleteGates, state: MemoryState, when: _When
) -> _WriteInputs:
    network, optimiser, frozen = rule.network, rule.optimiser, state.frozen
    gamma = gate.gamma
    if rule.window.size > 1:
        gamma = gamma.flip(-1)
        if not when.full:
            age = torch.arange(rule.window.size - 1, -1, -1, device=k.device)  # of the window tokens, the oldest first
            gamma = torch.where((age <= state.seen[:, None])[:, None], gamma, 0.0)
    f: list[Tensor] = []
    outputs: list[Tensor] = []
    inputs: list[MatrixInput] = []
    for i, w in enumerate(frozen):
        inputs.append(network.matrix_input(i, k, outputs, slopes=True))
        f.append(_matrix_input(rule, params, i, inputs[i][0], state.keys))
        outputs.append(f[i] @ w.mT)
    cache = network.make_cache(k, inputs, outputs[-1], params.norm)
    error = network.pre_norm_error(cache, rule.bias.derivative(cache.prediction, v), params.norm)
    sizes: list[Tensor | None] = [None] * len(frozen)
    online = rule.online
    if online or optimiser.normalised:
        rate = rule.curvature_bound(cache, v, params)
        if online:
            last = state.matrices[-1]
            changed = optimiser.chunk_change(last.sums, last.weights, last.frozen)
            error = torch.addcmul(error, rate[..., None], f[-1] @ changed.mT)
        if optimiser.normalised:
            counted = None
            if rule.window.size > 1:
                counted = torch.cat([gamma[..., :-1], torch.ones_like(gamma[..., -1:])], -1)
            for i, size in enumerate(rule.step_normalisers(frozen, cache, rate, params, spectral_norm=_frozen_norm)):
                sizes[i] = size[..., 0] if counted is None else (counted * size).sum(-1)
    return _WriteInputs(f, network.back(frozen, cache, gamma[..., None] * error), sizes, gamma)


def _write(
    rule: Rule, params: Params, i: int, old: Matrix, write: _WriteInputs, gate: CompleteGates, when: _When
) -> tuple[Matrix, Tensor]:
    """Matrix i after the token, and the matrix with which it answers then (``InnerOptimiser.readout_weights``)."""
    optimiser, retention, f, every = rule.optimiser, rule.retention, write.f[i], rule.every
    rates = optimiser.rates(gate.theta, gate.eta, write.sizes[i], every, rule.window.chunk)
    alpha = gate.alpha if retention.gated else torch.ones_like(gate.theta)
    by_column = rule.kernelised(i)
    if adds_gradients(rule) and not by_column and gate.eta.dim() == alpha.dim() == 2:
        sums, w = _add_gradient(rule, params.initial[i], old, write.deltas[i], f, rates, alpha)
        return _after(old, NewMatrix(w, w, None), sums, when), w

    def outer(deltas: Tensor, f: Tensor) -> Tensor:
        """A write: the sum of delta f^T; on phi* the tokens have the last columns."""
        if by_column:
            return F.pad(deltas.mT, (old.weights.shape[-1] - deltas.shape[-2], 0))
        return deltas.mT @ (retention.tangent(f) if retention.fixed_row_sums else f)

    def along_key(w: Tensor) -> Tensor:
        now = f[..., -1:, :]
        return outer(now @ w.mT, now)

    if every > 1:
        rates = rates._replace(theta=pick(when.follows, rates.theta, torch.ones_like(rates.theta)))
    # The library's own optimisers read directions in their steps only; one of a user may do so at any token.
    directions = (_no_step, _no_step) if when.due is False and has_chunks(rule) else (newton_schulz, saturated)
    at = TokenGates(*rates, alpha, write.gamma[..., -1], along_key, *directions)
    sums, step = optimiser.step(old.sums, old.weights, outer(write.deltas[i], f), at)
    step = step if every == 1 else pick(when.due, step, torch.zeros_like(step))
    new = _keep(rule, params.initial[i], old, step, alpha, when)
    answering = optimiser.readout_weights(sums, new.weights, when.due)
    if optimiser.ends_chunk and when.last is not False:
        sums = tuple(pick(when.last, a, b) for a, b in zip(optimiser.end_chunk(sums), sums, strict=True))
    return _after(old, new, sums, when), answering


def _after(old: Matrix, new: NewMatrix, sums: Sums, when: _When) -> Matrix:
    """The matrix that the next token meets: in rows where there was no token, ``old``."""
    frozen = pick(when.ends, new.mirrored, old.frozen)
    if when.exists is True:
        return Matrix(new.weights, frozen, sums, new.dual)
    return Matrix(
        weights=pick(when.exists, new.weights, old.weights),
        frozen=frozen,
        sums=tuple(pick(when.exists, a, b) for a, b in zip(sums, old.sums, strict=True)),
        dual=None if old.dual is None or new.dual is None else pick(when.exists, new.dual, old.dual),
    )


def _add_gradient(
    rule: Rule, initial: Tensor, old: Matrix, deltas: Tensor, f: Tensor, rates: Rates, alpha: Tensor
) -> tuple[Sums, Tensor]:
    """The sums and W_t of a rule that ``adds_gradients``, in few passes over the matrices: g_t = delta^T f is added
    where it is computed."""
    size = rates.write if old.sums else rates.apply
    left, right = (size[..., None, None] * deltas).flatten(0, 1).mT, f.flatten(0, 1)
    alone = is_cheap_to_read(left) and is_cheap_to_read(old.weights)
    add, subtract = (Tensor.baddbmm_, Tensor.sub_) if alone else (torch.baddbmm, torch.sub)
    target = rule.decay_target(initial, old.weights)[0]
    decay = alpha[..., None, None]
    w = decay * old.weights if target is None else torch.lerp(target, old.weights, decay)
    if not old.sums:
        return (), add(w.flatten(0, 1), left, right, alpha=-1).view_as(w)
    s = rates.theta[..., None, None] * old.sums[0]
    s = add(s.flatten(0, 1), left, right).view_as(s)
    return (s,), subtract(w, s)


_NORMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _frozen_norm(matrix: Tensor, columns: int) -> Tensor:
    """``squared_spectral_norm``; where there are no gradients, remembered for as long as the frozen matrix lives."""
    if torch.is_grad_enabled() or not is_cheap_to_read(matrix):
        return squared_spectral_norm(matrix, columns)
    known = columns, None if matrix.is_inference() else matrix._version
    found = _NORMS.get(matrix)
    if found is None or found[0] != known:
        found = _NORMS[matrix] = known, squared_spectral_norm(matrix, columns)
    return cast(Tensor, found[1])


def _keep(rule: Rule, initial: Tensor, old: Matrix, step: Tensor, alpha: Tensor, when: _When) -> NewMatrix:
    """What the retention makes of one matrix and its step; under a linear one with a decay target in one pass."""
    target, dual_target = rule.decay_target(initial, old.weights)
    if keeps_linearly(rule) and target is not None and alpha.dim() == 2:
        weights = torch.lerp(target, old.weights, alpha[..., None, None]) - step
        return NewMatrix(weights, weights, None)
    before = OldMatrix(old.weights, old.frozen, old.dual, initial, target, dual_target)
    return rule.retention.keep(before, step, alpha, when.first, when.last)


def _matrix_input(rule: Rule, params: Params, i: int, u: Tensor, keys: Tensor) -> Tensor:
    """What matrix i multiplies of its input u ``[..., n, width]``: phi(u) where it is feature-mapped."""
    mapped = rule.network.feature_mapped
    if mapped[i]:
        return rule.features.columns(u, keys, params.sqrt_a)
    return centred(rule, u, i + 1 == len(mapped)) if rule.retention.fixed_row_sums else u


def _answer(rule: Rule, params: Params, q: Tensor, weights: Sequence[Tensor], keys: Tensor) -> Tensor:
    """M(phi(q)) of a memory with these weights."""
    outputs: list[Tensor] = []
    for i, w in enumerate(weights):
        outputs.append(_matrix_input(rule, params, i, rule.network.matrix_input(i, q, outputs)[0], keys) @ w.mT)
    return rule.network.end(q, outputs[-1], params.norm)


def _no_step(s: Tensor, steps: int) -> Tensor:
    """In place of Newton-Schulz where no step is due."""
    return torch.zeros_like(s)


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
    kept = min(have, rule.features.horizon + rule.window.chunk + rule.window.size - 2)
    old = torch.arange(have, 0, -1, device=state.seen.device) > rule.features.horizon
    gone = (old & torch.as_tensor(ends, device=old.device)[..., None])[..., None, None, :]
    return state.map_key_columns(
        rule, lambda w: torch.where(gone, 0.0, w)[..., have - kept :], state.keys[..., have - kept :, :]
    )
