"""One chunk of the fast form: gradients in one batched pass at the frozen memory, the errors of tokens that see one
another's writes (live.py), then the primitive of fast_weight.py, matrix after matrix, for every query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .fast_weight import (
    Schedule,
    Seen,
    Steps,
    Tokens,
    add_product,
    identity_steps,
    join_channels,
    last_factors,
    last_momentum,
    scale,
    scale_rows,
    split_channels,
)
from .horizon import Recent
from .live import Pairs, before_each_token, solve, stood
from .muon_steps import cheapest_space, muon_steps, muon_steps_of_tokens
from .networks import Trace
from .optimisers import Muon
from .retention import NonLinearRetention
from .rules import Params, Rule
from .schedules import by_channel, schedules
from .windows import decay_matrix

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
    start, dual_start = retention.home(params.initial)
    lifted, shared = network.lifted, memory.frozen is None
    of_keys: dict[int, Tensor] = {}  # W_0 f, where the frozen memory is W_0
    of_queries: dict[int, Tensor] = {}  # from one product with the keys'
    seen: dict[int, Seen] = {}

    def apply_frozen(i: int, u: Tensor) -> Tensor:
        if lifted[i] and shared:
            of_keys[i], of_queries[i] = see(frozen[i])
            return of_keys[i]
        out = see_keys.apply(frozen[i]) if lifted[i] else u @ frozen[i].mT
        if shared:
            of_keys[i] = out
        return out

    trace = network.trace(apply_frozen, k, params.norm)

    def of_tokens(i: int) -> Seen:
        """How matrix i sees the window tokens; their kernel is computed once."""
        if i not in seen:
            f = trace.inputs[i]
            seen[i] = replace(see_keys if lifted[i] else _see(f, f), known=of_keys.get(i))
            seen[i] = replace(seen[i], kernel=_once(seen[i].kernel))
        return seen[i]

    def home_of(i: int) -> Tensor | None:
        """What matrix i fades to: on phi* M_0 is zero."""
        return start[i] if start is not None and (columns is None or not lifted[i]) else None

    def accumulator(i: int) -> Accumulator:
        return memory.dual[i] if memory.dual else frozen[i], None if dual_start is None else dual_start[i]

    error = network.body_error(trace, rule.bias.derivative(trace.prediction, chunk.v), params.norm)
    live = rule.live
    response = rule.response(trace, chunk.v, params) if live or rule.optimiser.bounded else None
    pairs = pairs_of(rule, chunk) if live and rule.window.size > 1 else None
    plans = schedules(rule, params, frozen, trace, response, chunk, first, pairs)
    updates: dict[int, Tensor] = {}  # where they solve a triangular system
    if live and response is not None:
        last = len(frozen) - 1
        of_last = of_tokens(last), home_of(last), accumulator(last)
        error, updates[last] = _live(
            rule, params, memory, last, trace, error, response, *of_last, chunk, plans[last], pairs
        )
    at_pairs = trace if pairs is None else replace(trace, hidden=tuple(map(pairs.of, trace.hidden)))
    deltas = network.back(frozen, at_pairs, error)
    ends: list[tuple[Tensor, ...]] = []
    momentum: list[Weights] = []
    recent: list[Recent | None] = []

    def apply_at_each_token(i: int, u: Tensor) -> Tensor:
        plan, home, w = plans[i], home_of(i), memory.weights[i]
        f, kernel = trace.inputs[i], partial(rule.features.kernel, sqrt_a=params.sqrt_a)
        queries = replace(see_queries, known=of_queries.get(i)) if lifted[i] else _see(u, f)
        tokens = Tokens(of_tokens(i), deltas[i], write, kernel)
        if not lifted[i]:
            tokens = replace(tokens, write=partial(_add, f), product=_times)
        if i in updates:
            tokens = replace(tokens, deltas=updates[i])
        elif rule.optimiser.erases:
            tokens = replace(tokens, deltas=_erasing(rule, memory, i, tokens, home, chunk, plan))
        if pairs is not None:
            tokens = replace(tokens, fold=pairs.fold)
            if not isinstance(rule.optimiser, Muon):
                near = queries.kernel
                queries = replace(queries, kernel=lambda: pairs.columns(near()))
        steps = _steps(rule, memory, i, w if home is None else w - home, tokens, plan)
        linear = partial(_after, steps, w, home)
        if rule.window.read == "frozen":
            out = queries.held(frozen[i])
        elif home is None:
            out = steps.read(queries)
        else:  # a memory that fades to M_0 is M_0 plus a memory that fades to zero
            from_home = queries.apply(home)
            out = steps.read(replace(queries, known=queries.held(w) - from_home)) + from_home
        if isinstance(retention, NonLinearRetention):
            initial = params.initial[i]
            out, *end = _settle(
                retention, initial, frozen[i], accumulator(i), linear, chunk, steps, queries, out, filled
            )
            ends.append(tuple(end))
        else:
            ends.append((linear(-1),))
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


def pairs_of(rule: Rule, chunk: Chunk) -> Pairs:
    """Of a window of more than one token."""
    b, size = chunk.theta.shape[-1], rule.window.size
    return Pairs(size, b, chunk.v.shape[-2] - b - size + 1)


def _live(
    rule: Rule,
    params: Params,
    memory: Memory,
    i: int,
    trace: Trace,
    error: Tensor,
    response: Tensor,
    inputs: Seen,
    home: Tensor | None,
    a: Accumulator,
    chunk: Chunk,
    plan: Schedule,
    pairs: Pairs | None,
) -> tuple[Tensor, Tensor]:
    """The errors at the body as the last matrix stands before each token, and that matrix's updates, of every pair;
    ``error`` and ``response`` are those of the window tokens at the frozen memory."""
    base, kernel, rate = error - response[..., None] * trace.body, inputs.kernel(), response
    if pairs is not None:
        base, kernel, rate = pairs.of(base), pairs.columns(pairs.of(kernel)), pairs.of(rate[..., None])[..., 0]
    w, s = memory.weights[i], memory.momentum[i] if memory.momentum else None
    if rule.optimiser.waits:  # what plain steps would have changed since the memory was frozen
        mixing, held, changed = plan.moving.plain, trace.body, inputs.apply(memory.momentum[len(memory.weights) + i])
        assert mixing is not None
        held, changed = (x if pairs is None else pairs.of(x) for x in (held, changed))
        kept = before_each_token(plan.retained[..., None], 1.0, pairs)[..., 0]
        errors = solve(base, rate[..., None, :], held - scale_rows(kept, changed), kernel, mixing, pairs)
        return errors, errors
    before = stood(inputs, w, s, home, plan, pairs)
    both = rate[..., None, :] + (_kept(rule, chunk) if rule.optimiser.erases else 0.0)
    retention = rule.retention
    if isinstance(retention, NonLinearRetention) and retention.lag:
        # The chunk's first token is exact, and those after it see that. Of its own updates all is known.
        assert inputs.features is not None  # a settling retention is not for phi*
        provisional = base + rate[..., None] * before
        tokens = Tokens(inputs, provisional, partial(_add, inputs.features), _times)
        tokens = tokens if pairs is None else replace(tokens, fold=pairs.fold)
        frozen = w if memory.frozen is None else memory.frozen[i]
        steps = identity_steps(w, s, tokens, plan)
        jump = _jump(retention, params.initial[i], frozen, a, _after(steps, w, home, 0), chunk, steps)
        fade = before_each_token(decay_matrix(by_channel(chunk.alpha))[..., :1], 0.0, pairs)[..., 0]
        moved = inputs.apply(jump)
        before = before + scale_rows(fade, moved if pairs is None else pairs.of(moved))
    updates = solve(base, both, before, kernel, plan.mixing(), pairs)
    if not rule.optimiser.erases:
        return updates, updates
    channels = both.shape[-2]
    answers = (split_channels(updates, channels) - split_channels(base, channels)) / both[..., None]
    return base + rate[..., None] * join_channels(answers), updates


def _erasing(
    rule: Rule, memory: Memory, i: int, tokens: Tokens, home: Tensor | None, chunk: Chunk, plan: Schedule
) -> Tensor:
    """The updates of a delta step: what W_{t-1} holds under each key besides the deltas."""
    before = stood(tokens.inputs, memory.weights[i], None, home, plan, None)
    return solve(tokens.deltas, _kept(rule, chunk), before, tokens.inputs.kernel(), plan.mixing(), None)


def _kept(rule: Rule, chunk: Chunk) -> Tensor:
    """How much of W_{t-1} a delta step takes its part out of ``[..., C, b]``."""
    alpha = by_channel(chunk.alpha)
    return alpha if getattr(rule.optimiser, "after_decay", False) else torch.ones_like(alpha)


def _momentum(
    rule: Rule, memory: Memory, i: int, chunk: Chunk, tokens: Tokens, plan: Schedule, filled: Where
) -> tuple[Weights, Recent | None]:
    """The sums of matrix i's momentum after the chunk: in matrices, and as sums over tokens."""
    if not rule.optimiser.has_momentum:
        return (), None
    sums = memory.momentum[i :: len(memory.weights)]
    recent = memory.recent[i] if memory.recent else None
    if recent is not None:  # from here on, no matrices
        carried, inside = plan.moving.carried[..., 0, -1], chunk.inside.any(-1)[..., 0]
        return sums, recent.after(last_factors(tokens, plan), carried, filled, inside)
    if len(sums) == 1:
        return (last_momentum(sums[0], tokens, plan),), None
    if plan.moving.plain is not None:  # the second is what plain steps would have changed
        s = last_momentum(sums[0], tokens, plan)
        if filled is True:
            return (s, torch.zeros_like(s)), None
        added = plan.moving.plain[..., 0, -1, :, None] * tokens.deltas
        changed = tokens.write(scale(plan.retained[..., -1], sums[1]), tokens.fold(added))
        return (s, _pick(filled, torch.zeros_like(s), changed)), None
    new, older = last_momentum(sums[1], tokens, plan), scale(plan.moving.carried[..., -1], sums[0])
    sums = _pick(filled, new, older), _pick(filled, torch.zeros_like(new), new)
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
            return muon_steps_of_tokens(w, recent.old, tokens, plan, rule.optimiser)
        horizon = rule.optimiser.horizon is not None
        return muon_steps(w, sums[0] + sums[1] if horizon else sums[0], tokens, plan, rule.optimiser)
    return identity_steps(w, sums[0] if sums else None, tokens, plan)


