"""One chunk of the fast form: gradients in one batched pass at the frozen memory, then the primitive of fast_weight.py,
matrix after matrix, for every query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .fast_weight import (
    Inertia,
    Schedule,
    Seen,
    Steps,
    Tokens,
    add_product,
    delta_steps,
    identity_steps,
    last_factors,
    last_momentum,
    rows_at,
    scale,
    scale_rows,
    step_tokens,
)
from .features import Exponential
from .horizon import Recent
from .muon_steps import cheapest_space, muon_steps, muon_steps_of_tokens
from .networks import Trace
from .optimisers import DeltaGradientDescent, Muon
from .retention import NonLinearRetention
from .rules import Params, Rule
from .windows import EVERYTHING, decay_matrix

Weights = tuple[Tensor, ...]


class Memory(NamedTuple):
    """What a chunk begins and ends with; see ``MemoryState``. ``frozen`` is None where it equals ``weights``, as at
    the start of every chunk under a linear retention. Where ``recent`` is not empty, it has the momentum of the
    matrices that are stepped in token space, and ``momentum`` only that of sequences that had ended before."""

    frozen: Weights | None
    weights: Weights
    momentum: Weights
    dual: Weights
    recent: tuple[Recent | None, ...] = ()

    def map(self, fn: Callable[[Weights], Weights]) -> Memory:
        """The same with ``fn`` applied to each of the four, one tensor a matrix in each."""
        frozen = None if self.frozen is None else fn(self.frozen)
        return Memory(frozen, fn(self.weights), fn(self.momentum), fn(self.dual), self.recent)


class Chunk(NamedTuple):
    """One chunk of b tokens and its N = b + c - 1 window tokens; leading dimensions ``[batch, heads]``.

    Attributes:
        kq: the window tokens' keys, then the queries, ``[..., N + b, dim]``; v: ``[..., N, dim]``.
        window: Gamma ``[..., b, N]``; where the window is one token its diagonal, gamma ``[..., b]``.
        alpha, eta: ``[..., b]`` or channel-wise ``[..., b, dim]``, 1 and 0 where there is no token.
        theta: ``[..., b]``.
        inside: which slots are tokens of this call, bool ``[batch or 1, 1, b]``.
    """

    kq: Tensor
    v: Tensor
    window: Tensor
    alpha: Tensor
    theta: Tensor
    eta: Tensor
    inside: Tensor


@dataclass(frozen=True)
class Columns:
    """Where matrices on phi* stand: the keys ``[batch, heads, n, dim]`` of all columns, how many of these can be other
    than zero yet, and the window tokens' columns ``[batch or 1, N]``."""

    keys: Tensor
    filled: int
    window: Tensor


Where = Tensor | bool


