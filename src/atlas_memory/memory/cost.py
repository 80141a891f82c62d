"""What a rule costs: bytes of state, and multiply-adds a token.

The multiply-adds are those of the matrix products in chunkwise.py, chunk.py, fast_weight.py and muon_steps.py, forward,
for one chunk of b tokens with its N = b + c - 1 window tokens, divided by b. Element-wise work is left out, as are
projections, gates and convolution, which belong to the layer, and the spare places of chunkwise.py. Newton-Schulz is
counted as products, though one or two cores go by eigenvalues. Both numbers are held against a real call in
tests/memory/test_cost.py.
"""

from __future__ import annotations

from .chunk import takes_token_space
from .fast_newton_schulz import gram_cost, schulz_cost
from .features import Polynomial
from .muon_steps import cheapest_space, step_groups
from .networks import POWER_STEPS, GatedMLP
from .optimisers import Muon
from .rules import Rule


def state_bytes(rule: Rule, dim: int, heads: int) -> int | None:
    """Bytes of the ``MemoryState`` of one sequence in float32, for ``heads`` memories over keys of width ``dim``.

    None where it grows with what is read; with a horizon, the size that it reaches.
    """
    if rule.features.endless and rule.features.horizon is None:
        return None
    columns, past = _columns(rule) if rule.features.endless else 0, rule.window.size - 1
    lifted = zip(rule.shapes(dim), rule.network.lifted, strict=True)
    entries = sum(m * (columns if up and rule.features.endless else f) for (m, f), up in lifted)
    copies = 2 + rule.accumulators + rule.retention.settles  # frozen, weights, momentum, dual
    window = past * (2 * dim + rule.bias.has_delta)
    return 4 * heads * (copies * entries + window + columns * dim) + 8  # and ``seen``


