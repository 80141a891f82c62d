"""The fast form: exact, chunk by chunk, and without a matrix for each token where a kernel phi(x) . phi(y) will do.

Within a chunk all gradients are taken at the memory frozen at its start, except for what the errors see of the chunk's
own writes to the last matrix. The input f_i and the error delta_i of every token and matrix therefore come from one
batched pass and one triangular system (triangular.py). Each matrix then answers all queries of the chunk aligned,
though at every token it is another one (fast_weight.py). Chunks are read one after the other, except for the delta
rule's, which can be read all at once (delta_scan.py). It is the same function as recurrent.py (ATLAS sections 3.3 and
5.1) however a sequence is split into calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..rules.autograd import is_transformed, no_autocast
from ..rules.gates import CompleteGates, Gates
from ..rules.rule import Params, Rule
from ..rules.state import Matrix, MemoryState, initial_state
from ..rules.validation import UNBOUNDED, check_size
from . import delta_scan
from .banded import take
from .chunk import pairs_of, read_chunk
from .chunk_context import Chunk, ChunkParams, MatrixState
from .chunk_layout import ChunkLayout, groups, place_of_all, starts_chunk, to_chunks
from .compiling import compiled_for_rule, with_own_strides
from .dispatch import has_chunks, has_scan
from .fused_recurrent import read_tokens
from .kernel_cache import KernelCache, KernelColumns
from .matrix_inputs import ChunkConstants
from .muon_space import DEFAULT, MuonSpace
from .precision import NonFinite, cast, check_inputs, compute, kept_dtype, working_dtype
from .triton import kernel_support
from .triton.kernel_check import matches_pytorch

GROUP = 64
"""How many chunks are laid out at a time. Tensors that are b times as large as their tokens, such as Gamma, then exist
for a group of chunks only, and not for the whole sequence."""


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
    muon_space: MuonSpace = DEFAULT,
    kernels: bool | None = None,
    starts: bool | None = None,
) -> tuple[Tensor, MemoryState]:
    """The outputs y_t = M_t(phi(q_t)) and the state after the last token. Arguments and results are those of
    ``recurrent``; five more arguments change how the same numbers are computed:

    Args:
        recompute: keep for the backward pass only the memory at the start of every so many chunks, and compute what
            lies between a second time: a third more work, but activations of one group of chunks at a time. None:
            keep everything.
        compiled: let ``torch.compile`` fuse the operations of a chunk; it needs a C++ compiler (on a GPU, Triton) and
            half a minute at the first call. Inside a ``torch.compile`` of yours it changes nothing.
        muon_space: how Muon orthogonalises; by default in the cheapest way.
        kernels: whether a Triton kernel reads the whole sequence (that of Newton-Schulz is chosen
            in ``gram_polynomial``). True: it must; False: never. None: with ATLAS_MEMORY_KERNELS=1 in the environment
            wherever there is one; if that is not set, only one of the delta rule, on a GPU from Hopper on where it has
            been checked, and for more tokens than a chunk has.
        starts: whether all rows of ``state`` stand at the start of a chunk, as ``starts_chunk`` finds it, which is
            asked if None. Chunks that all rows begin aligned take less work.

    Raises:
        ValueError: as ``recurrent``; ``recompute`` below 1; ``kernels`` is True, and this call has no kernel.

    FLOPs for a token and a matrix of m rows and F columns, with heads of width d and N = b + c - 1: about 8 m F for
    reads and writes at the chunk's ends and 4 N (m + d) inside for gradient descent and momentum; Muon adds about
    40 m^3 / every in output space.
    """
    if recompute is not None:
        check_size("recompute, a number of chunks,", recompute, UNBOUNDED)
    form = partial(_chunkwise, recompute, compiled, muon_space, kernels, starts)
    return compute(form, rule, params, q, k, v, gates, state)


def _chunkwise(
    recompute: int | None,
    compiled: bool,
    muon_space: MuonSpace,
    kernels: bool | None,
    starts: bool | None,
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None,
) -> tuple[Tensor, MemoryState]:
    """``chunkwise`` on inputs that have been checked and are in the working precision: one group of chunks after the
    other."""
    if starts is None:
        starts = starts_chunk(rule, state)
    state = initial_state(rule, params.initial, k) if state is None else state
    if q.shape[-2] == 0:
        return q.new_zeros(q.shape), state
    gate = gates.complete(q, rule.window.size)
    by_default = None
    if kernel_support.is_delta(rule) and q.shape[-2] > rule.window.chunk and kernel_support.fast_delta(q):
        by_default = partial(_delta_matches, rule, q.shape[-1], q.device)
    if kernel_support.taken(kernels, _no_kernel, rule, q, gates.length, gate, starts, by_default=by_default):
        from .triton.delta_rule import delta_recurrence

        return delta_recurrence(rule, q, k, v, gate, state, partial(_delta, rule), recompute)
    tokens, length = _tokens(rule, q, k, v, gates), gates.length
    read_group = partial(_read_group, rule, compiled, muon_space)
    if recompute is not None and torch.is_grad_enabled() and not is_transformed(q):
        read_group = partial(checkpoint, read_group, use_reentrant=False, preserve_rng_state=False)
    width = (recompute or GROUP) * rule.window.chunk
    group_state = GroupState(state, None if starts else state.seen % rule.window.chunk, starts)
    place = 0 if starts else place_of_all(rule, state, length)
    if place:  # what is left of a chunk that all rows have begun is read alone
        group_state = group_state._replace(phase=None, before=place)
    sizes, begins, outputs = groups(q.shape[-2], place, width, rule.window.chunk, whole=has_scan(rule)), 0, []
    for size, group in zip(sizes, zip(*(x.split(sizes, 2) for x in tokens), strict=True), strict=True):
        left = None if length is None else (length - begins).clamp(0, size)
        y, group_state = read_group(params, group, left, group_state)
        outputs.append(y)
        begins += size
    return torch.cat(outputs, 2), end(group_state, q)


def _delta(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels of the delta rule compute, without them: y of one matrix without a residual, the matrix after
    the last token, and the one at which the next token's gradient is taken."""
    plain, empty = rule.vary(network={"residual": False}), q[:, :, :0]
    seen = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    state = MemoryState((Matrix(matrix, matrix),), empty, empty, empty, seen)
    y, after = chunkwise(plain, Params((matrix[0],)), q, k, v, Gates(eta, alpha), state, kernels=False, starts=True)
    return y, after.weights[0], after.matrices[0].frozen


