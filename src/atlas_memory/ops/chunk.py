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
from ..rules.networks import ForwardCache, MatrixInput, Norm
from ..rules.rule import Params, Rule
from .chunk_context import Chunk, ChunkContext, Condition, MatrixContext, MatrixState
from .decay_masks import GateDecay, decay_masks
from .dispatch import chunk_form
from .fast_weight import ChunkSteps, Inputs, Updates, scale_rows
from .kernel_cache import KernelColumns
from .matrix_inputs import MappedInputs, add, centred, hidden_inputs
from .mirror_map import boundary_update, linear
from .muon_space import DEFAULT, MuonSpace
from .muon_steps import pending_answer
from .online_gradient import erasing, online_errors
from .triangular import WindowPairs


def read_chunk(
    rule: Rule,
    params: Params,
    memory: Sequence[MatrixState],
    chunk: Chunk,
    filled: Condition,
    columns: KernelColumns | None = None,
    muon_space: MuonSpace = DEFAULT,
    gate_decay: GateDecay | None = None,
) -> tuple[Tensor, tuple[MatrixState, ...]]:
    """Read one chunk: answer its queries, and write its tokens to the memory.

    Args:
        memory: the matrices before the chunk.
        filled: whether the chunk is read to its end, for all sequences or for each, ``[batch]``.
        columns: where the matrices have the keys' columns, for ``Exponential`` features.
        spaces: how Muon orthogonalises.
        fading: what ``GateDecay.of`` gives for the chunk, if it has been computed.

    Returns:
        y ``[..., b, dim]`` and the matrices after the chunk; where it is filled, with the ``frozen`` and ``dual`` with
        which the next chunk begins.
    """
    network, several = rule.network, rule.online and rule.window.size > 1
    context = ChunkContext(rule, chunk, filled, pairs_of(rule, chunk) if several else None, muon_space)
    k, q = chunk.kq.split([chunk.v.shape[-2], chunk.theta.shape[-1]], -2)
    mapped = MappedInputs.of(rule, params, chunk.kq, k, q, columns)
    cache, inputs_of = _at_frozen(rule, mapped, memory, k, params.norm)
    error = network.pre_norm_error(cache, rule.bias.derivative(cache.prediction, chunk.v), params.norm)
    curvature_bound = rule.curvature_bound(cache, chunk.v, params) if rule.online or rule.optimiser.normalised else None
    frozen = tuple(held.start for held in memory)
    all_masks = decay_masks(rule, params, frozen, cache, curvature_bound, chunk, context.pairs, gate_decay)
    parts = []
    for i, (held, (keys, _), masks) in enumerate(zip(memory, inputs_of, all_masks, strict=True)):
        write = mapped.write if network.feature_mapped[i] else partial(add, keys.written)
        initial = params.initial[i]
        parts.append(MatrixContext(context, held, initial, *rule.retention.decay_target(initial), keys, write, masks))
    written = _updates(parts, cache, error, curvature_bound)
    outputs: list[Tensor] = []
    after = []
    for i, (part, tokens) in enumerate(zip(parts, written, strict=True)):
        queries = inputs_of[i][1]
        if queries is None:
            queries = hidden_inputs(centred(rule, i, network.matrix_input(i, q, outputs)[0]), part.keys.written)
        out, held = _read_matrix(part, queries, tokens)
        outputs.append(out)
        after.append(held)
    return network.end(q, outputs[-1], params.norm), tuple(after)


def pairs_of(rule: Rule, chunk: Chunk) -> WindowPairs:
    """The pairs of a chunk whose windows have more than one token."""
    b, size = chunk.theta.shape[-1], rule.window.size
    return WindowPairs(size, b, chunk.v.shape[-2] - b - size + 1)


def _updates(
    parts: Sequence[MatrixContext], cache: ForwardCache, error: Tensor, curvature_bound: Tensor | None
) -> list[Updates]:
    """What is written to each matrix.

    The updates are the deltas, back-propagated from ``error``, the errors at the pre-norm output that the frozen memory
    makes, ``[..., N, dim]``. Two kinds of updates depend on what the chunk has written before, and solve a triangular
    system: those of the last matrix where errors are online, and those of every matrix where steps erase."""
    rule, pairs = parts[0].context.rule, parts[0].context.pairs
    back = partial(rule.network.back, [part.held.start for part in parts])
    last: list[Updates] = []
    if rule.online and curvature_bound is not None:
        error, updates = online_errors(parts[-1], cache, error, curvature_bound)
        last = [parts[-1].tokens(updates)]
    deltas = back(cache if pairs is None else replace(cache, hidden=tuple(map(pairs.of, cache.hidden))), error)
    earlier = list(zip(parts[: len(parts) - len(last)], deltas, strict=False))
    if rule.optimiser.erases:
        earlier = [(part, erasing(part, d)) for part, d in earlier]
    written = [part.tokens(d) for part, d in earlier]
    if pairs is not None:
        written = [_summed_first(tokens, i, partial(back, cache), error, pairs) for i, tokens in enumerate(written)]
    return written + last


