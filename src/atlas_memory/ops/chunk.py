"""One chunk of the fast form, in three parts. The chunk's window tokens pass through the frozen memory. From what it
answers follow their errors, and the update that each token writes to each matrix. Then one matrix after another
answers the queries, each query with the updates that are in the matrix by then, and is left as it is after the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..rules.gates import pick
from ..rules.networks import Sight, Trace
from ..rules.norms import Norm
from ..rules.rule import Params, Rule
from .chunk_context import Chunk, Held, Part, Setting, Where
from .decay_masks import Fading, schedules
from .dispatch import counterpart
from .fast_weight import Seen, Steps, Tokens, scale_rows
from .kernel_cache import Columns
from .matrix_inputs import Lift, add, given, see_hidden
from .mirror_map import linear, settle
from .muon_space import DEFAULT, Spaces
from .muon_steps import waiting
from .online_gradient import erasing, live_errors
from .triangular import Pairs


def read_chunk(
    rule: Rule,
    params: Params,
    memory: Sequence[Held],
    chunk: Chunk,
    filled: Where,
    columns: Columns | None = None,
    spaces: Spaces = DEFAULT,
    fading: Fading | None = None,
) -> tuple[Tensor, tuple[Held, ...]]:
    """Read one chunk: answer its queries, and write its tokens to the memory.

    Args:
        memory: the matrices before the chunk.
        filled: whether the chunk is read to its end, for all sequences or for each, ``[batch]``.
        columns: where the matrices have the keys' columns, for ``Exponential`` features.
        spaces: how Muon orthogonalises.
        fading: what ``Fading.of`` gives for the chunk, if it has been computed.

    Returns:
        y ``[..., b, dim]`` and the matrices after the chunk; where it is filled, with the ``frozen`` and ``dual`` with
        which the next chunk begins.
    """
    network, several = rule.network, rule.live and rule.window.size > 1
    setting = Setting(rule, chunk, filled, pairs_of(rule, chunk) if several else None, spaces)
    k, q = chunk.kq.split([chunk.v.shape[-2], chunk.theta.shape[-1]], -2)
    lift = Lift.of(rule, params, chunk.kq, k, q, columns)
    trace, met = _at_frozen(rule, lift, memory, k, params.norm)
    error = network.body_error(trace, rule.bias.derivative(trace.prediction, chunk.v), params.norm)
    response = rule.response(trace, chunk.v, params) if rule.live or rule.optimiser.bounded else None
    frozen = tuple(held.start for held in memory)
    plans = schedules(rule, params, frozen, trace, response, chunk, setting.pairs, fading)
    parts = []
    for i, (held, (keys, _), plan) in enumerate(zip(memory, met, plans, strict=True)):
        write = lift.write if network.lifted[i] else partial(add, keys.written)
        initial = params.initial[i]
        parts.append(Part(setting, held, initial, *rule.retention.home(initial), keys, write, plan))
    written = _updates(parts, trace, error, response)
    outputs: list[Tensor] = []
    after = []
    for i, (part, tokens) in enumerate(zip(parts, written, strict=True)):
        queries = met[i][1]
        if queries is None:
            queries = see_hidden(given(rule, i, network.sees(i, q, outputs)[0]), part.keys.written)
        out, held = _read_matrix(part, queries, tokens)
        outputs.append(out)
        after.append(held)
    return network.end(q, outputs[-1], params.norm), tuple(after)


def pairs_of(rule: Rule, chunk: Chunk) -> Pairs:
    """The pairs of a chunk whose windows have more than one token."""
    b, size = chunk.theta.shape[-1], rule.window.size
    return Pairs(size, b, chunk.v.shape[-2] - b - size + 1)


def _updates(parts: Sequence[Part], trace: Trace, error: Tensor, response: Tensor | None) -> list[Tokens]:
    """What is written to each matrix.

    The updates are the deltas, back-propagated from ``error``, the errors at the body that the frozen memory makes,
    ``[..., N, dim]``. Two kinds of updates depend on what the chunk has written before, and solve a triangular system:
    those of the last matrix where errors are live, and those of every matrix where steps erase."""
    rule, pairs = parts[0].setting.rule, parts[0].setting.pairs
    back = partial(rule.network.back, [part.held.start for part in parts])
    last: list[Tokens] = []
    if rule.live and response is not None:
        error, updates = live_errors(parts[-1], trace, error, response)
        last = [parts[-1].tokens(updates)]
    deltas = back(trace if pairs is None else replace(trace, hidden=tuple(map(pairs.of, trace.hidden))), error)
    earlier = list(zip(parts[: len(parts) - len(last)], deltas, strict=False))
    if rule.optimiser.erases:
        earlier = [(part, erasing(part, d)) for part, d in earlier]
    written = [part.tokens(d) for part, d in earlier]
    if pairs is not None:
        written = [_summed_first(tokens, i, partial(back, trace), error, pairs) for i, tokens in enumerate(written)]
    return written + last


def _summed_first(
    tokens: Tokens, i: int, back: Callable[[Tensor], tuple[Tensor, ...]], error: Tensor, pairs: Pairs
) -> Tokens:
    """The tokens of matrix i, whose updates ``back`` makes of the errors of pairs, with a ``summed`` that sums errors
    and sends the sums through ``back``, in place of summing updates. Errors are shorter than updates, and those of all
    pairs of one window token are back-propagated in the same way."""

    def summed(numbers: Tensor) -> Tensor:
        if numbers.shape[-2] > 1:  # the channels of this matrix are not those of the errors
            return tokens.summed(numbers)
        return back(pairs.fold(scale_rows(numbers, error)))[i]

    return replace(tokens, summed=summed)


Met = tuple[Seen, Seen | None]
"""How a matrix sees the window tokens and, where it is lifted, the queries. If it is not lifted, None: its queries are
hidden units, and known only when the matrices before it have been read."""


def _at_frozen(rule: Rule, lift: Lift, memory: Sequence[Held], k: Tensor, norm: Norm | None) -> tuple[Trace, list[Met]]:
    """The pass of the window tokens, with keys k ``[..., N, dim]``, through the frozen memory, and how each matrix sees
    them. Where the frozen matrix is also the present one, ``Seen.known`` keeps its answers, which are needed again."""
    network = rule.network
    outputs: list[Tensor] = []
    sights: list[Sight] = []
    met: list[Met] = []
    for i, held in enumerate(memory):
        sight = network.sees(i, k, outputs, slopes=True)
        u = sight[0]
        hidden = None if network.lifted[i] else see_hidden(given(rule, i, u), rule.retention.tangent(u))
        keys, queries = (lift.keys, lift.queries) if hidden is None else (hidden, None)
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


def _read_matrix(part: Part, queries: Seen, tokens: Tokens) -> tuple[Tensor, Held]:
    """What one matrix puts out for every query, ``[..., b, rows]``, and what it is after the chunk, given what is
    written to it."""
    rule, filled, frozen = part.setting.rule, part.setting.filled, part.held.start
    of_optimiser = counterpart(rule)
    if part.setting.pairs is not None and not rule.optimiser.waits:  # Muon sums pairs before it is read
        near, columns = queries.kernel, part.setting.pairs.columns
        queries = replace(queries, kernel=lambda: columns(near()))
    steps = of_optimiser.steps(part, tokens)
    out = _answers(part, steps, queries)
    sums = of_optimiser.sums(part, tokens)
    if rule.retention.settles:
        answers, weights, settled, dual = settle(part, steps, queries, out)
        out = out if rule.window.read == "frozen" else answers
        held = Held(weights, settled, sums, dual)
    else:
        weights = linear(part, steps, -1)
        held = Held(weights, None if filled is True else pick(filled, weights, frozen), sums)
    if rule.optimiser.shows and rule.window.read != "frozen":
        out = out - waiting(part, tokens, queries)
    return out, held


def _answers(part: Part, steps: Steps, queries: Seen) -> Tensor:
    """W f for the input f of every query, ``[..., b, rows]``, with the W that ``Window.read`` names, and as if the
    retention were linear at all tokens (mirror_map.py puts the exact token right)."""
    if part.setting.rule.window.read == "frozen":
        return queries.held(part.held.start)
    if part.home is None:
        return steps.read(queries)
    from_home = queries.apply(part.home)  # a memory that fades to M_0 is M_0 plus a memory that fades to zero
    return steps.read(replace(queries, known=queries.held(part.held.weights) - from_home)) + from_home
