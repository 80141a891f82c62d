"""The inputs of a memory's matrices for the tokens of a chunk (``Inputs``), and all of a chunk that does not depend on
the memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..rules.rule import Rule
from .chunk_context import Chunk, ChunkContext, ChunkParams, Inputs
from .decay_masks import GateDecay, own_gate_one
from .dispatch import has_chunks
from .fast_weight import times
from .kernel_cache import KernelColumns
from .triangular import WindowPairs


class ChunkConstants(NamedTuple):
    """What of a chunk does not depend on the memory. It is computed for many chunks in a few large operations; where
    chunks are compiled, chunk by chunk, so that it is fused with what reads it.

    Attributes:
        key_kernel, query_kernel: the kernels phi(k) . phi(k_i) and phi(q) . phi(k_i), ``[n, N, N]`` and ``[n, b, N]``
            (without Muon with a column for each update, ``[n, b, U]``); None where nothing needs them.
        window: Gamma with 1 as the gate of each token itself, ``[n, b, N]``; None with windows of one token.
        lengths: |phi(k)|^2, ``[n, N]``, where normalised steps ask for it; else None.
        keys, queries: the inputs of feature-mapped matrices, alike for all but ``at_target``; None: not computed yet.
        targets: for every matrix what its decay target answers to keys and queries; None where nothing needs it.
    """

    decay: GateDecay
    key_kernel: Tensor | None
    query_kernel: Tensor | None
    window: Tensor | None
    lengths: Tensor | None
    keys: Inputs | None = None
    queries: Inputs | None = None
    targets: tuple[tuple[Tensor | None, Tensor | None], ...] = ()

    @staticmethod
    def of(rule: Rule, params: ChunkParams, chunk: Chunk, pairs: WindowPairs | None) -> ChunkConstants:
        """All but the inputs, for one chunk, or for several as sequences of a batch."""
        features, a, retention = rule.features, params.params.sqrt_a, rule.retention
        key_kernel = query_kernel = None
        if not retention.fixed_row_sums:  # else of what writes are made of
            if _needs_key_kernel(rule, rule.network.feature_mapped[-1] and rule.online):
                key_kernel = features.kernel(chunk.k, chunk.k, a)
            if rule.window.read != "frozen":
                query_kernel = features.kernel(chunk.q, chunk.k, a)
        lengths = None
        if rule.optimiser.normalised and not retention.fixed_row_sums:
            lengths = features.squared_norm(chunk.k, a)
        if pairs is not None and query_kernel is not None and not rule.optimiser.estimates_change:
            query_kernel = pairs.columns(query_kernel)
        window = own_gate_one(chunk.window) if rule.optimiser.normalised else None
        return ChunkConstants(GateDecay.of(rule, chunk, pairs), key_kernel, query_kernel, window, lengths)

    def with_inputs(
        self,
        rule: Rule,
        params: ChunkParams,
        chunk: Chunk,
        pairs: WindowPairs | None,
        columns: KernelColumns | None = None,
    ) -> ChunkConstants:
        """The inputs too; ``columns`` are those of the keys, for infinite-dimensional features."""
        features, a, read = rule.features, params.params.sqrt_a, rule.window.read != "frozen"
        known = chunk.k if columns is None else columns.keys[:, : columns.filled]
        f_k, f_q = features.columns(chunk.k, known, a), features.columns(chunk.q, known, a)
        written = rule.retention.tangent(f_k)
        key_kernel, query_kernel = self.key_kernel, self.query_kernel
        if rule.retention.fixed_row_sums:
            key_kernel, query_kernel = times(f_k, written), times(f_q, written)
            if pairs is not None and not rule.optimiser.estimates_change:
                query_kernel = pairs.columns(query_kernel)
        keys = Inputs(f_k, written, key_kernel)
        if columns is not None:
            keys = keys._replace(written=None, columns=columns.window + columns.keys.shape[-1])
        queries = Inputs(f_q, kernel=query_kernel)
        targets: list[tuple[Tensor | None, Tensor | None]] = []
        for mapped, (target, _) in zip(rule.network.feature_mapped, params.targets, strict=True):
            if target is None or not mapped:
                targets.append((None, None))
            else:
                last = len(targets) + 1 == len(params.targets)
                of_keys = keys.apply(target) if rule.optimiser.erases or (last and rule.online) else None
                targets.append((of_keys, queries.apply(target) if read else None))
        return self._replace(keys=keys, queries=queries, targets=tuple(targets))

    @staticmethod
    def of_each(rule: Rule, params: ChunkParams, chunks: Chunk, pairs: WindowPairs | None) -> list[ChunkConstants]:
        """``of`` for each of several chunks, which are the first dimension of every tensor; and the inputs, unless
        phi(k) is much longer than k."""
        count, n = chunks.k.shape[:2]
        flat = Chunk(*(x.flatten(0, 1) for x in chunks))
        found = ChunkConstants.of(rule, params, flat, pairs)
        dim = chunks.k.shape[-1]
        if not rule.features.infinite and rule.features.size(dim) <= 2 * dim:
            found = found.with_inputs(rule, params, flat, pairs)
        return _unbound(found, count, n)


def _needs_key_kernel(rule: Rule, sees_writes: bool) -> bool:
    """Whether the kernel of the window tokens with one another is needed, for a matrix whose errors are online or not
    (``sees_writes``)."""
    return rule.optimiser.estimates_change or rule.optimiser.erases or sees_writes


def hidden_keys(context: ChunkContext, u: Tensor, last: bool) -> Inputs:
    """The inputs of a matrix that is not feature-mapped, for window tokens with hidden units u ``[n, N, width]``."""
    rule = context.rule
    f, written = u, u
    if rule.retention.fixed_row_sums:
        f, written = centred(rule, u, last), rule.retention.tangent(u)
    return Inputs(f, written, times(f, written) if _needs_key_kernel(rule, last and context.online) else None)


def hidden_queries(context: ChunkContext, u: Tensor, last: bool, keys: Inputs) -> Inputs:
    """The same for queries with hidden units u ``[n, b, width]``."""
    rule, pairs = context.rule, context.pairs
    f = centred(rule, u, last) if rule.retention.fixed_row_sums else u
    if rule.window.read == "frozen":
        return Inputs(f)
    assert keys.written is not None
    kernel = times(f, keys.written)
    return Inputs(f, None, kernel if pairs is None or rule.optimiser.estimates_change else pairs.columns(kernel))


def centred(rule: Rule, u: Tensor, last: bool) -> Tensor:
    """What a matrix that is not feature-mapped multiplies of its input u ``[..., width]``: u itself; but u less its
    mean if it is the ``last`` matrix, its rows have the same sum at all times and a layer norm follows. All outputs of
    a token then differ by one number, which the norm takes away, and with it most of the rounding. Rows have the same
    sum at all times where W does not decay to zero and steps are made of gradients as they come, which is not known of
    classes without a fast form."""
    retention = rule.retention
    if not (retention.fixed_row_sums and rule.network.norm and last):
        return u
    if rule.optimiser.erases or not has_chunks(rule):
        return u
    return u if retention.gated and not retention.to_initial else retention.tangent(u)


def _unbound(tree: Any, count: int, n: int) -> list[Any]:
    """A (named) tuple of tensors, None and such tuples, cut into ``count`` of them along the first dimension."""
    if tree is None:
        return [None] * count
    if isinstance(tree, Tensor):
        return list(tree.unflatten(0, (count, n)).unbind())
    parts = list(zip(*(_unbound(part, count, n) for part in tree), strict=True)) or [()] * count
    return parts if type(tree) is tuple else [type(tree)(*part) for part in parts]
