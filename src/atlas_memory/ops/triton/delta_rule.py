"""The delta rule over a whole sequence, plain or gated: three kernels forward and three backward. What a chunk does is
computed for all chunks together, and one kernel carries the matrix from chunk to chunk. The equations: delta_common.py.

The same function as ops/chunkwise.py for the rules that ``dispatch.delta_refusal`` admits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton

from ...rules.gates import CompleteGates
from ...rules.rule import Rule
from ...rules.state import Matrix, MemoryState
from ..triton import delta_backward, delta_forward
from .kernel_check import distance

Plain = Callable[..., tuple[Tensor, Tensor, Tensor]]


def delta_recurrence(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: CompleteGates,
    state: MemoryState,
    plain: Plain,
    group: int | None = None,
) -> tuple[Tensor, MemoryState]:
    """Read and write from ``state``, every row of which must stand at the start of a chunk.

    Args:
        rule: one that ``dispatch.delta_refusal`` admits.
        q, k, v: ``[batch, heads, time, dim]``, time >= 1; float32 or (in the interpreter) float64.
        gate: eta, alpha ``[batch, heads, time]`` and gamma ``[batch, heads, time, 1]``.
        plain: the function of q, k, v, alpha, eta and the matrix that gives y and the matrices after the last token and
            before the last chunk, in PyTorch, for gradients of gradients.
        group: how many chunks are read at a time, of which the backward pass keeps nothing but the matrix before them;
            None: all, with what each of them has written, or where no gradient is wanted ``GROUP``.

    Returns:
        y ``[batch, heads, time, dim]`` and the state after the last token.
    """
    time, chunk = q.shape[-2], rule.window.chunk
    eta = gate.eta * gate.gamma[..., 0]
    alpha = gate.alpha if rule.retention.gated else torch.ones_like(eta)
    end = start = state.weights[0]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, alpha, eta, end))
    width = chunk * (group or (-(-time // chunk) if wanted else GROUP))
    form = partial(_Delta.apply, options(rule, q.shape[-1]), plain, group is None)
    outputs = []
    for tokens in zip(*(x.split(width, 2) for x in (q, k, v, alpha, eta)), strict=True):
        y, end, start = form(*tokens, end)
        outputs.append(y)
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    frozen = end if time % rule.window.chunk == 0 else start
    after = MemoryState((Matrix(end, frozen),), state.k, state.v, state.keys, state.seen + time)
    return rule.network.end(q, y, None), after


GROUP = 64
"""Chunks that are read at a time where nothing is kept for a backward pass. What the kernels leave for one another is
four times as large as q."""


def options(rule: Rule, dim: int) -> dict[str, Any]:
    """The compile-time values of the kernels for heads of ``dim``. Blocks of 32 with 4 warps were the fastest of the
    few that were tried on an H200 (notes/kernels.md); of blocks of 16 and 8 warps Triton 3.6 makes code that reads
    beyond its memory."""
    wide = max(16, triton.next_power_of_2(dim))
    return {
        "CHUNK": rule.window.chunk,
        "DIM": dim,
        "WIDE": wide,
        "ROWS": min(32, wide),
        "BLOCK": min(32, wide),
        "AFTER": rule.optimiser.after_decay,
        "PRECISION": "tf32x3",  # three products of TF32 parts, nearly float32
        "num_warps": 4,
        "num_stages": 1,
    }


def deviation(plain: Callable[..., tuple[Tensor, ...]], rule: Rule, dim: int, device: torch.device) -> float:
    """How far the kernels for heads of ``dim`` are from ``plain`` in float64, a function of the rule and of what the
    argument ``plain`` of ``delta_recurrence`` is a function of, on two chunks and a few tokens: see ``distance`` of
    kernel_check.py."""
    time, draw = 2 * rule.window.chunk + 5, torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(2, 2, *shape, generator=draw, dtype=torch.float32).to(device)

    q, k, v = (randn(time, dim) * dim**-0.5 for _ in "qkv")
    alpha, eta, matrix = (2.0 + randn(time)).sigmoid(), randn(time).sigmoid(), randn(dim, dim)
    alpha = alpha if rule.retention.gated else torch.ones_like(alpha)
    by, results, reference = (randn(time, dim), randn(dim, dim), randn(dim, dim)), [], partial(plain, rule)
    for form, dtype in (
        (partial(_Delta.apply, options(rule, dim), reference, True), torch.float32),
        (reference, torch.float64),
    ):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, alpha, eta, matrix)]
        wanted = [x for x in inputs if rule.retention.gated or x is not inputs[3]]
        outputs = form(*inputs)
        results.append([*outputs, *torch.autograd.grad(outputs, wanted, [x.to(dtype) for x in by])])
    return distance(*results)


class Written(NamedTuple):
    """What the forward kernels leave behind: T, w, G, the last row of D, c_b and S (delta_common.py)."""

    solved: Tensor
    written: Tensor
    through: Tensor
    tail: Tensor
    whole: Tensor
    matrix: Tensor


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: dict[str, Any],
        plain: Plain,
        keep: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        eta: Tensor,
        initial: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = q, k, v, alpha, eta, initial
        q, k, v, alpha, eta, initial = _laid_out(inputs)
        work = _write(values, k, v, alpha, eta, initial)
        y = torch.empty_like(q)
        _each_chunk(delta_forward.read, values, q, k, alpha, eta, work.written, work.matrix, y)
        ctx.save_for_backward(*inputs, *(work if keep else ()))  # as given: a copy would have no graph
        ctx.values, ctx.plain = values, plain
        dim, matrix = q.shape[-1], work.matrix.unflatten(0, q.shape[:2])
        end, start = (matrix[:, :, at, :dim, :dim].clone() for at in (-1, -2))
        return y, end, start

    @staticmethod
    def backward(ctx: Any, by_y: Tensor, by_end: Tensor, by_start: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing gives each only once
        inputs, work = saved[:6], saved[6:]
        if torch.is_grad_enabled():  # gradients of gradients are wanted
            grads = iter(_plain_gradients(ctx, inputs, (by_y, by_end, by_start)))
            return None, None, None, *(next(grads) if wanted else None for wanted in ctx.needs_input_grad[3:])
        q, k, v, alpha, eta, initial = _laid_out(inputs)
        values = ctx.values
        work = Written(*work) if work else _write(values, k, v, alpha, eta, initial)
        count = work.matrix.shape[1] - 1
        (by_y,) = _alike(by_y, like=q)
        by_q, by_k, by_v = (torch.empty_like(q) for _ in range(3))
        by_alpha, by_eta = torch.empty_like(alpha), torch.empty_like(eta)
        by_written, by_initial = torch.empty_like(work.written), torch.empty_like(initial)
        by_matrix = work.matrix.new_empty(work.matrix.shape[0], count, *work.matrix.shape[2:])
        _each_chunk(
            delta_backward.read_back, values, q, k, alpha, eta, work.written, work.matrix, by_y,
            by_q, by_k, by_alpha, by_eta, by_written, by_matrix,
        )  # fmt: skip
        dim = q.shape[-1]
        by_matrix[:, -1, :dim, :dim] += by_start.flatten(0, 1)
        _each_block_of_rows(
            delta_backward.carry_back, values, k, eta, work.through, work.tail, work.whole, by_end.contiguous(),
            by_written, by_matrix, by_initial,
        )  # fmt: skip
        _each_chunk(
            delta_backward.write_back, values, k, alpha, eta, work.solved, work.written, work.matrix, work.tail,
            work.whole, by_written, by_matrix, by_k, by_v, by_alpha, by_eta,
        )  # fmt: skip
        return None, None, None, by_q, by_k, by_v, by_alpha, by_eta, by_initial


def _plain_gradients(ctx: Any, inputs: Sequence[Tensor], by: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients of those inputs that have one, which can be differentiated again."""
    pairs = [(x, g) for x, g in zip(ctx.plain(*inputs), by, strict=True) if x.requires_grad]
    needed = [x for x, wanted in zip(inputs, ctx.needs_input_grad[3:], strict=True) if wanted]
    outputs, grads = [x for x, _ in pairs], [g for _, g in pairs]
    return torch.autograd.grad(outputs, needed, grads, create_graph=True, allow_unused=True)