def _summed_first(
    tokens: Updates, i: int, back: Callable[[Tensor], tuple[Tensor, ...]], error: Tensor, pairs: WindowPairs
) -> Updates:
    """The tokens of matrix i, whose updates ``back`` makes of the errors of pairs, with a ``summed`` that sums errors
    and sends the sums through ``back``, in place of summing updates. Errors are shorter than updates, and those of all
    pairs of one window token are back-propagated in the same way."""

    def summed(numbers: Tensor) -> Tensor:
        if numbers.shape[-2] > 1:  # the channels of this matrix are not those of the errors
            return tokens.summed(numbers)
        return back(pairs.fold(scale_rows(numbers, error)))[i]

    return replace(tokens, summed=summed)


KeyQueryInputs = tuple[Inputs, Inputs | None]
"""How a matrix sees the window tokens and, where it is feature-mapped, the queries. If it is not feature-mapped, None:
its queries are hidden units, and known only when the matrices before it have been read."""


def _at_frozen(
    rule: Rule, mapped: MappedInputs, memory: Sequence[MatrixState], k: Tensor, norm: Norm | None
) -> tuple[ForwardCache, list[KeyQueryInputs]]:
    """The pass of the window tokens, with keys k ``[..., N, dim]``, through the frozen memory, and how each matrix sees
    them. Where the frozen matrix is also the present one, ``Inputs.known`` keeps its answers, which are needed
    again."""
    network = rule.network
    outputs: list[Tensor] = []
    matrix_inputs: list[MatrixInput] = []
    inputs_of: list[KeyQueryInputs] = []
    for i, held in enumerate(memory):
        matrix_input = network.matrix_input(i, k, outputs, slopes=True)
        u = matrix_input[0]
        hidden = None if network.feature_mapped[i] else hidden_inputs(centred(rule, i, u), rule.retention.tangent(u))
        keys, queries = (mapped.keys, mapped.queries) if hidden is None else (hidden, None)
        if held.frozen is not None:
            out = keys.apply(held.frozen)
        else:
            if queries is not None:
                keys, queries = mapped.at(held.weights)
            out = keys.held(held.weights)
            keys = replace(keys, known=out)
        outputs.append(out)
        matrix_inputs.append(matrix_input)
        inputs_of.append((keys, queries))
    return network.make_cache(k, matrix_inputs, outputs[-1], norm), inputs_of


def _read_matrix(part: MatrixContext, queries: Inputs, tokens: Updates) -> tuple[Tensor, MatrixState]:
    """What one matrix puts out for every query, ``[..., b, rows]``, and what it is after the chunk, given what is
    written to it."""
    rule, filled, frozen = part.context.rule, part.context.filled, part.held.start
    of_optimiser = chunk_form(rule)
    if part.context.pairs is not None and not rule.optimiser.estimates_change:  # Muon sums pairs before it is read
        near, columns = queries.kernel, part.context.pairs.columns
        queries = replace(queries, kernel=lambda: columns(near()))
    steps = of_optimiser.steps(part, tokens)
    out = _answers(part, steps, queries)
    sums = of_optimiser.sums(part, tokens)
    if rule.retention.has_mirror_map:
        answers, weights, mirrored, dual = boundary_update(part, steps, queries, out)
        out = out if rule.window.read == "frozen" else answers
        held = MatrixState(weights, mirrored, sums, dual)
    else:
        weights = linear(part, steps, -1)
        held = MatrixState(weights, None if filled is True else pick(filled, weights, frozen), sums)
    if rule.optimiser.read_pending and rule.window.read != "frozen":
        out = out - pending_answer(part, tokens, queries)
    return out, held


def _answers(part: MatrixContext, steps: ChunkSteps, queries: Inputs) -> Tensor:
    """W f for the input f of every query, ``[..., b, rows]``, with the W that ``Window.read`` names, and as if the
    retention were linear at all tokens (mirror_map.py puts the token of the chunk-boundary update right)."""
    if part.context.rule.window.read == "frozen":
        return queries.held(part.held.start)
    if part.decay_target is None:
        return steps.read(queries)
    from_home = queries.apply(part.decay_target)  # a memory that decays to M_0 is M_0 plus a memory that decays to zero
    return steps.read(replace(queries, known=queries.held(part.held.weights) - from_home)) + from_home
