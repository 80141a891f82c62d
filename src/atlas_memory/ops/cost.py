"""What a rule costs: bytes of state, and multiply-adds a token.

The multiply-adds of a token are those of the matrix products in the forward pass of ``chunkwise`` for one chunk of b
tokens with its window tokens, divided by b; those of the steps are counted in work.py. Element-wise work is left out,
as are projections, gates and convolution, which belong to the layer. Where the delta rule reads all chunks at once
(delta_scan.py), it takes 1.4 to 2.1 times as many with heads of 64 and chunks of 64 to 16, in fewer calls.
Newton-Schulz is counted as products, a few steps of the memory at a time, though on one or two cores it may be computed
by eigenvalues, and for small memories with more steps at a time. Bytes and multiply-adds are held against a real call
in tests/memory/test_cost.py."""

from __future__ import annotations

from ..rules.norms import POWER_STEPS
from ..rules.rule import Rule
from .chunk_layout import tokens_before
from .dispatch import counterpart, has_chunks
from .muon_space import Spaces
from .triangular import Pairs
from .work import Work


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where the state grows with what is read; with a horizon, the size that it reaches.
    """
    if rule.features.endless and rule.features.horizon is None:
        return None
    columns, past = _columns(rule) if rule.features.endless else 0, rule.window.size - 1
    shapes = enumerate(rule.shapes(dim))
    entries = sum(m * (f + rule.by_key(i) * columns) for i, (m, f) in shapes)
    copies = 2 + rule.accumulators + rule.retention.settles  # weights, frozen, sums, dual
    window = past * (2 * dim + rule.bias.has_delta)
    return 4 * heads * (copies * entries + window + columns * dim) + 8  # and ``seen``


def multiply_adds(rule: Rule, dim: int, heads: int, spaces: Spaces | None = None) -> int | None:
    """Multiply-adds a token to read and write the ``heads`` memories of a layer, in ``chunkwise``.

    None where they grow with what is read, and where a rule has no fast counterpart; with a horizon, those of a call
    of one chunk (a longer call keeps the columns of its own tokens to its end).
    """
    if (rule.features.endless and rule.features.horizon is None) or not has_chunks(rule):
        return None
    b, n = rule.window.chunk, rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size)
    total, shared = _lifting(rule, dim) + _scalars(rule, dim), False
    for i in range(len(rule.shapes(dim))):
        lifted, work = rule.network.lifted[i], _work(rule, dim, i, spaces or Spaces())
        total += 0 if lifted else (b * rule.window.size if rule.live else n) * work.rows * work.columns  # its error
        keys, queries, reading, making = counterpart(rule).work(work)  # see ``Count``
        total += (n + b) * work.apply + reading + making * work.made + _keeping(work)
        if not (lifted and shared):  # all lifted matrices have the same kernels
            total += (keys * n + queries * b) * n * work.inner
        shared = shared or lifted
    return round(heads * total / b)


def _lifting(rule: Rule, dim: int) -> int:
    """Multiply-adds of phi of keys and queries, or on phi* of their kernel with the keys of the state's columns."""
    tokens = 2 * rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size)
    return tokens * (_columns(rule) * dim if rule.features.endless else rule.features.expansion_cost(dim))


def _scalars(rule: Rule, dim: int) -> int:
    """Multiply-adds of the schedules of all matrices (decay_masks.py), and of the bounds of their steps."""
    b, n, every = rule.window.chunk, rule.window.chunk + tokens_before(rule.window.chunk, rule.window.size), rule.every
    shapes, network = rule.shapes(dim), rule.network
    schedules, total = len(shapes) if rule.optimiser.bounded else 1, 0
    if rule.optimiser.has_momentum and not (rule.optimiser.waits and rule.live):  # else it is all element-wise
        if rule.live:
            total += schedules * b**3  # R
            if rule.window.size > 1:
                total += schedules * b * b * (b // Pairs(rule.window.size, b).block)  # ``Onward`` of S
        elif rule.window.size > 1:
            total += schedules * (b if rule.optimiser.shows else b // every) * b * n  # P
    if rule.optimiser.bounded:
        total += schedules * b * n if rule.window.size > 1 else 0
        through = (shape for shape, lifted in zip(shapes, network.lifted, strict=True) if not lifted)
        total += sum((2 * POWER_STEPS + 1) * m * (f - network.bias) for m, f in through)
    return total


def _work(rule: Rule, dim: int, i: int, spaces: Spaces) -> Work:
    """What ``Counterpart.work`` is told of matrix i."""
    rows, columns = rule.shapes(dim)[i]
    apply = rows * (columns + (_columns(rule) if rule.by_key(i) else 0))
    write = 0 if rule.by_key(i) else rows * columns
    inner = dim if rule.network.lifted[i] else columns
    last, shapes = i + 1 == len(rule.shapes(dim)), list(zip(rule.network.lifted, rule.shapes(dim), strict=True))
    of_sums = rule.live and rule.window.size > 1 and not last
    back = sum(m * f for lifted, (m, f) in shapes if not lifted) if of_sums else 0
    solves = (rule.live and last) or rule.optimiser.erases
    home = rows * columns if rule.retention.to_start else 0
    return Work(rule, rows, columns, apply, write, inner, back, solves, home, spaces)


def _keeping(work: Work) -> int:
    """Multiply-adds of the momentum after the chunk, of a retention's exact token, and of what W fades to."""
    optimiser, b, n = work.rule.optimiser, work.chunk, work.window
    total = n * (work.write + work.back) if optimiser.has_momentum else 0
    if work.rule.retention.settles:
        first = work.solves and not optimiser.waits
        total += b * work.apply + (n * work.apply if first else 0)  # W_0, which is not the frozen one
    return total + (b * work.home if work.reads else 0)


def _columns(rule: Rule) -> int:
    """Columns on phi* that a state with a horizon comes to hold."""
    return (rule.features.horizon or 0) + rule.window.chunk + rule.window.size - 2