def read_chunk(
    rule: Rule, params: Params, memory: Memory, chunk: Chunk, first: Tensor, filled: Where, columns: Columns | None
) -> tuple[Tensor, Memory]:
    """Read one chunk.

    Args:
        first: ``[batch]`` int64, where the chunk starts in its sequence.
        filled: whether the chunk is read to its end, for all rows or each ``[batch]``.
        columns: for ``Exponential`` features.

    Returns:
        y ``[..., b, dim]`` and the memory, with ``frozen`` and ``dual`` as the next chunk has them where filled.
    """
    network, retention = rule.network, rule.retention
    k, q = chunk.kq.split([chunk.v.shape[-2], chunk.theta.shape[-1]], -2)
    see, see_keys, see_queries, write = _lift(rule, params, chunk.kq, k, q, columns)
    frozen = memory.weights if memory.frozen is None else memory.frozen
    start = retention.start(params.initial)
    lifted, shared = network.lifted, memory.frozen is None and start is None
    of_keys: dict[int, Tensor] = {}  # W_0 f, where the frozen memory is W_0
    of_queries: dict[int, Tensor] = {}  # from one product with the keys'

    def apply_frozen(i: int, u: Tensor) -> Tensor:
        if lifted[i] and shared:
            of_keys[i], of_queries[i] = see(frozen[i])
            return of_keys[i]
        out = see_keys.apply(frozen[i]) if lifted[i] else u @ frozen[i].mT
        if shared:
            of_keys[i] = out
        return out

    trace = network.trace(apply_frozen, k, params.norm)
    deltas = network.deltas(frozen, trace, rule.bias.derivative(trace.prediction, chunk.v), params.norm)
    plan = _schedule(rule, params, frozen, trace, chunk, first)
    ends: list[tuple[Tensor, ...]] = []
    momentum: list[Weights] = []
    recent: list[Recent | None] = []

    def apply_at_each_token(i: int, u: Tensor) -> Tensor:
        if lifted[i]:
            kernel = partial(rule.features.kernel, sqrt_a=params.sqrt_a)
            tokens = Tokens(replace(see_keys, known=of_keys.get(i)), deltas[i], write, kernel)
            queries = replace(see_queries, known=of_queries.get(i))
        else:
            f = trace.inputs[i]
            tokens = Tokens(replace(_see(f, f), known=of_keys.get(i)), deltas[i], partial(_add, f), _times)
            queries = _see(u, f)
        w = memory.weights[i]
        # A memory that fades to M_0 is M_0 plus a memory that fades to zero; on phi* M_0 is zero.
        home = start[i] if start is not None and (columns is None or not lifted[i]) else None
        if home is not None:
            w = w - home
            if isinstance(rule.optimiser, DeltaGradientDescent):  # it also takes out what home holds under the key
                held = tokens.inputs.apply(home)
                held = scale_rows(_by_channel(chunk.alpha), held) if rule.optimiser.after_decay else held
                tokens = replace(tokens, deltas=tokens.deltas + held)
        steps = _steps(rule, memory, i, w, tokens, plan)
        end = steps.weights(-1, w) if home is None else steps.weights(-1, w) + home
        if rule.window.read == "frozen":
            out = queries.held(frozen[i])
        else:
            out = steps.read(queries) if home is None else steps.read(queries) + queries.apply(home)
        if isinstance(retention, NonLinearRetention):
            initial = params.initial[i]
            out, end, *next_chunk = _settle(
                retention, initial, frozen[i], memory, i, chunk, plan, steps, queries, out, filled
            )
            ends.append((end, *next_chunk))
        else:
            ends.append((end,))
        sums, next_recent = _momentum(rule, memory, i, chunk, tokens, plan, filled)
        momentum.append(sums)
        recent.append(next_recent)
        return out

    y = network.forward(apply_at_each_token, q, params.norm)
    weights, *others = zip(*ends, strict=True)
    sums = tuple(m for part in zip(*momentum, strict=True) for m in part)
    in_tokens = tuple(recent) if any(part is not None for part in recent) else ()
    if isinstance(retention, NonLinearRetention):
        return y, Memory(others[0], weights, sums, others[1], in_tokens)
    if isinstance(filled, Tensor):
        picked = tuple(_pick(filled, new, old) for new, old in zip(weights, frozen, strict=True))
        return y, Memory(picked, weights, sums, (), in_tokens)
    return y, Memory(None if filled else frozen, weights, sums, (), in_tokens)


def _momentum(
    rule: Rule, memory: Memory, i: int, chunk: Chunk, tokens: Tokens, plan: Schedule, filled: Where
) -> tuple[Weights, Recent | None]:
    """The sums of matrix i's momentum after the chunk: in matrices, and as sums over tokens."""
    *old, new = memory.momentum[i :: len(memory.weights)] or (None,)
    if new is None:
        return (), None
    recent = memory.recent[i] if memory.recent else None
    if recent is not None:  # from here on, no matrices
        carried, inside = plan.moving.carried[..., 0, -1], chunk.inside.any(-1)[..., 0]
        return (*old, new), recent.after(last_factors(tokens, plan), carried, filled, inside)
    new = last_momentum(new, tokens, plan)
    if not old:
        return (new,), None
    sums = _pick(filled, new, scale(plan.moving.carried[..., -1], old[0])), _pick(filled, torch.zeros_like(new), new)
    in_tokens = len(memory.recent) == 0 and takes_token_space(rule, *new.shape[-2:])
    if not in_tokens:
        return sums, None
    goes_on = 0.0 if filled is False else 1.0 if filled is True else filled[:, None, None, None].to(new)
    return sums, Recent(last_factors(tokens, plan).times(goes_on))