def _write(values: dict[str, Any], k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, initial: Tensor) -> Written:
    """What the first two kernels make."""
    pairs, count, b, wide = k.shape[0] * k.shape[1], -(-k.shape[2] // values["CHUNK"]), values["CHUNK"], values["WIDE"]
    sizes = ((count, b, b), (count, b, wide), (count, b, wide), (count, b), (count,), (count + 1, wide, wide))
    work = Written(*(k.new_empty(pairs, *size) for size in sizes))
    _each_chunk(delta_forward.write, values, k, v, alpha, eta, *work[:5])
    _each_block_of_rows(
        delta_forward.carry, values, k, eta, work.through, work.tail, work.whole, initial, work.written, work.matrix
    )
    return work


def _laid_out(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """q, k and v of one layout, and the others contiguous."""
    return *_alike(*inputs[:3]), *(x.contiguous() for x in inputs[3:])


def _alike(*tensors: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """The tensors with the strides of the first (or of ``like``), whose last is 1."""
    first = tensors[0] if like is None else like
    if first.stride(-1) != 1:
        first = first.contiguous()
    if first.is_contiguous() or torch.empty_like(first).stride() == first.stride():
        return tuple(x if x.stride() == first.stride() else torch.empty_like(first).copy_(x) for x in tensors)
    return tuple(x.contiguous() for x in tensors)


def _each_chunk(kernel: Any, values: dict[str, Any], first: Tensor, *tensors: Tensor) -> None:
    """Launch a program for every chunk; ``first`` is q or k."""
    count = -(-first.shape[2] // values["CHUNK"])
    _launch(kernel, (first.shape[0] * first.shape[1] * count,), values, first, *tensors)


def _each_block_of_rows(kernel: Any, values: dict[str, Any], k: Tensor, *tensors: Tensor) -> None:
    """Launch a program for every block of rows of the matrix of every sequence and head."""
    _launch(kernel, (k.shape[0] * k.shape[1], values["WIDE"] // values["ROWS"]), values, k, *tensors)


def _launch(kernel: Any, layout: tuple[int, ...], values: dict[str, Any], first: Tensor, *tensors: Tensor) -> None:
    count = -(-first.shape[2] // values["CHUNK"])
    known = {name: x for name, x in values.items() if name.islower() or name in kernel.arg_names}
    with torch.cuda.device_of(first):
        kernel[layout](first, *tensors, first.shape[2], first.shape[1], count, *first.stride()[:3], **known)
