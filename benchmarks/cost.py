"""The written model: floating-point operations and bytes of one forward call. Backward counts twice as much.

Operations are those of matrix products, a multiplication and an addition counted apart; element-wise work counts as
bytes only. Those inside a memory are ``atlas_memory.ops.flops.multiply_adds``. Bytes are the traffic that no fusion
within an operator saves: every linear map and convolution reads its input and writes its output, the memory reads q,
k, v and writes y, and at every chunk reads and writes its state; parameters are read once. All float32.
"""

from __future__ import annotations

from atlas_memory.layers.tnt import Hierarchy
from atlas_memory.memory import Rule
from atlas_memory.ops.flops import PRODUCTS, multiply_adds, state_bytes
from atlas_memory.ops.muon_space import MuonSpace
from benchmarks.registry import Cost, Shape

FLOAT = 4
BACKWARD = 2.0
"""Operations of a backward pass, in forward passes: each product has two in its place."""


def linear(tokens: int, inputs: int, outputs: int) -> Cost:
    """A linear map of ``tokens`` rows."""
    weights = inputs * outputs
    return Cost(2.0 * tokens * weights, FLOAT * (tokens * (inputs + outputs) + weights))


def attention(shape: Shape) -> Cost:
    """q, k, v of one linear map, causal softmax attention, the map of its outputs. Of the scores the causal half."""
    tokens, width, time = shape.tokens, shape.width, shape.time
    pairs = shape.batch * (time * (time + 1) / 2 + time * shape.context)
    past = 2 * shape.batch * shape.context * width  # the cache
    inside = Cost(4.0 * pairs * width, FLOAT * (4 * tokens * width + past))
    return total(linear(tokens, width, 3 * width), inside, linear(tokens, width, width))


def memory(rule: Rule, shape: Shape, muon_space: MuonSpace = PRODUCTS) -> Cost:
    """The bare memory, q, k, v to y."""
    work, state = multiply_adds(rule, shape.dim, shape.heads, muon_space), state_bytes(rule, shape.dim, shape.heads)
    if work is None or state is None:
        raise ValueError(f"the state of {rule.features} grows with what is read: give its features a horizon")
    chunks = -(-shape.time // rule.window.chunk)
    moved = 4 * FLOAT * shape.tokens * shape.width + 2 * shape.batch * chunks * state
    return Cost(2.0 * shape.tokens * work, moved)


def layer(rule: Rule, shape: Shape, hierarchy: Hierarchy | None = None) -> Cost:
    """``NeuralMemory``: projections, convolution, gates and the memory, or the memories of a hierarchy."""
    tokens, width = shape.tokens, shape.width
    rules = (rule,) if hierarchy is None else hierarchy.rules(rule)
    parts = [linear(tokens, width, outputs) for outputs in (3 * width, width, width)]
    parts += [linear(tokens, width, gates(rule) * shape.heads) for rule in rules]
    parts += [Cost(0.0, FLOAT * 2 * tokens * 3 * width)]  # the convolution, a pass a tap: element-wise
    parts += [memory(rule, shape) for rule in rules]
    if hierarchy is not None and hierarchy.project is not None:
        spans = (hierarchy.shard,) if hierarchy.project == "shard" else hierarchy.local_chunks
        parts += [projection(shape, span, hierarchy.project == "shard") for span in spans]
    return total(*parts)


def gates(rule: Rule) -> int:
    """Gates a head and token that the layer computes for a rule."""
    window = rule.window.size if rule.window.size > 1 else 0
    return 1 + rule.retention.gated + rule.optimiser.has_momentum + rule.bias.has_delta + window


def projection(shape: Shape, span: int, carried: bool) -> Cost:
    """P_t q_t over spans of tokens (layers/tnt.py): the causal product in blocks, and what was before."""
    block = min(shape.time, span, shape.dim) if carried else span
    a_token = 2 * block * shape.dim + (2 * shape.dim**2 if carried else 0)
    return Cost(2.0 * shape.tokens * shape.heads * a_token, FLOAT * 3 * shape.tokens * shape.width)


def total(*parts: Cost) -> Cost:
    """The sum."""
    return Cost(sum(p.flops for p in parts), sum(p.bytes for p in parts))
