"""The definition of every model: one sequence, one head, token after token. Nothing here is for speed.

With c the window, b the chunk, M_t the memory after token t and M_f the memory before t's chunk (the frozen memory),

    l_t(M) = sum_{i = t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)                  (ATLAS Eq. 9)
    g_t    = grad l_t at M_f, errors at what the last matrix answers now            (ATLAS Eqs. 15-16; step.py)
    S_t    = theta_t S_{t-1} + a_t g_t                                              (ATLAS Eqs. 33 and 58)
    M_t    = alpha_t M_{t-1} - e_t O(S_t)                                           (ATLAS Eqs. 32 and 57)
    y_t    = M_t(phi(q_t))                                                          (or as Window.read says)

with a_t and e_t (``at.write`` and ``at.apply``) and O as optimisers.py lists them. alpha may decay to M_0 instead of to
zero, and g_t leave out what all entries of a row have in common, as the retention says (retention.py). Normalised steps
and the online gradient are the library's: ``Rule.printed`` sets ``normalised=False`` and ``online=False``. ``step`` of
the optimiser says how S_t becomes a step, ``keep`` of the retention how the old memory and the step make the new one.
``recurrent`` runs ``definition`` on any batch: its rows, which are sequences, may be of different length, and may go on
from states in which they have read different numbers of tokens. The equations of each paper as it prints them are in
``atlas_memory.reference``."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.gates import CompleteGates, Gates
from ..rules.networks import Apply, ForwardCache
from ..rules.retention import OldMatrix
from ..rules.rule import Params, Rule
from ..rules.state import Matrix, MemoryState, initial_state
from ..rules.step import TokenGates
from .precision import compute


def recurrent(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read and write token by token, as ``definition`` says. Slow, literal, any float dtype.

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
    if rule.features.infinite:
        keys = torch.cat([state.keys, k], -2)
        values = F.pad(past_v, (0, 0, keys.shape[-2] - past_v.shape[-2], 0))
        state = state.map_key_columns(rule, lambda w: F.pad(w, (0, time)), keys)
    y, memory = definition(rule, params, q, keys, values, gate, list(state.matrices), seen)
    past_k, past_v = past_k[..., time:, :], past_v[..., time:, :]
    state = MemoryState(tuple(memory), past_k, past_v, state.keys, state.seen + time)
    if rule.features.horizon is None:
        return y, state
    count = rule.features.horizon + rule.window.chunk + rule.window.size - 2
    return y, _with_columns(rule, state, min(keys.shape[-2], count))


def _with_columns(rule: Rule, state: MemoryState, count: int) -> MemoryState:
    """For phi*: the state with ``count`` columns of keys. The oldest are left out, or empty ones put before them."""
    if not rule.features.infinite:
        return state
    room = count - state.keys.shape[-2]
    return state.map_key_columns(rule, lambda w: F.pad(w, (room, 0)), F.pad(state.keys, (0, 0, room, 0)))


def definition(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: CompleteGates, memory: list[Matrix], seen: int
) -> tuple[Tensor, list[Matrix]]:
    """Answer the queries q ``[time, dim]``, learning from k and v. ``memory`` is what the ``seen`` tokens before these
    have left, a list of ``Matrix`` of ``[rows, columns]``. On phi*, the infinite features of ``Exponential``, a matrix
    has the columns of M_0, and one for every key up to the last of k, zero until it is written.

    Every shape has ``[batch, heads]`` in front; all sequences of the batch have read equally many tokens before.

    Args:
        k, v: ``[past + time, dim]``: those of the tokens, and before them those of at least c - 1 earlier tokens; on
            phi* one for every column behind those of M_0. Where the bias reads the gate delta, it is v's last entry.
        gates: ``[time]``, gamma ``[time, c]``, whose entry j weighs token t - j; eta and alpha may be channel-wise,
            ``[time, dim]``.

    Returns:
        y ``[time, dim]`` and the memory after the last token.
    """
    c, b, optimiser, model, y = rule.window.size, rule.window.chunk, rule.optimiser, Model(rule, params, k, v), []
    for t in range(q.shape[-2]):
        n = (seen + t) % b  # the place of token t in its chunk
        first, last = n == 0, n + 1 == b
        follows, due = n % rule.every == 0, (n + 1) % rule.every == 0  # a step was taken before t, is due after t
        # Where t is in k and v, how many tokens of its window are older, and its gates:
        now, older, gate = k.shape[-2] - q.shape[-2] + t, min(c - 1, seen + t), gates.at(t)
        window, gamma = slice(now - older, now + 1), gate.gamma[..., : older + 1].flip(-1)  # the oldest first
        frozen, after = [m.frozen for m in memory], []
        before = [
            optimiser.readout_weights(m.sums, m.weights, follows) for m in memory
        ]  # M_{t-1}; with the pending update less S
        at_frozen = rule.network.forward_cache(model.apply(frozen), k[..., window, :], params.norm)  # M_f at its keys
        curvature_bound = rule.curvature_bound(
            at_frozen, v[..., window, :], params
        )  # r_t of step.py: how fast an error grows
        g = model.gradient(
            frozen, at_frozen, window, gamma, model.moved(memory, at_frozen, curvature_bound)
        )  # Eqs. 9, 16
        sizes = rule.step_normalisers(
            frozen, at_frozen, curvature_bound, params
        )  # lambda_l of step.py, of each token of the window
        counted = torch.cat([gamma[..., :-1], torch.ones_like(gamma[..., -1:])], -1)  # t's own counts whole
        alpha = gate.alpha if rule.retention.gated else torch.ones_like(gate.theta)
        for i, m in enumerate(memory):
            size = (counted * sizes[i]).sum(-1) if optimiser.normalised else None  # what eta is divided by
            rates = optimiser.rates(gate.theta, gate.eta, size, rule.every, b)
            rates = rates if follows else rates._replace(theta=torch.ones_like(gate.theta))  # S adds up until a step
            at = TokenGates(*rates, alpha, gamma[..., -1], model.along_key(i, at_frozen, now))
            sums, step = optimiser.step(m.sums, m.weights, g[i], at)  # ATLAS Eqs. 33, 58; every = 1: Eq. 40
            step = step if due else torch.zeros_like(step)
            kept = rule.retention.keep(model.old(i, m), step, alpha, first, last)  # ATLAS Eqs. 32, 57
            after.append(optimiser.readout_weights(sums, kept.weights, due))
            mirrored, sums = (kept.mirrored, optimiser.end_chunk(sums)) if last else (m.frozen, sums)  # M_f
            memory = [*memory[:i], Matrix(kept.weights, mirrored, sums, kept.dual), *memory[i + 1 :]]
        memory = model.forget(memory, now) if last else memory
        answering = model.apply({"after": after, "before": before, "frozen": frozen}[rule.window.read])
        y.append(rule.network.forward(answering, q[..., t, None, :], params.norm))
    return torch.cat(y, -2) if y else q, memory


class Model(NamedTuple):
    """M(phi(x)) and its gradient, given the weights; k and v are those of ``definition``. Matrices are counted by i,
    and u ``[..., tokens, width]`` is what one is given: keys or queries where it is feature-mapped, else hidden
    units."""

    rule: Rule
    params: Params
    k: Tensor
    v: Tensor

    def features(self, i: int, u: Tensor) -> Tensor:
        """What matrix i multiplies: phi(u); on phi* u and its kernel with the keys of all columns; else u itself."""
        return self.rule.features.columns(u, self.k, self.params.sqrt_a) if self.rule.network.feature_mapped[i] else u

    def write_input(self, i: int, u: Tensor, window: slice) -> Tensor:
        """The right factor of a write to matrix i: ``features`` of u, less their mean where the rows of W have fixed
        sums; on phi* one-hot columns of the window's keys."""
        first, keys = self.params.initial[i].shape[-1], self.k.shape[-2]
        if self.rule.kernelised(i):
            return torch.eye(first + keys).to(u)[first:][window]
        return self.rule.retention.tangent(self.features(i, u))

    def apply(self, weights: list[Tensor]) -> Apply:
        """The function of (i, u) that gives W_i phi(u), or W_i u where matrix i is not feature-mapped."""
        return lambda i, u: self.features(i, u) @ weights[i].mT

    def moved(self, memory: list[Matrix], at_frozen: ForwardCache, curvature_bound: Tensor) -> Tensor | float:
        """By how much the window's errors differ from those at M_f: r_t (W_{t-1} - W_f) f_t (step.py)."""
        if not self.rule.online:
            return 0.0
        i, m = len(memory) - 1, memory[-1]
        changed = self.rule.optimiser.chunk_change(m.sums, m.weights, m.frozen)  # W_{t-1} - W_f; under Muon -D
        return curvature_bound[..., None] * (self.features(i, at_frozen.inputs[i]) @ changed.mT)

    def gradient(
        self, frozen: list[Tensor], at_frozen: ForwardCache, window: slice, gamma: Tensor, moved: Tensor | float
    ) -> list[Tensor]:
        """For each matrix the gradient, at M_f, of l = sum over window tokens j of
        gamma_j (bias(M(phi(k_j)), v_j) + <moved_j, pre-norm output of M(phi(k_j))>). The second term adds moved_j to
        the error at the pre-norm output. Autograd goes down to what a matrix puts out, z_j = W f_j; from there dl/dW =
        sum_j (dl/dz_j) f_j^T, since on phi* there is no W as such; it is zero where nothing of z_j reaches the loss
        (None)."""
        network, k, apply = self.rule.network, self.k[..., window, :], self.apply(frozen)
        with torch.enable_grad():
            # Zero, added to what each matrix puts out, to differentiate by.
            by = [w.new_zeros(*k.shape[:-1], w.shape[-2]).requires_grad_() for w in frozen]
            pre_norm = network.pre_norm(lambda i, u: apply(i, u) + by[i], k)
            prediction = network.end(k, pre_norm, self.params.norm)
            losses = self.rule.bias.value(prediction, self.v[..., window, :]) + (moved * pre_norm).sum(-1)
            to = torch.autograd.grad((gamma * losses).sum(), by, create_graph=True, allow_unused=True)
        f = (self.write_input(i, u, window) for i, u in enumerate(at_frozen.inputs))
        return [0.0 * w if d is None else d.mT @ x for d, x, w in zip(to, f, frozen, strict=True)]

    def along_key(self, i: int, at_frozen: ForwardCache, now: int) -> Callable[[Tensor], Tensor]:
        """The function W -> W f_t f_t^T, with f_t the input of matrix i at M_f for token t, whose place is ``now``."""
        u = at_frozen.inputs[i][..., -1:, :]
        return lambda w: (self.features(i, u) @ w.mT).mT @ self.write_input(i, u, slice(now, now + 1))

    def forget(self, memory: list[Matrix], now: int) -> list[Matrix]:
        """Clear on phi* the columns of tokens that are older than the horizon; without one all stay."""
        kept = torch.arange(self.k.shape[-2]).to(self.k) > now - (self.rule.features.horizon or now + 1)
        kept = torch.cat([kept.new_ones(self.k.shape[-1]), kept])  # M_0 stays
        return [m.map(lambda w: w * kept) if self.rule.kernelised(i) else m for i, m in enumerate(memory)]

    def old(self, i: int, m: Matrix) -> OldMatrix:
        """Matrix i as its retention wants it."""
        initial = self.params.initial[i]
        return OldMatrix(m.weights, m.frozen, m.dual, initial, *self.rule.decay_target(initial, m.weights))