def _delta_matches(rule: Rule, dim: int, device: torch.device) -> bool:
    """Whether the kernels of the delta rule compute the same on this GPU."""
    return matches_pytorch("delta_rule", _delta, rule, dim, device)


def _no_kernel(rule: Rule, q: Tensor, length: Tensor | None, gate: CompleteGates, starts: bool) -> str | None:
    """Why no Triton kernel can compute this call, as ``kernel_support.taken`` says it; None: one can."""
    if length is not None:
        return "knows padding: leave gates.length out"
    why = kernel_support.delta_refusal(rule, q.device.type, q.dtype, q.shape, gate)
    if why is None and not starts:
        return f"begins inside a chunk: give a state after a multiple of {rule.window.chunk} tokens"
    return why


class GroupState(NamedTuple):
    """A memory between two groups of chunks of one call. A row is a sequence of the batch.

    Attributes:
        state: the memory's state, in the working precision.
        phase: ``[batch]``, how many tokens of its chunk each row had read when the call began; None: none. As groups
            are whole chunks, it is the same before each.
        aligned: whether all rows stand at the start of a chunk, where the frozen memory is the present one.
        before: how many tokens of their chunk all rows have read, if the group is what is left of it.
    """

    state: MemoryState
    phase: Tensor | None
    aligned: bool
    before: int = 0


