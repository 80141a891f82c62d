"""Which calls take a kernel: functions of device type, dtype, shapes and rule, and of what the caller asks. No Triton
is imported.

Those of the delta rule and of the short convolution are taken on a GPU unless ATLAS_MEMORY_KERNELS=0 is in the
environment, once they have been tried there (proof.py). The others wait to be asked for: ``kernels=True``, or
ATLAS_MEMORY_KERNELS=1. Triton compiles each for seconds, and in training a chunk recurrence recorded as a CUDA graph
(forms/graphed.py) is faster (docs/gpu.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from ..mathematics.bias import L2, DotProduct
from ..mathematics.features import Identity
from ..mathematics.gates import CompleteGates
from ..mathematics.networks import MLP, Linear
from ..mathematics.optimisers import DeltaGradientDescent, GradientDescent
from ..mathematics.retention import Decay, Keep
from ..mathematics.rules import Rule

SWITCH = "ATLAS_MEMORY_KERNELS"
"""The environment variable that lets all kernels be taken (1), or none (anything else); not set: those that are taken
unasked."""

INTERPRETER = "TRITON_INTERPRET"
"""The environment variable by which Triton runs kernels on the CPU, to try them."""

KINDS: dict[str, tuple[type, ...]] = {
    "features": (Identity,),
    "network": (Linear, MLP),
    "bias": (L2, DotProduct),
    "optimiser": (GradientDescent,),
    "retention": (Decay, Keep),
}
"""The parts of a rule that the chunk kernels know."""

DELTA: dict[str, tuple[type, ...]] = {
    "features": (Identity,),
    "network": (Linear,),
    "bias": (DotProduct,),
    "optimiser": (DeltaGradientDescent,),
    "retention": (Decay, Keep),
}
"""Those of the delta rule, whose kernels know no other."""

DELTA_WIDTHS = (16, 32, 48, 64)
"""Head widths of its kernels: what 16 does not divide would be another kernel of Triton's than the one tried."""

WIDTHS = (16, 32, 64, 128)
"""Head widths of the chunk kernels."""

CHUNKS = (16, 32, 64)
"""Their chunks b."""

GRAM_SIZE = 64
"""The largest Gram matrix: at 128 the backward kernel asks for more shared memory than an SM of an H200 has."""

GRAM_TRAINED = 16
"""The largest that the environment makes a kernel take where a gradient is wanted: at 64 rows the backward kernel makes
it five times as slow as PyTorch, at 16 it takes an eighth of the time (docs/performance.md)."""


def taken(
    kernels: bool | None,
    refusal: Callable[..., str | None],
    *call: object,
    unasked: Callable[[], bool] | None = None,
) -> bool:
    """Whether a call takes its kernel.

    Args:
        kernels: True: asked for; False: never; None: where the environment variable ``SWITCH`` is 1, or is not set and
            the kernel is one to take ``unasked``.
        refusal: what says of ``call`` why it has no kernel, and what would help; None: it has one.
        unasked: what says whether to take it where nobody has asked for it; None: no.

    Raises:
        ValueError: a kernel was asked for, and the call has none.
    """
    switch = os.environ.get(SWITCH)
    asked = kernels or (kernels is None and switch == "1")
    unasked = None if os.environ.get(INTERPRETER) == "1" else unasked  # slow, and for what is asked for
    if not asked and (kernels is False or switch is not None or unasked is None):
        return False
    why = refusal(*call)
    if kernels and why is not None:
        raise ValueError(f"kernels=True, but no kernel {why}; or leave kernels out")
    return why is None and (bool(asked) or (unasked is not None and unasked()))


def chunk_refusal(rule: Rule, device: str, dtype: torch.dtype, shape: torch.Size, gate: CompleteGates) -> str | None:
    """Why kernels/chunk.py does not compute ``rule`` for q of this device type, dtype and ``shape``
    ``[batch, heads, time, dim]``, to follow "no kernel"; None: it does.

    It computes an MLP of depth 2 or a matrix on plain keys, L2 or the dot product, gradient descent, bare steps at
    frozen gradients, linear retention to zero, gates one a head, in float32 on CUDA, at widths that fit.
    """
    return _of_rule(rule) or _of_shape(rule, shape, gate) or _of_device(device, dtype)


def is_delta(rule: Rule) -> bool:
    """Whether the kernels of ``rule`` are those of the delta rule."""
    return type(rule.optimiser) in DELTA["optimiser"]


