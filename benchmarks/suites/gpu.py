"""Memories on a GPU, eager, recorded, compiled and by kernels; and the kernel of Newton-Schulz on Gram matrices.

``RULE`` has bare steps at frozen gradients on plain keys, and fades to zero. ``DELTA`` has kernels. What all are held
against in float64 is, for a memory's chunks, ``recurrent``, over two chunks and a few tokens of two heads; for
Newton-Schulz the polynomial in PyTorch, of 64 matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atlas_memory.memory import (
    RULES,
    Decay,
    GradientDescent,
    Identity,
    Linear,
    MemoryState,
    Rule,
    Window,
    chunkwise,
    gram_polynomial,
)
from atlas_memory.ops.cuda_graphs import Graphs
from benchmarks.operations import FORM, SEED, bare_memory
from benchmarks.registry import Benchmark, Candidate, Cost, Operation, Shape, Wrap

RULE = replace(
    RULES["omeganet"],
    features=Identity(),
    retention=Decay(),
    optimiser=GradientDescent(normalised=False, online=False),
    window=Window(size=1, chunk=64),
)
DELTA = RULES["gated-deltanet"].vary(window={"chunk": 64})
"""A rule that is taken as it is, but for its chunk."""
MEMORIES: dict[str, Rule] = {"MLP": RULE, "linear": replace(RULE, network=Linear()), "delta rule": DELTA}
RAGGED = 2 * RULE.window.chunk + 5
"""Tokens over which the chunk recurrence is verified."""
STEPS = 5
"""Of Newton-Schulz."""


def model_of_chunk(rule: Rule, shape: Shape, backward: bool = False) -> Cost:
    """FLOPs and bytes of a chunk's matrix products, at the least; ``backward``: of that pass alone.

    Per chunk of b tokens, with N = b + c - 1 and H hidden units: forward 6 products of N H d multiply-adds (h twice, p,
    F and both writes), 2 of b H d, 2 of b N H; backward, with its recomputation, 17, 5 and 6. Bytes: q, k, v, y once,
    the memory written once and read twice; backward q, k, v, y's gradient and four gradients, the memory read three
    times, its gradient read and written twice.
    """
    dim, chunk = shape.dim, rule.window.chunk
    window, shapes = chunk + rule.window.size - 1, rule.shapes(dim)
    hidden, deep = shapes[-1][1], len(shapes) == 2
    memory = sum(rows * columns for rows, columns in shapes)
    n_h_d, b_h_d, b_n_h = window * hidden * dim, chunk * hidden * dim, chunk * window * hidden
    if backward:
        products = 17 * n_h_d + 5 * b_h_d + 6 * b_n_h if deep else 5 * n_h_d + 2 * b_h_d + 3 * b_n_h
        moved = 8 * chunk * dim + 7 * memory
    else:
        products = 6 * n_h_d + 2 * b_h_d + 2 * b_n_h if deep else 2 * n_h_d + b_h_d + b_n_h
        moved = 4 * chunk * dim + 3 * memory
    chunks = shape.batch * shape.heads * -(-shape.time // chunk)
    return Cost(2.0 * products * chunks, 4.0 * moved * chunks)


def model_of_delta(shape: Shape, backward: bool = False) -> Cost:
    """The same of the kernels of the delta rule (delta_parts.py): 5 products of b b d multiply-adds, 3 of b d d
    and 4 of b b b; backward 9 and 6. Bytes: q, k, v and y once, T, U, w, G and S as they are written and read; backward
    these and the gradients."""
    dim, chunk = shape.dim, DELTA.window.chunk
    b_b_d, b_d_d = chunk * chunk * dim, chunk * dim * dim
    products = 9 * b_b_d + 6 * b_d_d if backward else 5 * b_b_d + 3 * b_d_d + 4 * chunk**3
    moved = 17 * chunk * dim + chunk**2 + 6 * dim**2 if backward else 12 * chunk * dim + chunk**2 + 2 * dim**2
    chunks = shape.batch * shape.heads * -(-shape.time // chunk)
    return Cost(2.0 * products * chunks, 4.0 * moved * chunks)


def model_of_gram(shape: Shape, backward: bool = False) -> Cost:
    """FLOPs of the kernel's products; bytes of G and Q, and of the gradients; ``backward``: of that pass alone."""
    products = 7 * STEPS + 1 + 2 * STEPS * (STEPS - 1) if backward else 4 * STEPS - 3
    return Cost(2.0 * products * shape.dim**3 * shape.heads, (3 if backward else 2) * 4.0 * shape.dim**2 * shape.heads)


