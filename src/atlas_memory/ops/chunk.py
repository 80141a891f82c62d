"""One chunk, in three parts. The chunk's window tokens pass through the frozen memory. From what it answers follow
their errors, and the update that each token writes to each matrix. Then one matrix after another answers the queries,
each query with the updates that are in the matrix by then, and is left as it is after the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..rules.gates import pick
from ..rules.networks import ForwardCache, MatrixInput
from ..rules.rule import Rule
from .chunk_context import Chunk, ChunkContext, ChunkParams, Condition, Inputs, MatrixContext, MatrixState
from .decay_masks import DecayMasks, GateDecay, over_window, reads_pending
from .dispatch import chunk_form
from .kernel_cache import KernelColumns
from .matrix_inputs import ChunkConstants, hidden_keys, hidden_queries
from .mirror_map import boundary_update, jump
from .muon_space import DEFAULT, MuonSpace
from .muon_steps import pending_answer
from .online_gradient import erasing, online_errors
from .plain_steps import PlainSteps
from .triangular import WindowPairs


def read_chunk(
    rule: Rule,
    params: ChunkParams,
    memory: Sequence[MatrixState],
    chunk: Chunk,
    filled: Condition,
    constants: ChunkConstants | None = None,
    pairs: WindowPairs | None = None,
    columns: KernelColumns | None = None,
    muon_space: MuonSpace = DEFAULT,
) -> tuple[Tensor, tuple[MatrixState, ...]]:
    """Read one chunk: answer its queries, and write its tokens to the memory.

    Args:
        memory: the matrices before the chunk.
        filled: whether the chunk is read to its end, for all sequences or for each, ``[n]``.
        constants, pairs: what ``ChunkConstants.of`` and ``pairs_of`` give for the chunk, if they have been computed.
        columns: where the matrices have the keys' columns, for ``Exponential`` features.
        muon_space: how Muon orthogonalises.

    Returns:
        y ``[n, b, dim]`` and the matrices after the chunk; where it is filled, with the ``frozen`` and ``dual`` with
        which the next chunk begins.
    """
    network, norm = rule.network, params.params.norm
    if constants is None:
        pairs = pairs_of(rule, chunk)
        constants = ChunkConstants.of(rule, params, chunk, pairs)
    if constants.keys is None:
        constants = constants.with_inputs(rule, params, chunk, pairs, columns)
    context = ChunkContext(rule, rule.online, chunk, filled, pairs, muon_space)
    mapped, last = network.feature_mapped, len(memory) - 1
    outputs: list[Tensor] = []
    inputs: list[MatrixInput] = []
    parts = []
    for i, state in enumerate(memory):
        inputs.append(network.matrix_input(i, chunk.k, outputs, slopes=True))
        if mapped[i]:
            keys = _of_features(constants.keys, constants.targets[i][0])
        else:
            keys = hidden_keys(context, inputs[i][0], i == last)
        outputs.append(keys.apply(state.start))
        keys = keys._replace(known=outputs[i]) if state.frozen is None else keys
        parts.append(MatrixContext(context, state, params.params.initial[i], *params.targets[i], keys))
    cache = network.make_cache(chunk.k, inputs, outputs[-1], norm)
    masks, parts, updates = _updates(params, parts, constants, cache)
    outputs, after = [], []
    for i, part in enumerate(parts):
        if mapped[i]:
            queries = _of_features(constants.queries, constants.targets[i][1])
        else:
            u = network.matrix_input(i, chunk.q, outputs)[0]
            queries = hidden_queries(context, u, i == last, part.keys)
        out, state = _read_matrix(part, constants.decay, masks[i], updates[i], queries)
        outputs.append(out)
        after.append(state)
    return network.end(chunk.q, outputs[-1], norm), tuple(after)


def pairs_of(rule: Rule, chunk: Chunk) -> WindowPairs | None:
    """The pairs of a chunk, where errors are online and windows have more than one token."""
    if rule.window.size == 1 or not rule.online:
        return None
    b = chunk.theta.shape[-1]
    return WindowPairs.make(rule.window.size, b, chunk.v.shape[-2] - b - rule.window.size + 1, chunk.v)


def _of_features(inputs: Inputs | None, at_target: Tensor | None) -> Inputs:
    assert inputs is not None
    return inputs if at_target is None else inputs._replace(at_target=at_target)


def _updates(
    params: ChunkParams, parts: list[MatrixContext], constants: ChunkConstants, cache: ForwardCache
) -> tuple[list[DecayMasks], list[MatrixContext], list[Tensor]]:
    """The masks of every matrix, the matrices' contexts, and their updates ``[n, U, rows]``: the errors at the pre-norm
    output that the frozen memory makes, back-propagated. Two kinds of updates depend on what the chunk has written
    before, and solve a triangular system: those of the last matrix where errors are online, and those of every matrix
    where steps erase."""
    context, decay = parts[0].context, constants.decay
    rule, chunk, pairs = context.rule, context.chunk, context.pairs
    network, frozen = rule.network, [part.state.start for part in parts]
    derivative = rule.bias.derivative(cache.prediction, chunk.v)
    error = network.pre_norm_error(cache, derivative, params.params.norm)
    rate = rule.curvature_bound(cache, chunk.v, params.params) if context.online or rule.optimiser.normalised else None
    if rule.optimiser.normalised and rate is not None:
        sizes = rule.step_normalisers(frozen, cache, rate, params.params, constants.lengths)
        masks = [DecayMasks.of(context, decay, over_window(constants.window, size)) for size in sizes]
    else:
        masks = [DecayMasks.of(context, decay, None)] * len(parts)
    last: list[Tensor] = []
    if context.online and rate is not None:
        error, updates = online_errors(parts[-1], decay, masks[-1], cache, error, rate)
        last = [updates]
    earlier = len(parts) - len(last)
    if not earlier:
        return masks, parts, last
    at_updates = cache if pairs is None else replace(cache, hidden=tuple(map(pairs.of, cache.hidden)))
    deltas = list(network.back(frozen, at_updates, error)[:earlier])
    if rule.optimiser.erases:
        deltas = [erasing(*each) for each in zip(parts, [decay] * earlier, masks, deltas, strict=False)]
    if pairs is not None:
        for i in range(earlier):
            parts[i] = parts[i]._replace(errors=error, back=partial(_back, rule, frozen, cache, i))
    return masks, parts, deltas + last


def _back(rule: Rule, frozen: list[Tensor], cache: ForwardCache, i: int, error: Tensor) -> Tensor:
    return rule.network.back(frozen, cache, error)[i]


def _read_matrix(
    part: MatrixContext, decay: GateDecay, masks: DecayMasks, updates: Tensor, queries: Inputs
) -> tuple[Tensor, MatrixState]:
    """What one matrix puts out for every query, ``[n, b, rows]``, and what it is after the chunk."""
    rule, filled, state = part.context.rule, part.context.filled, part.state
    steps = chunk_form(rule)(part, decay, masks, updates)
    out = queries.apply(state.start) if rule.window.read == "frozen" else steps.read(queries)
    sums = steps.sums()
    weights = steps.matrix(-1, state.weights, part.target)
    if rule.retention.has_mirror_map:
        assert state.dual is not None
        dual = steps.matrix(-1, state.dual, part.dual_target)
        moved = jump(steps) if isinstance(steps, PlainSteps) and rule.retention.lag else None
        out, weights, frozen, dual = boundary_update(part, queries, out, weights, dual, moved)
        after = MatrixState(weights, frozen, sums, dual)
    else:
        after = MatrixState(weights, None if filled is True else pick(filled, weights, state.start), sums)
    return out - pending_answer(part, masks, updates, queries) if reads_pending(rule) else out, after
