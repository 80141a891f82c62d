"""One chunk of the fast form: a pass of its window tokens through the frozen memory, their errors, and then matrix
after matrix what every query is answered and what the chunk leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..mathematics.gates import pick
from ..mathematics.networks import Norm, Sight, Trace
from ..mathematics.rules import Params, Rule
from .columns import Columns
from .counterparts import counterpart
from .errors import erasing, live_errors
from .fast_weight import Seen, Steps
from .lifting import Lift, add, seen
from .live import Pairs
from .muon_steps import waiting
from .parts import Chunk, Held, Part, Setting, Where
from .schedules import schedules
from .settling import linear, settle
from .spaces import DEFAULT, Spaces


def read_chunk(
    rule: Rule,
    params: Params,
    memory: Sequence[Held],
    chunk: Chunk,
    filled: Where,
    columns: Columns | None = None,
    spaces: Spaces = DEFAULT,
) -> tuple[Tensor, tuple[Held, ...]]:
    """Read one chunk.

    Args:
        filled: whether the chunk is read to its end, for all rows or each ``[batch]``.
        columns: for ``Exponential`` features; spaces: for Muon.

    Returns:
        y ``[..., b, dim]`` and the memory, with ``frozen`` and ``dual`` as the next chunk has them where filled.
    """
    network, several = rule.network, rule.live and rule.window.size > 1
    setting = Setting(rule, chunk, filled, pairs_of(rule, chunk) if several else None, spaces)
    k, q = chunk.kq.split([chunk.v.shape[-2], chunk.theta.shape[-1]], -2)
    lift = Lift.of(rule, params, chunk.kq, k, q, columns)
    trace, met = _at_frozen(rule, lift, memory, k, params.norm)
    error = network.body_error(trace, rule.bias.derivative(trace.prediction, chunk.v), params.norm)
    response = rule.response(trace, chunk.v, params) if rule.live or rule.optimiser.bounded else None
    frozen = tuple(held.start for held in memory)
    plans = schedules(rule, params, frozen, trace, response, chunk, setting.pairs)
    parts = []
    for i, (held, (keys, _), plan) in enumerate(zip(memory, met, plans, strict=True)):
        write = lift.write if network.lifted[i] else partial(add, keys.inputs)
        initial = params.initial[i]
        parts.append(Part(setting, held, initial, *rule.retention.home(initial), keys, write, plan))
    deltas = _updates(parts, trace, error, response)
    outputs: list[Tensor] = []
    after = []
    for i, (part, delta) in enumerate(zip(parts, deltas, strict=True)):
        u, queries = network.sees(i, q, outputs)[0], met[i][1]
        out, held = _read_matrix(part, seen(u, part.keys.inputs) if queries is None else queries, delta)
        outputs.append(out)
        after.append(held)
    return network.end(q, outputs[-1], params.norm), tuple(after)


def pairs_of(rule: Rule, chunk: Chunk) -> Pairs:
    """Of a window of more than one token."""
    b, size = chunk.theta.shape[-1], rule.window.size
    return Pairs(size, b, chunk.v.shape[-2] - b - size + 1)


def _updates(parts: Sequence[Part], trace: Trace, error: Tensor, response: Tensor | None) -> tuple[Tensor, ...]:
    """What each matrix writes under every token, or pair, from the errors at the body as the frozen memory makes them:
    the deltas, but for the last matrix under live errors, and for all where a step erases."""
    rule, pairs = parts[0].setting.rule, parts[0].setting.pairs
    last: tuple[Tensor, ...] = ()
    if rule.live and response is not None:
        error, updates = live_errors(parts[-1], trace, error, response)
        last = (updates,)
    if pairs is not None:
        trace = replace(trace, hidden=tuple(map(pairs.of, trace.hidden)))
    deltas = rule.network.back([part.held.start for part in parts], trace, error)
    deltas = deltas[: len(parts) - len(last)]
    if rule.optimiser.erases:
        deltas = tuple(erasing(part, d) for part, d in zip(parts, deltas, strict=False))
    return (*deltas, *last)


Met = tuple[Seen, Seen | None]
"""How a matrix sees the window tokens and, where it is lifted, the queries (others come from the matrices before)."""


def _at_frozen(rule: Rule, lift: Lift, memory: Sequence[Held], k: Tensor, norm: Norm | None) -> tuple[Trace, list[Met]]:
    """The pass of the window tokens through the frozen memory. Where that is the memory as it stands, what it answers
    is kept: it is needed again."""
    network = rule.network
    outputs: list[Tensor] = []
    sights: list[Sight] = []
    met: list[Met] = []
    for i, held in enumerate(memory):
        sight = network.sees(i, k, outputs, slopes=True)
        keys, queries = (lift.keys, lift.queries) if network.lifted[i] else (seen(sight[0], sight[0]), None)
        if held.frozen is not None:
            out = keys.apply(held.frozen)
        else:
            if queries is not None:
                keys, queries = lift.at(held.weights)
            out = keys.held(held.weights)
            keys = replace(keys, known=out)
        outputs.append(out)
        sights.append(sight)
        met.append((keys, queries))
    return network.traced(k, sights, outputs[-1], norm), met


def _read_matrix(part: Part, queries: Seen, deltas: Tensor) -> tuple[Tensor, Held]:
    """What one matrix answers to every query, and what it is after the chunk."""
    rule, filled, frozen = part.setting.rule, part.setting.filled, part.held.start
    tokens, of_optimiser = part.tokens(deltas), counterpart(rule)
    if part.setting.pairs is not None and not rule.optimiser.waits:  # what waits is summed over pairs before it is read
        near, columns = queries.kernel, part.setting.pairs.columns
        queries = replace(queries, kernel=lambda: columns(near()))
    steps = of_optimiser.steps(part, tokens)
    out = _answers(part, steps, queries)
    sums = of_optimiser.sums(part, tokens)
    if rule.retention.settles:
        out, weights, settled, dual = settle(part, steps, queries, out)
        held = Held(weights, settled, sums, dual)
    else:
        weights = linear(part, steps, -1)
        held = Held(weights, None if filled is True else pick(filled, weights, frozen), sums)
    if rule.optimiser.shows and rule.window.read != "frozen":
        out = out - waiting(part, tokens, queries)
    return out, held


def _answers(part: Part, steps: Steps, queries: Seen) -> Tensor:
    """W_t f for every query, or as ``Window.read`` says; exact tokens apart."""
    if part.setting.rule.window.read == "frozen":
        return queries.held(part.held.start)
    if part.home is None:
        return steps.read(queries)
    from_home = queries.apply(part.home)  # a memory that fades to M_0 is M_0 plus a memory that fades to zero
    return steps.read(replace(queries, known=queries.held(part.held.weights) - from_home)) + from_home