Accumulator = tuple[Tensor, Tensor | None]
"""A of one matrix at a chunk's start, and what it fades to."""


def _after(steps: Steps, start: Tensor, home: Tensor | None, row: int) -> Tensor:
    """What a memory that makes these steps from ``start``, and fades to ``home``, is after a token of the chunk."""
    return steps.weights(row, start) if home is None else steps.weights(row, start - home) + home


def _jump(
    retention: NonLinearRetention,
    initial: Tensor,
    frozen: Tensor,
    a: Accumulator,
    linear: Tensor,
    chunk: Chunk,
    steps: Steps,
) -> Tensor:
    """By how much the exact W_1 of a lag token differs from the ``linear`` one; zero where it was read before."""
    exact = retention.settle(_after(steps, *a, 0), frozen, initial)
    return torch.where(chunk.inside[..., 0, None, None], exact - linear, 0.0)


def _settle(
    retention: NonLinearRetention,
    initial: Tensor,
    frozen: Tensor,
    a: Accumulator,
    linear: Callable[[int], Tensor],
    chunk: Chunk,
    steps: Steps,
    queries: Seen,
    out: Tensor,
    filled: Where,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Non-linear retention of one matrix: outputs with the exact token's put right; W, the next frozen W, and A.
    ``linear`` gives the linear W after a token."""
    last, end = _after(steps, *a, -1), linear(-1)
    if retention.lag:
        # What the exact W_1 differs by from the linear form fades like all else.
        jump = _jump(retention, initial, frozen, a, linear(0), chunk, steps)
        fade = decay_matrix(by_channel(chunk.alpha))[..., 0]
        out = out + scale_rows(fade, queries.apply(jump))
        end = end + scale(fade[..., -1], jump)
    if filled is False:
        return out, end, frozen, last
    settled = retention.settle(last, frozen, initial)
    if not retention.lag:
        end = _pick(filled, settled, end)
        out = torch.cat([out[..., :-1, :], _pick(filled, queries.apply(settled)[..., -1:, :], out[..., -1:, :])], -2)
    return out, end, _pick(filled, settled, frozen), _pick(filled, retention.restart(last, settled), last)


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
    if not rule.features.endless:
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


def _once(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    found: list[Tensor] = []

    def kept() -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return kept


def _see(u: Tensor, f: Tensor) -> Seen:
    return Seen(u, partial(_times, u), u, lambda: u @ f.mT)


def _times(f: Tensor, w: Tensor) -> Tensor:
    return f @ w.mT


def _add(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
    return add_product(w, a.mT, f)


def _pick(filled: Where, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where ``filled``, for all rows or each ``[batch]``."""
    if isinstance(filled, bool):
        return new if filled else old
    return torch.where(filled[:, None, None, None], new, old)