def on_cuda(x: Tensor) -> bool:
    """Whether x is a plain tensor on a GPU of CUDA: only then is a kernel taken unasked."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda and torch.version.hip is None


def fast_delta(x: Tensor) -> bool:
    """Whether its kernels are faster than PyTorch where x is, as they were on an H200. For GPUs before Hopper the
    compiler puts up to 11 kB of each thread's numbers into memory (docs/kernels.md); none has been tried."""
    return on_cuda(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def delta_refusal(rule: Rule, device: str, dtype: torch.dtype, shape: torch.Size, gate: CompleteGates) -> str | None:
    """The same of kernels/delta.py, which computes the delta rule: one matrix on plain keys, the dot product, bare
    delta steps, linear retention to zero, gates one a head, in float32 on CUDA, at widths that fit."""
    network, chunk, dim = rule.network, rule.window.chunk, shape[-1]
    unknown = {
        "knows the layer norm: network must have norm=False": network.norm,
        "knows bounded steps: optimiser must have bounded=False": rule.optimiser.bounded,
        "fades to M_0: retention must have to_start=False": rule.retention.to_start,
        f"reads {rule.window.read!r}: window must have read='after'": rule.window.read != "after",
        f"has chunks of {chunk}: window must have chunk={_or(CHUNKS)}": chunk not in CHUNKS,
        f"has heads of width {dim}: it must be {_or(DELTA_WIDTHS)}": dim not in DELTA_WIDTHS,
    }
    why = _of_parts(rule, DELTA) or next((why for why, is_so in unknown.items() if is_so), None)
    return _traced() or why or _of_call(shape, gate) or _of_device(device, dtype)


def convolution_refusal(device: str, dtype: torch.dtype) -> str | None:
    """The same of kernels/convolution.py, which computes in any floating dtype."""
    return _traced() or _of_device(device, dtype, dtype)


def gram_refusal(device: str, dtype: torch.dtype, size: int) -> str | None:
    """Why kernels/gram_newton_schulz.py does not take Gram matrices of this device type and dtype, ``size`` x ``size``,
    to follow "no kernel"; None: it does."""
    if not 0 < size <= GRAM_SIZE:
        return f"takes Gram matrices of {size} rows: they must have 1 to {GRAM_SIZE}"
    return _of_device(device, dtype)


def _of_parts(rule: Rule, known: dict[str, tuple[type, ...]]) -> str | None:
    for part, kinds in known.items():
        if (kind := type(getattr(rule, part))) not in kinds:
            return f"knows {kind.__name__}: {part} must be {_or(each.__name__ for each in kinds)}"
    return None


def _of_rule(rule: Rule) -> str | None:
    if why := _of_parts(rule, KINDS):
        return why
    network, window = rule.network, rule.window
    size, chunk = window.size, window.chunk
    unknown = {
        "knows a memory of more than two matrices: network must have depth=2": len(network.lifted) > 2,
        "knows biases: network must have bias=False": network.bias,
        "knows the layer norm: network must have norm=False": network.norm,
        "knows bounded steps: optimiser must have bounded=False": rule.optimiser.bounded,
        "knows live errors: optimiser must have live=False": rule.live,
        "fades to M_0: retention must have to_start=False": rule.retention.to_start,
        f"reads {window.read!r}: window must have read='after'": window.read != "after",
        f"has chunks of {chunk}: window must have chunk={_or(CHUNKS)}": chunk not in CHUNKS,
        f"has a window of {size} on chunks of {chunk}: size must be at most chunk + 1": size > chunk + 1,
    }
    return next((why for why, is_so in unknown.items() if is_so), None)


def _or(choices: Iterable[object]) -> str:
    return " or ".join(map(str, choices))


def _of_shape(rule: Rule, shape: torch.Size, gate: CompleteGates) -> str | None:
    dim, tokens, deep = shape[-1], rule.window.chunk + rule.window.size - 1, len(rule.network.lifted) == 2
    if dim not in WIDTHS:
        return f"has heads of width {dim}: it must be {_or(WIDTHS)}"
    if not _fits(deep, dim, tokens):
        return f"fits into shared memory with heads of {dim} and {tokens} tokens a chunk: take smaller heads or chunks"
    return _of_call(shape, gate)


def _of_call(shape: torch.Size, gate: CompleteGates) -> str | None:
    if shape[0] * shape[1] * shape[2] == 0:
        return f"reads nothing: q is {list(shape)}"
    if gate.eta.dim() != 3 or gate.alpha.dim() != 3:
        return "has gates a channel: give eta and alpha as [batch, heads, time]"
    return None


def _fits(deep: bool, dim: int, tokens: int) -> bool:
    """Whether both chunk kernels, for heads of ``dim`` and so many window tokens a chunk, were seen to need no more
    shared memory than an SM of an H200 has: docs/kernels.md."""
    wide, long = dim > 64, tokens > 64
    return not (wide and long) if deep else not (wide or long)


def _traced() -> str | None:
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return "is known to torch.compile and torch.func: call it outside of them"
    if torch.autograd.forward_ad._current_level >= 0:
        return "has a derivative in forward mode: call it outside of dual_level"
    return None


def _of_device(device: str, dtype: torch.dtype, known: torch.dtype = torch.float32) -> str | None:
    interpreted = device == "cpu" and os.environ.get(INTERPRETER) == "1"
    if device != "cuda" and not interpreted:
        return f"runs on {device}: move everything to a CUDA device, or set {INTERPRETER}=1 for Triton's interpreter"
    if dtype != known:
        return f"computes in {str(dtype).removeprefix('torch.')}: give float32"
    return None if find_spec("triton") else "runs without Triton: pip install triton"