def graphed() -> FORM:
    """``chunkwise`` whose calls are recorded as CUDA graphs, each at its first."""
    graphs = Graphs()
    graphs.calls = 0

    def form(*arguments: Any, **how: Any) -> tuple[Tensor, MemoryState]:
        return graphs(partial(chunkwise, kernels=False, **how), *arguments)

    return form


def _chunks(memory: str, backward: bool) -> Iterator[Candidate]:
    """The forms of a memory."""
    rule, way = MEMORIES[memory], "forward and backward" if backward else "forward"
    cost = model_of_delta if rule is DELTA else partial(model_of_chunk, rule)
    forms = {"eager": partial(chunkwise, kernels=False), "kernel": partial(chunkwise, kernels=True)}
    oracle = None
    for form in ("eager", "graphed", *(["kernel"] if rule is DELTA else []), "compiled and graphed"):
        candidate = bare_memory(
            f"{memory}, {form}, {way}",
            rule,
            forms[form] if form in forms else graphed(),
            baseline=form == "eager",
            group=f"{memory}, {way}",
            kernel=form == "kernel",
            compile=form == "compiled and graphed",
        )
        oracle = oracle or candidate.oracle
        yield replace(
            candidate,
            oracle=oracle,
            backward=backward,
            reduce=lambda shape: replace(shape, batch=1, heads=min(shape.heads, 2), time=min(shape.time, RAGGED)),
            cost=cost,
            backward_cost=partial(cost, backward=True),
        )


def _gram(kernel: bool, backward: bool) -> Candidate:
    """Newton-Schulz on G = S S^T, a matrix a head, of as many rows as the head is wide; S has ``time`` columns."""

    def problem(kernels: bool, shape: Shape, dtype: torch.dtype) -> Operation:
        # In float32 for every dtype: what rounding does to G itself is multiplied by up to 485, whatever comes after.
        draw = torch.Generator().manual_seed(SEED)
        s = torch.randn(shape.batch, shape.heads, shape.dim, shape.time, generator=draw)
        gram = s @ s.mT
        gram = (0.5 * (gram + gram.mT)).to(shape.device, dtype).requires_grad_()
        return Operation(partial(gram_polynomial, steps=STEPS, kernels=kernels), gram)

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        return problem(kernel, shape, dtype)

    way = "forward and backward" if backward else "forward"
    return Candidate(
        f"{'kernel' if kernel else 'eager'}, {way}",
        build,
        oracle=partial(problem, False),
        cost=model_of_gram,
        backward_cost=partial(model_of_gram, backward=True),
        reduce=lambda shape: replace(shape, heads=min(shape.heads, 64)),
        baseline=not kernel,
        group=way,
        kernel=kernel,
        backward=backward,
    )


CHUNK = Benchmark(
    name="gpu-chunk",
    shows="What recording, compiling and kernels save on a GPU, at 16 heads of 64 and chunks of 64.",
    shapes=tuple(Shape(batch=max(1, 16384 // time), heads=16, dim=64, time=time) for time in (2048, 8192, 32768)),
    quick=(Shape(batch=1, heads=1, dim=16, time=RAGGED),),
    candidates=tuple(c for memory in MEMORIES for backward in (False, True) for c in _chunks(memory, backward)),
    columns=(
        "shape",
        "candidate",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "tokens/s",
        "of sgemm",
        "of tf32",
        "of copy",
        "peak MB",
        "compile s",
        "check",
    ),
    device="cuda",
)

NEWTON_SCHULZ = Benchmark(
    name="gpu-newton-schulz",
    shows="What the Triton kernel of Newton-Schulz saves on a GPU: 4,096 Gram matrices of 64 or 16 rows, one a head.",
    shapes=tuple(Shape(batch=1, heads=4096, dim=rows, time=2 * rows) for rows in (64, 16)),
    quick=(Shape(batch=1, heads=2, dim=16, time=32),),
    candidates=tuple(_gram(kernel, backward) for backward in (False, True) for kernel in (False, True)),
    columns=(
        "shape",
        "candidate",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "of sgemm",
        "of batched",
        "of copy",
        "peak MB",
        "check",
    ),
    device="cuda",
)
