"""The chunk recurrence of gradient descent over a whole sequence, in two kernels: forward, and its gradient.

The same function as forms/chunkwise.py for the rules that ``dispatch.chunk_refusal`` admits. The forward kernel leaves
the memory before every chunk behind, ``ceil(time / chunk)`` memories a head, from which the backward kernel recomputes
each chunk; where no gradient is wanted only two are kept. The equations: chunk_parts.py and chunk_backward.py.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..mathematics.bias import L2
from ..mathematics.gates import CompleteGates
from ..mathematics.networks import MLP
from ..mathematics.rules import Rule
from ..mathematics.state import Matrix, MemoryState
from .chunk_backward import backward
from .chunk_forward import forward


def chunk_recurrence(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, gate: CompleteGates, state: MemoryState
) -> tuple[Tensor, MemoryState]:
    """Read and write from ``state``, every row of which must stand at the start of a chunk.

    Args:
        rule: one that ``dispatch.chunk_refusal`` admits.
        q, k, v: ``[batch, heads, time, dim]``, time >= 1; float32, bfloat16 or (in the interpreter) float64.
        gate: eta, alpha ``[batch, heads, time]`` and gamma ``[batch, heads, time, c]``; theta and delta are not read.

    Returns:
        y ``[batch, heads, time, dim]`` in q's dtype and the state after the last token. Differentiable once.
    """
    time, past = q.shape[-2], rule.window.size - 1
    deep = len(state.matrices) == 2
    past_k, past_v = torch.cat([state.k.to(k), k], -2), torch.cat([state.v.to(v), v], -2)
    alpha = gate.alpha if rule.retention.gated else torch.ones_like(gate.eta)
    inputs = (q, past_k, past_v, alpha, gate.eta, gate.gamma, state.weights[0] if deep else None, state.weights[-1])
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y, *ends = _ChunkRecurrence.apply(rule, differentiable, *inputs)
    frozen, weights = ends[2:] if time % rule.window.chunk == 0 else ends[:2], ends[2:]
    matrices = tuple(Matrix(w, f) for w, f in zip(weights, frozen, strict=True) if w is not None and f is not None)
    past_k, past_v = (x[..., past_k.shape[-2] - past :, :] for x in (past_k, past_v))
    return y, MemoryState(matrices, past_k, past_v, state.keys, state.seen + time)


class _ChunkRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: Rule,
        differentiable: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        eta: Tensor,
        gamma: Tensor,
        first: Tensor | None,
        second: Tensor,
    ) -> tuple[Tensor | None, ...]:
        inputs = [x.contiguous() for x in (q, k, v, alpha, eta, gamma)]
        time, values = q.shape[-2], options(rule, q.shape[-1])
        count = -(-time // values["CHUNK"])
        slots = count + 1 if differentiable else 2
        memories = [None if w is None else w.new_empty(slots, *w.shape) for w in (first, second)]
        for memory, start in zip(memories, (first, second), strict=True):
            if memory is not None and start is not None:
                memory[0] = start
        y, scale = torch.empty_like(inputs[0]), second.new_tensor([_scale(rule)])
        w1, w2 = (memories[1] if m is None else m for m in memories)  # without a W_1 its pointer is not read
        with torch.cuda.device_of(q):
            forward[_grid(q)](*inputs, w1, w2, y, time, slots, scale, **values)
        ctx.save_for_backward(*inputs, *memories)
        ctx.rule = rule
        ends = [None if m is None else m[at % slots].clone() for at in (count - 1, count) for m in memories]
        return y, *ends

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, first, second = ctx.saved_tensors
        work = {"dtype": second.dtype, "device": second.device}
        by_input = [torch.zeros(x.shape, **work) for x in inputs]
        values, time = options(ctx.rule, grad_y.shape[-1], backwards=True), grad_y.shape[-2]
        ends = [second if first is None else first, second]
        frozen, end = (
            [torch.zeros_like(m[0]) if g is None else g.contiguous() for g, m in zip(pair, ends, strict=True)]
            for pair in (grads[:2], grads[2:])
        )
        by_memory = [g.clone(memory_format=torch.contiguous_format) for g in end]
        scale = second.new_tensor([_scale(ctx.rule)])
        backward[_grid(grad_y)](
            *inputs, *ends, grad_y.contiguous(), *frozen, *by_input, *by_memory, time, scale, **values
        )
        by_input = [g.to(x.dtype) for g, x in zip(by_input, inputs, strict=True)]
        return None, None, *by_input, None if first is None else by_memory[0], by_memory[1]


def _grid(x: Tensor) -> tuple[int]:
    return (x.shape[0] * x.shape[1],)


def _scale(rule: Rule) -> float:
    """kappa."""
    return 1.0 if rule.bias.is_linear else 2.0 * cast(L2, rule.bias).scale


def options(rule: Rule, dim: int, backwards: bool = False) -> dict[str, Any]:
    """The compile-time values of a kernel for heads of ``dim``. Blocks and warps are the fastest of the few that were
    tried on an H200 (docs/kernels.md). Of blocks of 16 and 8 warps Triton 3.6 makes code that reads beyond shared
    memory."""
    deep, network, chunk = len(rule.network.lifted) == 2, cast(MLP, rule.network), rule.window.chunk
    small = dim <= 64 and chunk + rule.window.size - 1 <= 64
    block = 16 if backwards else 64 if small else 32
    return {
        "HIDDEN": network.expansion * dim if deep else dim,
        "DIM": dim,
        "BLOCK": math.gcd(block, network.expansion * dim) if deep else dim,
        "CHUNK": chunk,
        "WINDOW": rule.window.size,
        "PADDED": triton.next_power_of_2(chunk + rule.window.size - 1),
        "DEEP": deep,
        "ACTIVATION": network.activation if deep else "",
        "RESIDUAL": network.residual,
        "L2": not rule.bias.is_linear,
        "PRECISION": "tf32x3",  # three products of TF32 parts, nearly float32; "ieee" takes no tensor cores
        "num_warps": 4,
        "num_stages": 1,
    }
