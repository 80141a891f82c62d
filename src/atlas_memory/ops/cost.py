"""What a rule costs: bytes of state, and multiply-adds a token.

The multiply-adds of a token are those of the matrix products in the forward pass of ``chunkwise`` for one chunk of b
tokens with its window tokens, divided by b; those of the steps are counted in work.py. Element-wise work is left out,
as are projections, gates and convolution, which belong to the layer. Where the delta rule reads all chunks at once
(delta_scan.py), it takes 1.4 to 2.1 times as many with heads of 64 and chunks of 64 to 16, in fewer calls.
Newton-Schulz is counted as products, a few steps of the memory at a time, though on one or two cores it may be computed
by eigenvalues, and for small memories with more steps at a time. Bytes and multiply-adds are held against a real call
in tests/memory/test_cost.py."""

from __future__ import annotations

from ..rules.networks import POWER_STEPS
from ..rules.rule import Rule
from .chunk_layout import tokens_before
from .dispatch import chunk_form, has_chunks
from .muon_space import MuonSpace
from .triangular import WindowPairs
from .work import Work


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where the state grows with what is read; with a horizon, the size that it reaches.
    """
    if rule.features.infinite and rule.features.horizon is None:
        return None
    columns, past = _columns(rule) if rule.features.infinite else 0, rule.window.size - 1
    shapes = enumerate(rule.shapes(dim))
    entries = sum(m * (f + rule.kernelised(i) * columns) for i, (m, f) in shapes)
    copies = 2 + rule.accumulators + rule.retention.has_mirror_map  # weights, frozen, sums, dual
    window = past * (2 * dim + rule.bias.has_delta)
    return 4 * heads * (copies * entries + window + columns * dim) + 8  # and ``seen``


def multiply_adds(rule: Rule, dim: int, heads: int, muon_space: MuonSpace | None = None) -> int | None:
    """Multiply-adds a token to read and write the ``heads`` memories of a layer, in ``chunkwise``.

    None where they grow with what is read, and where a rule has no fast fast form; with a horizon, those of a call
    of one chunk (a longer call keeps the columns of its own tokens to its end).
    """
    if (rule.features.infinite and rule.features.horizon is None) or not has_chunks(rule):
        return None
    b, n = rule.window.chunk, rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size)
    total, shared = _lifting(rule, dim) + _scalars(rule, dim), False
    for i in range(len(rule.shapes(dim))):
        feature_mapped, work = rule.network.feature_mapped[i], _work(rule, dim, i, muon_space or MuonSpace())
        total += (
            0 if feature_mapped else (b * rule.window.size if rule.online else n) * work.rows * work.columns
        )  # its error
        keys, queries, group_state, making = chunk_form(rule).work(work)  # see ``Count``
        total += (n + b) * work.apply + group_state + making * work.made + _keeping(work)
        if not (feature_mapped and shared):  # all feature-mapped matrices have the same kernels
            total += (keys * n + queries * b) * n * work.inner
        shared = shared or feature_mapped
    return round(heads * total / b)


def _lifting(rule: Rule, dim: int) -> int:
    """Multiply-adds of phi of keys and queries, or on phi* of their kernel with the keys of the state's columns."""
    tokens = 2 * rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size)
    return tokens * (_columns(rule) * dim if rule.features.infinite else rule.features.expansion_cost(dim))


def _scalars(rule: Rule, dim: int) -> int:
    """Multiply-adds of the decay masks of all matrices (decay_masks.py), and of the bounds of their steps."""
    b, n, every = rule.window.chunk, rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size), rule.every
    shapes, network = rule.shapes(dim), rule.network
    decay_masks, total = len(shapes) if rule.optimiser.normalised else 1, 0
    if rule.optimiser.has_momentum and not (
        rule.optimiser.estimates_change and rule.online
    ):  # else it is all element-wise
        if rule.online:
            total += decay_masks * b**3  # R
            if rule.window.size > 1:
                total += decay_masks * b * b * (b // WindowPairs(rule.window.size, b).block)  # ``InterBlock`` of S
        elif rule.window.size > 1:
            total += decay_masks * (b if rule.optimiser.read_pending else b // every) * b * n  # P
    if rule.optimiser.normalised:
        total += decay_masks * b * n if rule.window.size > 1 else 0
        through = (
            shape for shape, feature_mapped in zip(shapes, network.feature_mapped, strict=True) if not feature_mapped
        )
        total += sum((2 * POWER_STEPS + 1) * m * (f - network.bias) for m, f in through)
    return total


def _work(rule: Rule, dim: int, i: int, muon_space: MuonSpace) -> Work:
    """What ``ChunkForm.work`` is told of matrix i."""
    rows, columns = rule.shapes(dim)[i]
    apply = rows * (columns + (_columns(rule) if rule.kernelised(i) else 0))
    write = 0 if rule.kernelised(i) else rows * columns
    inner = dim if rule.network.feature_mapped[i] else columns
    last, shapes = i + 1 == len(rule.shapes(dim)), list(zip(rule.network.feature_mapped, rule.shapes(dim), strict=True))
    of_sums = rule.online and rule.window.size > 1 and not last
    back = sum(m * f for feature_mapped, (m, f) in shapes if not feature_mapped) if of_sums else 0
    solves = (rule.online and last) or rule.optimiser.erases
    decay_target = rows * columns if rule.retention.to_initial else 0
    return Work(rule, rows, columns, apply, write, inner, back, solves, decay_target, muon_space)


def _keeping(work: Work) -> int:
    """Multiply-adds of the momentum after the chunk, of a retention's boundary token, and of the decay target of W."""
    optimiser, b, n = work.rule.optimiser, work.chunk, work.window
    total = n * (work.write + work.back) if optimiser.has_momentum else 0
    if work.rule.retention.has_mirror_map:
        first = work.solves and not optimiser.estimates_change
        total += b * work.apply + (n * work.apply if first else 0)  # W_0, which is not the frozen one
    return total + (b * work.decay_target if work.reads else 0)


def _columns(rule: Rule) -> int:
    """Columns on phi* that a state with a horizon comes to hold."""
    return (rule.features.horizon or 0) + rule.window.chunk + rule.window.size - 2