def takes_token_space(rule: Rule, rows: int, columns: int) -> bool:
    """Whether a matrix is stepped in token space wherever its momentum is known as a sum over tokens."""
    if not isinstance(rule.optimiser, Muon) or rule.optimiser.horizon is None:
        return False
    chunk, window = rule.window.chunk, rule.window.chunk + rule.window.size - 1
    taken, steps = -(-chunk // rule.every), rule.optimiser.steps
    return cheapest_space(rows, columns, taken, window, chunk, steps, rule.every, horizon=True) == "tokens"


def _steps(rule: Rule, memory: Memory, i: int, w: Tensor, tokens: Tokens, plan: Schedule) -> Steps:
    sums = memory.momentum[i :: len(memory.weights)]
    recent = memory.recent[i] if memory.recent else None
    if isinstance(rule.optimiser, Muon):
        if recent is not None:
            return muon_steps_of_tokens(w, recent.old, tokens, plan, rule.optimiser.steps)
        return muon_steps(w, sums[0] + sums[1] if len(sums) == 2 else sums[0], tokens, plan, rule.optimiser.steps)
    s = sums[0] if sums else None
    if isinstance(rule.optimiser, DeltaGradientDescent):
        return delta_steps(w, tokens, plan, rule.optimiser.after_decay)
    return identity_steps(w, s, tokens, plan)


def _settle(
    retention: NonLinearRetention,
    initial: Tensor,
    frozen: Tensor,
    memory: Memory,
    i: int,
    chunk: Chunk,
    plan: Schedule,
    steps: Steps,
    queries: Seen,
    out: Tensor,
    filled: Where,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Non-linear retention of matrix i: outputs with the exact token's put right; W, the next frozen W, and A."""
    end, a = (steps.weights(-1, x[i]) for x in (memory.weights, memory.dual))
    if retention.lag:
        # W_1 is exact. What it differs by from the linear form fades like all else.
        linear = steps.weights(0, memory.weights[i])
        exact = retention.settle(steps.weights(0, memory.dual[i]), frozen, initial)
        jump = torch.where(chunk.inside[..., 0, None, None], exact - linear, 0.0)
        fade = decay_matrix(_by_channel(chunk.alpha))[..., 0]
        out = out + scale_rows(fade, queries.apply(jump))
        end = end + scale(fade[..., -1], jump)
    if filled is False:
        return out, end, frozen, a
    settled = retention.settle(a, frozen, initial)
    if not retention.lag:
        end = _pick(filled, settled, end)
        out = torch.cat([out[..., :-1, :], _pick(filled, queries.apply(settled)[..., -1:, :], out[..., -1:, :])], -2)
    return out, end, _pick(filled, settled, frozen), _pick(filled, retention.restart(a, settled), a)


def _schedule(rule: Rule, params: Params, frozen: Weights, trace: Trace, chunk: Chunk, first: Tensor) -> Schedule:
    """All scalars of a chunk."""
    curvature = reach = torch.zeros_like(chunk.theta)
    single = chunk.window.dim() == chunk.theta.dim()
    if rule.optimiser.bounded:
        stiffness = rule.stiffness(frozen, trace, chunk.v, params)
        curvature, reach = (
            chunk.window * x if single else (chunk.window @ x[..., None]).squeeze(-1) for x in stiffness
        )
    rates = rule.optimiser.rates(chunk.theta, chunk.eta, curvature, reach, rule.window.chunk)
    alpha, theta, apply, write = (_by_channel(x) for x in (chunk.alpha, rates.theta, rates.apply, rates.write))
    applied = torch.where(chunk.inside[..., None, :], apply, 0.0)[..., None, :]
    at, valid = step_tokens(first, rule.every, rule.window.chunk)
    alike = at if isinstance(at, slice) else EVERYTHING
    fading = decay_matrix(alpha, columns=alike)
    decay = fading * applied[..., alike]
    retained = _from_start(alpha, fading)
    weights = write * chunk.window[..., None, :] if single else write[..., None] * chunk.window[..., None, :, :]
    inertia = None
    if rule.optimiser.has_momentum:
        fading = decay_matrix(theta, rows=alike)
        weights = fading * weights[..., None, :] if single else fading @ weights  # P
        carried, last = _from_start(theta, fading), weights[..., -1, :]
        at_steps = carried[..., alike]
        if not isinstance(at, slice):  # steps fall on other tokens in every chunk; only Muon has such
            steps = rows_at(decay.mT, at)
            decay = (steps if valid is None else steps * valid[:, None, None, :, None]).mT
            weights, at_steps = rows_at(weights, at), rows_at(carried[..., None], at)[..., 0]
        inertia = Inertia(carried, at_steps, last)
    return Schedule(retained, decay, weights, rule.every, rule.window.read == "before", inertia)


def _from_start(factor: Tensor, fading: Tensor) -> Tensor:
    """factor_1 * ... * factor_t ``[..., b]``, with the decay matrix at hand where it is whole."""
    whole = fading.shape[-2] == fading.shape[-1]
    return factor[..., :1] * fading[..., 0] if whole else factor.cumprod(-1)


Both = Callable[[Tensor], tuple[Tensor, Tensor]]


def _lift(
    rule: Rule, params: Params, kq: Tensor, k: Tensor, q: Tensor, columns: Columns | None
) -> tuple[Both, Seen, Seen, Callable[[Tensor, Tensor], Tensor]]:
    """How lifted matrices see the window tokens and the queries, both at once or each, and how they are written."""
    kernel = partial(rule.features.kernel, sqrt_a=params.sqrt_a)
    kernels: dict[str, Tensor] = {}  # shared by all lifted matrices
    sizes = [k.shape[-2], q.shape[-2]]

    def once(name: str, x: Tensor, y: Tensor) -> Tensor:
        if name not in kernels:
            kernels[name] = kernel(x, y)
        return kernels[name]

    to_keys = (partial(once, "kk", k, k), partial(once, "qk", q, k))
    if not isinstance(rule.features, Exponential):
        phi = rule.features.expand(kq, params.sqrt_a)
        phi_k, phi_q = phi.split(sizes, -2)
        keys, queries = map(Seen, (k, q), (partial(_times, phi_k), partial(_times, phi_q)), (phi_k, phi_q), to_keys)

        def apply(w: Tensor) -> tuple[Tensor, Tensor]:
            of_keys, of_queries = _times(phi, w).split(sizes, -2)
            return of_keys, of_queries

        return apply, keys, queries, partial(_add, phi_k)
    assert columns is not None
    known = columns.keys[..., : columns.filled, :]
    against = kernel(kq, known)

    def see(w: Tensor) -> tuple[Tensor, Tensor]:
        of_keys, of_queries = _times(against, w[..., : columns.filled]).split(sizes, -2)
        return of_keys, of_queries

    def write(w: Tensor, a: Tensor) -> Tensor:
        return w.scatter_add(-1, columns.window[:, None, None].expand(*w.shape[:-1], -1), a.mT)

    keys, queries = (
        Seen(u, lambda w, f=f: _times(f, w[..., : columns.filled]), None, to)  # type: ignore[misc]
        for u, f, to in zip((k, q), against.split(sizes, -2), to_keys, strict=True)
    )
    return see, keys, queries, write


def _see(u: Tensor, f: Tensor) -> Seen:
    return Seen(u, partial(_times, u), u, lambda: u @ f.mT)


def _times(f: Tensor, w: Tensor) -> Tensor:
    return f @ w.mT


def _add(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return add_product(w, a.mT, f)


def _by_channel(gate: Tensor) -> Tensor:
    """``[..., b]`` or ``[..., b, dim]`` -> ``[..., C, b]``."""
    return gate.mT if gate.dim() == 4 else gate[..., None, :]


def _pick(filled: Where, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where ``filled``, for all rows or each ``[batch]``."""
    if isinstance(filled, bool):
        return new if filled else old
    return torch.where(filled[:, None, None, None], new, old)