def begin(
    rule: Rule, params: Params, q: Tensor, state: MemoryState | None, starts: bool | None = None
) -> tuple[Params, GroupState]:
    """Begin to read a sequence of which only a group of chunks is at hand at a time. Returns ``params`` in the working
    precision, and what ``read_on`` goes on from.

    Args:
        q: ``[batch, heads, 0, dim]``, for its sizes, dtype and device; the rest as for ``chunkwise``.
    """
    check_inputs(rule, params, q, q, q, Gates(q[..., 0]), state)
    up = cast(working_dtype(rule, q))
    params = params.map(up)
    if state is None:
        return params, GroupState(initial_state(rule, params.initial, up(q)), None, True)
    if starts_chunk(rule, state) if starts is None else starts:
        return params, GroupState(state.map(up), None, True)
    return params, GroupState(state.map(up), state.seen % rule.window.chunk, False)


def read_on(
    rule: Rule, compiled: bool, params: Params, group_state: GroupState, q: Tensor, k: Tensor, v: Tensor, gates: Gates
) -> tuple[Tensor, GroupState]:
    """Read the next whole chunks, or the last tokens: y, and what to go on from. ``params`` are those that ``begin``
    returned; q, k, v and gates are of these tokens only."""
    up = cast(working_dtype(rule, q))
    with no_autocast(q.device):
        k, v, gates, nonfinite = NonFinite.apart(rule, k, v, gates)
        tokens = _tokens(rule, up(q), up(k), up(v), gates.map(up))
        y, group_state = _read_group(rule, compiled, DEFAULT, params, tokens, gates.length, group_state)
    return nonfinite.outputs(y).to(q.dtype), group_state._replace(state=group_state.state.map(nonfinite.state))


def end(group_state: GroupState, q: Tensor) -> MemoryState:
    """The state after the last token, in the dtype in which states are kept for inputs like ``q``."""
    return group_state.state.map(cast(kept_dtype(q)))


def _tokens(rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, ...]:
    """q, k, v (with the gate delta as its last entry, where the bias reads one), alpha, theta, eta and gamma."""
    gate = gates.complete(q, rule.window.size)
    v = torch.cat([v, gate.delta[..., None]], -1) if rule.bias.has_delta else v
    return q, k, v, gate.alpha, gate.theta, gate.eta, gate.gamma


def _read_group(
    rule: Rule,
    compiled: bool,
    muon_space: MuonSpace,
    params: Params,
    tokens: tuple[Tensor, ...],
    length: Tensor | None,
    group_state: GroupState,
) -> tuple[Tensor, GroupState]:
    """Read the tokens (see ``_tokens``) of a few chunks: y, and what to go on from. Of each row the first ``length``
    ``[batch]`` are real; None: all."""
    q, k, v, alpha, theta, eta, gamma = tokens
    if not has_chunks(rule):
        gate = CompleteGates(eta, alpha, theta, gamma, theta)  # the last is no delta: v has it
        y, state = read_tokens(rule, params, q, k, v, gate, length, group_state.state)
        return y, group_state._replace(state=state)
    state, phase = group_state.state, group_state.phase
    layout, heads = ChunkLayout.of(rule, q.shape[-2], phase, length, group_state.before), q.shape[1]
    keys = KernelCache.of(rule, state, k, layout) if rule.features.infinite else None
    memory = tuple(MatrixState.of(m, group_state.aligned) for m in state.matrices)
    memory = memory if keys is None else keys.widen(memory)
    chunks = to_chunks(rule, tokens, state, layout, state.seen if phase is None else state.seen - phase)
    shared = ChunkParams.of(rule, params, len(q))
    if _at_once(rule, compiled, layout, q, alpha, eta):
        y, end = delta_scan.read_chunks(rule, shared, memory[0], chunks, bool(layout.filled(layout.count - 1)))
        memory, out = (end,), y.transpose(0, 1).flatten(1, 2)
    else:
        outputs, memory = _each_chunk(rule, compiled, muon_space, shared, memory, chunks, layout, keys, heads)
        out = torch.cat(outputs, 1)
    return layout.from_chunks(out.unflatten(0, (-1, heads))), _after(rule, group_state, layout, memory, keys, k, v)