def multiply_adds(rule: Rule, dim: int, heads: int) -> int | None:
    """Multiply-adds a token to read and write the ``heads`` memories of a layer, in ``chunkwise``.

    None where they grow with what is read; with a horizon, those of a call of one chunk (a longer call keeps the
    columns of its own tokens to its end).
    """
    b, n = rule.window.chunk, rule.window.chunk + rule.window.size - 1
    by_key = rule.features.endless
    if rule.features.endless and rule.features.horizon is None:
        return None
    total, shared, live = 0, False, rule.live
    if by_key:
        total += (n + b) * _columns(rule) * dim  # the kernel against the columns held
    elif isinstance(rule.features, Polynomial) and rule.features.degree > 1:
        total += (n + b) * dim**2 * (dim + 1)  # the two factors of the monomials of degree 2
    shapes = rule.shapes(dim)
    schedules = len(shapes) if rule.optimiser.bounded else 1
    if rule.optimiser.waits and live:
        pass  # P is a product of scalars for each pair
    elif rule.optimiser.has_momentum and live:
        total += schedules * b**3  # R
    elif rule.optimiser.has_momentum and rule.window.size > 1:
        total += schedules * (b if b % rule.every else b // rule.every) * b * n  # P
    if rule.optimiser.bounded:
        total += (schedules * b * n if rule.window.size > 1 else 0) + _spectral_norms(rule, dim)
    last = len(shapes) - 1
    for i, ((m, f), lifted) in enumerate(zip(shapes, rule.network.lifted, strict=True)):
        if not lifted:
            apply, write, inner = m * f, m * f, f
            total += (b * rule.window.size if live else n) * m * f  # the error at its input
        else:
            apply, write, inner = (m * _columns(rule), 0, dim) if by_key else (m * f, m * f, dim)
        solves = (live and i == last) or rule.optimiser.erases
        home = rule.retention.home(())[0] is not None and not (by_key and lifted)
        keys, queries, steps = _steps(rule, m, f, apply, write, inner, live, solves, home)
        total += n * apply + steps
        if not (lifted and shared):  # lifted matrices share their kernels
            total += (keys * n + queries * b) * n * inner
        shared = shared or lifted
    return round(heads * total / b)


def _spectral_norms(rule: Rule, dim: int) -> int:
    """Of the matrices after the first, or of a gated memory's last."""
    network, shapes = rule.network, rule.shapes(dim)
    later = shapes[-1:] if isinstance(network, GatedMLP) else shapes[1:]
    biased = getattr(network, "bias", False)
    return sum((2 * POWER_STEPS + 1) * m * (f - biased) for m, f in later)


def _steps(
    rule: Rule, m: int, f: int, apply: int, write: int, inner: int, live: bool, solves: bool, home: bool
) -> tuple[bool, bool, int]:
    """Whether the steps of one matrix need the kernel among keys, and that of queries with keys; and their
    multiply-adds in a chunk without these, given those of applying it to a token, of adding a token to it and of one
    entry of the kernel; ``solves``: whether its updates solve a triangular system; ``home``: whether it fades to
    M_0."""
    b, n = rule.window.chunk, rule.window.chunk + rule.window.size - 1
    taken, optimiser, retention = -(-b // rule.every), rule.optimiser, rule.retention
    reads, updates = rule.window.read != "frozen", b * rule.window.size if live else n
    settles = retention.settles
    keys, queries = solves, reads
    total, end = b * apply, n * write  # reading what was there before the chunk; making a W_b
    ends = (4 if retention.lag else 2) if settles else 1  # the exact token's W_1, and A, besides
    if not isinstance(optimiser, Muon):
        if not live and (optimiser.has_momentum or rule.window.size > 1):  # else R is at hand or a product of scalars
            total += (b + ends if reads else ends) * taken * n
        total += b * updates * m if reads else 0
        total += b * taken + b * apply if optimiser.has_momentum and reads else 0
        if solves:
            total += updates**2 * m // 2 + (n * apply if home else 0)  # the system
            total += b * taken + n * apply if optimiser.has_momentum else 0
            total += 2 * n * write + n * apply if retention.lag else 0
    elif takes_token_space(rule, m, f):
        t, queries = 2 * n, False
        total += t * t * (inner + m) + (b * t * inner if reads else 0)
        for count, seen, left in _groups(taken, t, b, rule.every):
            total += count * (seen**3 * (1 + optimiser.bounded) + gram_cost(seen, optimiser.steps))
            total += left * seen * (count * seen + m) if reads else 0
        end, write = t * t * m + t * write, 0
    elif cheapest_space(m, f, taken, n, b, optimiser.steps, rule.every) == "outputs":
        keys = True
        total += n * apply + m * m * f + (b * apply if reads else 0)
        for count, seen, left in _groups(taken, n, b, rule.every):
            total += count * (seen * m * (seen + m) + gram_cost(m, optimiser.steps) + optimiser.bounded * m**3)
            total += count * left * m * (seen + m) if reads else 0
            end += count * seen * m * m
        end += m * m * f
    else:
        for count, seen, left in _groups(taken, n, b, rule.every):
            total += count * (seen * m * f + schulz_cost(m, f, optimiser.steps) + (left * m * f if reads else 0))
        queries, end = False, 0
    if optimiser.waits and solves:
        keys = True
        total += updates**2 * m // 2 + n * apply  # the system; what plain steps changed before
    if optimiser.has_momentum:
        total += n * write
    if settles:
        first = solves and not optimiser.waits
        total += b * apply + (n * apply if first else 0)  # the exact token; W_0, which is not the frozen one
    total += b * apply if home and reads else 0
    return keys, queries, total + end * ends


def _groups(taken: int, tokens: int, chunk: int, every: int) -> list[tuple[int, int, int]]:
    """How many steps a group has, how many tokens these have seen, and how many queries read what they leave."""
    groups = step_groups(taken, tokens, chunk, every)
    return [(g.steps.stop - g.steps.start, g.seen, chunk - g.first) for g in groups]


def _columns(rule: Rule) -> int:
    """Columns on phi* that a state with a horizon comes to hold."""
    features, window = rule.features, rule.window
    return (getattr(features, "horizon", None) or 0) + window.chunk + window.size - 2
