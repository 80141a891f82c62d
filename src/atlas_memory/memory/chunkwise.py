"""The fast form: exact, chunk by chunk, with nothing materialised per token that a kernel can replace.

Within a chunk all gradients are taken at the memory frozen at its start, but for what the errors see of the chunk's own
writes to the last matrix (live.py), so every token's (f_i, delta_i) comes from one batched pass and one triangular
system, and reading at every t is the primitive of fast_weight.py, matrix after matrix. Between chunks it is a
recurrence. Computes the same function as definition.py (ATLAS sections 3.3 and 5.1) at any split of a sequence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..kernels import dispatch
from .chunk import Chunk, Columns, Memory, Weights, read_chunk, takes_token_space
from .compiling import compiled_for_rule
from .gates import CompleteGates, Gates
from .horizon import Recent, in_matrices, known_as_tokens
from .incremental import read_tokens
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon
from .precision import Broken, cast, check_inputs, compute, kept_dtype, working_dtype
from .retention import LinearRetention, NonLinearRetention
from .rules import Params, Rule
from .state import MemoryState, initial_state
from .windows import band, overlapping, shift_right, take

OPTIMISERS = (GradientDescent, DeltaGradientDescent, Momentum, Muon)
"""The inner optimisers whose steps over a chunk are written down here (schedules.py, muon_steps.py, live.py)."""

GROUP = 64
"""Chunks that are laid out at a time: what is as long as the sequence stays proportional to it, not to b times it."""


def chunkwise(
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None = None,
    *,
    recompute: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, MemoryState]:
    """The outputs y_t = M_t(phi(q_t)) and the state after the last token; arguments as for ``recurrent``, and two that
    change how the same numbers are computed:

    Args:
        recompute: keep for the backward pass only the memory at the start of every so many chunks, and compute what
            lies between a second time: a third more work, activations of one group of chunks at a time. None:
            keep everything.
        compiled: have ``torch.compile`` make one kernel sequence of a chunk; it needs a C++ compiler (on a GPU, Triton)
            and half a minute at the first call. Inside a ``torch.compile`` of yours it changes nothing.

    Raises:
        ValueError: as ``recurrent``; ``recompute`` below 1.

    FLOPs a token and matrix (m x F), N = b + c - 1: about 8 m F for reads and writes at the chunk's ends and
    4 N (m + d) inside for gradient descent and momentum; Muon adds about 40 m^3 / every in output space.
    """
    if recompute is not None and recompute < 1:
        raise ValueError(f"recompute must be a number of chunks >= 1 or None, got {recompute!r}")
    return compute(partial(_chunkwise, recompute, compiled), rule, params, q, k, v, gates, state)


def _chunkwise(
    recompute: int | None,
    compiled: bool,
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None,
) -> tuple[Tensor, MemoryState]:
    """Group of chunks after group of chunks."""
    if q.shape[-2] == 0:
        return q.new_zeros(q.shape), initial_state(rule, params.initial, k) if state is None else state
    gate = gates.complete(q, rule.window.size)
    by_kernel = gates.length is None and dispatch.supports(rule, q.device.type, q.dtype, q.shape, gate)
    if by_kernel and (state is None or not (state.seen % rule.window.chunk).any()):  # it begins where a chunk begins
        from ..kernels.chunk import chunk_recurrence

        return chunk_recurrence(rule, q, k, v, gate, state or initial_state(rule, params.initial, k))
    tokens, length = _tokens(rule, q, k, v, gates), gates.length
    read = partial(_read_group, rule, compiled)
    if recompute is not None and torch.is_grad_enabled():
        read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
    width = (recompute or GROUP) * rule.window.chunk
    params, reading = begin(rule, params, q[:, :, :0], state)
    outputs = []
    for i, group in enumerate(zip(*(x.split(width, 2) for x in tokens), strict=True)):
        left = None if length is None else (length - i * width).clamp(0, width)
        y, reading = read(params, group, left, reading)
        outputs.append(y)
    return torch.cat(outputs, 2), end(reading, q)


class Reading(NamedTuple):
    """A memory between two groups of chunks of one call.

    Attributes:
        state: in the working precision; without the momentum that ``recent`` has.
        recent: see ``Memory``.
        phase: ``[batch]``, how many tokens of its chunk each row had read when the call began; None: none. Groups being
            whole chunks, it is the same before each.
        together: whether all rows stand at the start of a chunk, where the frozen memory is the present one.
    """

    state: MemoryState
    recent: tuple[Recent | None, ...]
    phase: Tensor | None
    together: bool


def begin(rule: Rule, params: Params, q: Tensor, state: MemoryState | None) -> tuple[Params, Reading]:
    """Begin to read a sequence of which only a group of chunks is at hand at a time: what ``read_on`` goes on from.

    Args:
        q: ``[batch, heads, 0, dim]``, for its sizes, dtype and device; the rest as for ``chunkwise``.
    """
    check_inputs(rule, params, q, q, q, Gates(q[..., 0]), state)
    up = cast(working_dtype(rule, q))
    params = params.map(up)
    if state is not None:
        return params, Reading(state.map(up), (), state.seen % rule.window.chunk, False)
    recent: tuple[Recent | None, ...] = ()
    if isinstance(rule.optimiser, Muon) and rule.optimiser.horizon is not None:
        in_tokens = [takes_token_space(rule, *shape) for shape in rule.shapes(q.shape[-1])]
        recent = tuple(Recent() if yes else None for yes in in_tokens) if any(in_tokens) else ()
    return params, Reading(initial_state(rule, params.initial, up(q)), recent, None, True)


def read_on(
    rule: Rule, compiled: bool, params: Params, reading: Reading, q: Tensor, k: Tensor, v: Tensor, gates: Gates
) -> tuple[Tensor, Reading]:
    """Read the next whole chunks, or the last tokens: y and what to go on from. ``params`` are those of ``begin``."""
    up = cast(working_dtype(rule, q))
    with torch.autocast(q.device.type, enabled=False):
        broken = Broken.among(k, v, gates)
        k, v, gates = broken.taken_out(k), broken.taken_out(v), gates.map(broken.taken_out)
        tokens = _tokens(rule, up(q), up(k), up(v), gates.map(up))
        y, reading = _read_group(rule, compiled, params, tokens, gates.length, reading)
    return broken.outputs(y).to(q.dtype), reading._replace(state=reading.state.map(broken.state))


def end(reading: Reading, q: Tensor) -> MemoryState:
    """The state after the last token, for inputs like ``q``."""
    state, recent = reading.state, reading.recent
    state = replace(state, momentum=in_matrices(state.momentum, recent)) if recent else state
    return state.map(cast(kept_dtype(q)))


def _tokens(rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, ...]:
    """q, k, v and the gates alpha, theta, eta, gamma."""
    gate = gates.complete(q, rule.window.size)
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    return q, k, v, gate.alpha, gate.theta, gate.eta, gate.gamma


def _read_group(
    rule: Rule, compiled: bool, params: Params, tokens: tuple[Tensor, ...], length: Tensor | None, reading: Reading
) -> tuple[Tensor, Reading]:
    """The tokens of a few chunks, see ``_tokens``: y, and what to go on from."""
    state, recent, phase, together = reading
    size, chunk = rule.window.size, rule.window.chunk
    q, k, v, alpha, theta, eta, gamma = tokens
    if not has_chunks(rule):
        gate = CompleteGates(eta, alpha, theta, gamma, theta)  # v has the gate delta
        y, state = read_tokens(rule, params, q, k, v, gate, length, state)
        return y, reading._replace(state=state)
    time = q.shape[-2]
    count = -(-(time if phase is None else time + chunk - 1) // chunk)
    spare = _spare(chunk, size)
    reach = size - 1 + spare  # window tokens before a chunk
    past_k, past_v = (
        torch.cat([past.new_zeros(*past.shape[:-2], spare, past.shape[-1]), past, new], -2)
        for past, new in ((state.k, k), (state.v, v))
    )
    q_grid, inside = shift_right(q, phase, count * chunk)
    k_grid, exists = shift_right(past_k, phase, count * chunk + reach)
    v_grid, _ = shift_right(past_v, phase, count * chunk + reach)
    if length is not None:
        start = 0 if phase is None else phase[:, None]
        inside = inside & (torch.arange(inside.shape[1], device=q.device) - start < length[:, None])
        exists = exists & (torch.arange(exists.shape[1], device=q.device) - start < length[:, None] + reach)
    # Tokens before the sequence's first are not in any window.
    first = state.seen if phase is None else state.seen - phase
    exists = exists & (first[:, None] + torch.arange(exists.shape[1], device=q.device) >= reach)

    def on_grid(values: Tensor, neutral: float) -> Tensor:
        grid, channels = values[..., None] if values.dim() == 3 else values, values.dim() == 4
        grid = torch.where(inside[:, None, :, None], shift_right(grid, phase, count * chunk)[0], neutral)
        return (grid if channels else grid[..., 0]).unflatten(2, (count, chunk))

    alpha = on_grid(alpha if rule.retention.gated else torch.ones_like(theta), 1.0)
    theta, eta, gamma = on_grid(theta, 1.0), on_grid(eta, 0.0), on_grid(gamma, 0.0)
    windows = gamma[..., 0]
    if size > 1:
        windows = band(F.pad(gamma, (0, spare)), exists.unfold(-1, chunk + reach, chunk)[:, None])

    k_windows, v_windows = (overlapping(x, chunk + reach, chunk) for x in (k_grid, v_grid))
    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    per_chunk = zip(
        torch.cat([k_windows, q_grid.unflatten(-2, (count, chunk))], -2).unbind(2),
        v_windows.unbind(2),
        *(x.unbind(2) for x in (windows, alpha, theta, eta)),
        inside.unflatten(-1, (count, chunk))[:, None].unbind(2),
        strict=True,
    )
    frozen = None if together and not state.dual else state.frozen
    memory = Memory(frozen, state.weights, state.momentum, state.dual, recent)
    keys, lifted = state.keys, rule.network.lifted
    if rule.features.endless:
        keys = torch.cat([keys, F.pad(k, (0, 0, 0, count * chunk - time))], -2)
        memory = memory.map(lambda part: _widen(part, lifted, count * chunk))
    end = (time if length is None else length) + (0 if phase is None else phase)
    outputs = []
    for j, inputs in enumerate(per_chunk):
        filled, columns = (j + 1) * chunk <= end, None
        if rule.features.endless:
            columns = _columns(keys, state.keys.shape[-2] + j * chunk, phase, chunk, reach)
        own = compiled and filled is True and columns is None and not torch.compiler.is_compiling()
        form = compiled_for_rule(read_chunk, rule, q.device.type) if own else read_chunk
        y, memory = form(rule, params, memory, Chunk(*inputs), first + j * chunk, filled, columns)
        if rule.features.horizon is not None:
            memory = _forget(rule, memory, columns, filled)
        if phase is not None and j < 2 and memory.recent:
            # What a call begins with is known in matrices only. It takes two chunks to forget that.
            kept = known_as_tokens(memory.momentum, memory.recent, filled) if j == 1 else memory.momentum
            memory = memory._replace(momentum=kept, recent=memory.recent if j == 1 else ())
        outputs.append(y)

    y = torch.cat(outputs, -2)
    y = y[..., :time, :] if phase is None else take(y, phase[:, None] + torch.arange(time, device=q.device))
    read = torch.full_like(state.seen, time) if length is None else length
    last = read[:, None] + torch.arange(size - 1, device=q.device)
    past_k, past_v = (x[..., spare:, :] for x in (past_k, past_v))
    past_k, past_v = (x[..., time:, :].clone() if length is None else take(x, last) for x in (past_k, past_v))
    if rule.features.endless:
        held = state.keys.shape[-2] + time
        if rule.features.horizon is not None:
            held = min(held, rule.features.horizon + chunk + size - 2)
        at = read[:, None] + state.keys.shape[-2] - held + torch.arange(held, device=q.device)
        memory = memory.map(lambda part: _narrow(part, lifted, at))
        keys = torch.where((at >= 0)[:, None, :, None], take(keys, at.clamp_min(0)), 0.0)
    frozen = memory.weights if memory.frozen is None else memory.frozen
    recent, momentum = memory.recent, memory.momentum
    if phase is not None:  # then the next group begins within a chunk
        recent, momentum = (), in_matrices(momentum, recent) if recent else momentum
    state = MemoryState(frozen, memory.weights, momentum, memory.dual, past_k, past_v, keys, state.seen + read)
    # A memory that reads from its start stands at the start of a chunk in every group; one with rows that ended stays.
    return y, Reading(state, recent, phase, together and length is None)


def has_chunks(rule: Rule) -> bool:
    """Whether a chunk can be read at once. Others go token by token: an optimiser that is not in ``OPTIMISERS``, whose
    ``step`` is all that is known of it, and a retention with a ``keep`` of its own."""
    keep = type(rule.retention).keep
    return type(rule.optimiser) in OPTIMISERS and keep in (LinearRetention.keep, NonLinearRetention.keep)


def _spare(chunk: int, size: int) -> int:
    """Empty places that bring the window tokens of a chunk to a multiple of 8, where that adds at most a quarter: a
    matrix product 71 columns wide takes half as long again as one of 72, and in float64 one of 23 three times as long
    as one of 24."""
    tokens = chunk + size - 1
    spare = -tokens % 8
    return spare if size > 1 and 4 * spare <= tokens else 0


def _columns(keys: Tensor, filled: int, phase: Tensor | None, chunk: int, reach: int) -> Columns:
    """The columns of a chunk whose slots, were the phase 0, would begin at column ``filled``."""
    window = torch.arange(chunk + reach, device=keys.device)[None] + (filled - reach)
    window = window if phase is None else window - phase[:, None]
    # Below zero lie tokens before the sequence's first, which have no weight in any window.
    return Columns(keys, filled, window.clamp_min(0))


def _widen(weights: Weights, lifted: tuple[bool, ...], by: int) -> Weights:
    """Room for new columns in the lifted matrices."""
    return tuple(F.pad(w, (0, by)) if up else w for w, up in zip(weights, lifted, strict=False))


def _narrow(weights: Weights, lifted: tuple[bool, ...], at: Tensor) -> Weights:
    """The columns ``at`` ``[batch, n]`` of the lifted matrices, zero where below 0."""
    index = at.clamp_min(0)[:, None, None]

    def pick(w: Tensor) -> Tensor:
        picked = w.gather(-1, index.expand(*w.shape[:3], -1))
        return torch.where((at >= 0)[:, None, None], picked, 0.0)

    return tuple(pick(w) if up else w for w, up in zip(weights, lifted, strict=False))


def _forget(rule: Rule, memory: Memory, columns: Columns | None, filled: Tensor | bool) -> Memory:
    """Clear the columns of lifted matrices that lie beyond the horizon, where the chunk is ``filled``."""
    assert columns is not None and rule.features.horizon is not None
    newest = columns.window[:, -1:]
    old = torch.arange(columns.keys.shape[-2], device=newest.device) <= newest - rule.features.horizon
    if isinstance(filled, Tensor):
        old = old & filled[:, None]
    elif not filled:
        return memory

    def clear(weights: Weights) -> Weights:
        pairs = zip(weights, rule.network.lifted, strict=False)
        return tuple(torch.where(old[:, None, None], 0.0, w) if up else w for w, up in pairs)

    return memory.map(clear)
