"""What a rule costs: bytes of state, and multiply-adds a token.

The multiply-adds are those of the matrix products in chunkwise.py, chunk.py, fast_weight.py and muon_steps.py, forward,
for one chunk of b tokens with its N = b + c - 1 window tokens, divided by b. Element-wise work is left out, as are
projections, gates and convolution, which belong to the layer, and the spare places of chunkwise.py. Newton-Schulz is
counted as products, though one or two cores go by eigenvalues. Both numbers are held against a real call in
tests/memory/test_cost.py.
"""

from __future__ import annotations

import torch

from .chunk import takes_token_space
from .features import Exponential, Polynomial
from .muon_steps import cheapest_space, step_groups
from .newton_schulz import gram_cost, schulz_cost
from .optimisers import DeltaGradientDescent, Muon
from .retention import NonLinearRetention
from .rules import Rule
from .state import initial_state


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where it grows with what is read; with a horizon, the size that it reaches.
    """
    k = torch.empty(1, heads, 0, dim, device="meta")  # shapes without numbers
    size = initial_state(rule, tuple(k.new_empty(heads, *shape) for shape in rule.shapes(dim)), k).nbytes
    if not isinstance(rule.features, Exponential):
        return size
    if rule.features.horizon is None:
        return None
    copies = 3 if rule.optimiser.has_momentum else 2  # frozen and weights, momentum
    rows = sum(m for (m, _), up in zip(rule.shapes(dim), rule.network.lifted, strict=True) if up)
    return size + 4 * heads * (_columns(rule) - (rule.window.size - 1)) * (dim + copies * rows)


def multiply_adds(rule: Rule, dim: int, heads: int) -> int | None:
    """Multiply-adds a token to read and write the ``heads`` memories of a layer, in ``chunkwise``.

    None where they grow with what is read; with a horizon, those of a call of one chunk (a longer call keeps the
    columns of its own tokens to its end).
    """
    b, n = rule.window.chunk, rule.window.chunk + rule.window.size - 1
    by_key = isinstance(rule.features, Exponential)
    if isinstance(rule.features, Exponential) and rule.features.horizon is None:
        return None
    total, shared = 0, False
    if by_key:
        total += (n + b) * _columns(rule) * dim  # the kernel against the columns held
    elif isinstance(rule.features, Polynomial) and rule.features.degree > 1:
        total += (n + b) * dim**2 * (dim + 1)  # the two factors of the monomials of degree 2
    if rule.optimiser.has_momentum and rule.window.size > 1:
        total += (b if b % rule.every else b // rule.every) * b * n  # P
    if rule.optimiser.bounded and rule.window.size > 1:
        total += 2 * b * n  # lambda over the window
    for (m, f), lifted in zip(rule.shapes(dim), rule.network.lifted, strict=True):
        if not lifted:
            apply, write, inner = m * f, m * f, f
            total += n * m * f  # the error at its input
        else:
            apply, write, inner = (m * _columns(rule), 0, dim) if by_key else (m * f, m * f, dim)
        keys, queries, steps = _steps(rule, m, f, apply, write, inner)
        total += n * apply + steps
        if not (lifted and shared):  # lifted matrices share their kernels
            total += (keys * n + queries * b) * n * inner
        shared = shared or lifted
    return round(heads * total / b)


def _steps(rule: Rule, m: int, f: int, apply: int, write: int, inner: int) -> tuple[bool, bool, int]:
    """Whether the steps of one matrix need the kernel among keys, and that of queries with keys; and their
    multiply-adds in a chunk without these, given those of applying it to a token, of adding a token to it and of one
    entry of the kernel."""
    b, n = rule.window.chunk, rule.window.chunk + rule.window.size - 1
    taken, optimiser, retention = -(-b // rule.every), rule.optimiser, rule.retention
    delta, reads = isinstance(optimiser, DeltaGradientDescent), rule.window.read != "frozen"
    keys, queries = delta, reads
    total, end = b * apply, n * write  # reading what was there before the chunk; making a W_b
    if not isinstance(optimiser, Muon):
        if optimiser.has_momentum or rule.window.size > 1:  # else R is a product of scalars
            ends = 4 if retention.lag else 2 if isinstance(retention, NonLinearRetention) else 1
            total += (b + ends if reads else ends) * taken * n
        total += b * n * m if reads else 0
        total += b * taken + b * apply if optimiser.has_momentum and reads else 0
        total += n * n * m // 2 if delta else 0  # a triangular system
    elif takes_token_space(rule, m, f):
        t, queries = 2 * n, False
        total += t * t * (inner + m) + (b * t * inner if reads else 0)
        for count, seen, left in _groups(taken, t, b, rule.every):
            total += count * (seen**3 + gram_cost(seen, optimiser.steps))
            total += left * seen * (count * seen + m) if reads else 0
        end, write = t * t * m + t * write, 0
    elif cheapest_space(m, f, taken, n, b, optimiser.steps, rule.every) == "outputs":
        keys = True
        total += n * apply + m * m * f + (b * apply if reads else 0)
        for count, seen, left in _groups(taken, n, b, rule.every):
            total += count * (seen * m * (seen + m) + gram_cost(m, optimiser.steps))
            total += count * left * m * (seen + m) if reads else 0
            end += count * seen * m * m
        end += m * m * f
    else:
        for count, seen, left in _groups(taken, n, b, rule.every):
            total += count * (seen * m * f + schulz_cost(m, f, optimiser.steps) + (left * m * f if reads else 0))
        queries, end = False, 0
    if optimiser.has_momentum:
        total += n * write
    if isinstance(retention, NonLinearRetention):
        total += b * apply + end * (4 if retention.lag else 2)  # the exact token, the accumulator
    elif retention.home(())[0] is not None:
        total += b * apply + (2 * n * apply if delta else 0)
    return keys, queries, total + end


def _groups(taken: int, tokens: int, chunk: int, every: int) -> list[tuple[int, int, int]]:
    """How many steps a group has, how many tokens these have seen, and how many queries read what they leave."""
    groups = step_groups(taken, tokens, chunk, every)
    return [(g.steps.stop - g.steps.start, g.seen, chunk - g.first) for g in groups]


def _columns(rule: Rule) -> int:
    """Columns on phi* that a state with a horizon comes to hold."""
    features, window = rule.features, rule.window
    return (getattr(features, "horizon", None) or 0) + window.chunk + window.size - 2