def _each_chunk(
    rule: Rule,
    compiled: bool,
    muon_space: MuonSpace,
    params: ChunkParams,
    memory: tuple[MatrixState, ...],
    chunks: Chunk,
    layout: ChunkLayout,
    keys: KernelCache | None,
    heads: int,
) -> tuple[list[Tensor], tuple[MatrixState, ...]]:
    """One chunk after the other: y ``[n, b, dim]`` of each, and the matrices after the last."""
    outputs: list[Tensor] = []
    constants: Sequence[ChunkConstants | None] = [None] * layout.count
    pairs = None
    if not compiled:
        pairs = pairs_of(rule, Chunk(*(x[0] for x in chunks)))
        constants = ChunkConstants.of_each(rule, params, chunks, pairs)
    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    for j, inputs in enumerate(map(Chunk._make, zip(*(x.unbind() for x in chunks), strict=True))):
        filled, columns = layout.filled(j), None if keys is None else keys.columns(j)
        filled = filled if isinstance(filled, bool) else filled.repeat_interleave(heads)
        own = compiled and _compilable(layout, filled, columns)
        form = compiled_for_rule(read_chunk, rule, chunks.k.device.type) if own else read_chunk
        inputs = Chunk(*map(with_own_strides, inputs)) if own else inputs
        y, memory = form(rule, params, memory, inputs, filled, constants[j], pairs, columns, muon_space)
        if keys is not None and columns is not None:
            memory = keys.forget(memory, columns, filled)
        outputs.append(y)
    return outputs, memory


def _compilable(layout: ChunkLayout, filled: Tensor | bool, columns: KernelColumns | None) -> bool:
    """Whether a chunk is as most are, so that the code that is compiled for it serves again."""
    whole = filled is True and not layout.before and columns is None
    return whole and not torch.compiler.is_compiling()


SMALL = 2**13
"""About how many numbers the keys of one chunk of all sequences may have for a CPU to read all chunks at once: 8 heads
of 64 with chunks of 16. More are read faster chunk by chunk, whose numbers stay in cache."""


def _at_once(rule: Rule, compiled: bool, layout: ChunkLayout, q: Tensor, alpha: Tensor, eta: Tensor) -> bool:
    """Whether the chunks of a group are read all at once (delta_scan.py), which takes products of dim^3 where chunk by
    chunk takes some of b dim^2."""
    several = layout.phase is None and layout.length is None and layout.count > 1 and q.shape[-1] <= 4 * layout.chunk
    pays = q.device.type != "cpu" or (not compiled and q[:, :, 0].numel() * layout.chunk <= SMALL)
    return several and pays and alpha.dim() == 3 and eta.dim() == 3 and has_scan(rule)


def _after(
    rule: Rule,
    group_state: GroupState,
    layout: ChunkLayout,
    memory: tuple[MatrixState, ...],
    keys: KernelCache | None,
    k: Tensor,
    v: Tensor,
) -> GroupState:
    """What to go on from after a group of chunks, with keys k and values v, that has left ``memory``."""
    state, length = group_state.state, layout.length
    count = torch.full_like(state.seen, layout.time) if length is None else length
    matrices = tuple(m.matrix(k.shape[1]) for m in memory)
    end = MemoryState(matrices, *_past(rule, state, k, v, length), state.keys, state.seen + count)
    # If all rows began at the start of a chunk, they are at one before every group, unless one of them has ended.
    aligned = (layout.filled(0) is True if layout.before else group_state.aligned) and length is None
    return GroupState(end if keys is None else keys.narrow(end, count), layout.phase, aligned)


def _past(rule: Rule, state: MemoryState, k: Tensor, v: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last c - 1 keys and values of each row, for the next call."""
    both = (torch.cat([past, new], -2) for past, new in ((state.k, k), (state.v, v)))
    if length is None:
        k, v = (x[..., k.shape[-2] :, :].clone() for x in both)
    else:
        last = length[:, None] + torch.arange(rule.window.size - 1, device=k.device)
        k, v = (take(x, last) for x in both)
    return k, v
