"""Which calls take a kernel: functions of device type, dtype, shapes and rule, and of what the caller asks. No Triton
is imported.

Those of the delta rule and of the short convolution are taken on a GPU unless ATLAS_MEMORY_KERNELS=0 is in the
environment, once they have been tried there (kernel_check.py). That of Newton-Schulz waits to be asked for:
``kernels=True``, or ATLAS_MEMORY_KERNELS=1."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor

from ...rules.bias import DotProduct
from ...rules.features import Identity
from ...rules.gates import CompleteGates
from ...rules.networks import Linear
from ...rules.optimisers import DeltaGradientDescent
from ...rules.retention import Decay, Keep
from ...rules.rule import Rule

SWITCH = "ATLAS_MEMORY_KERNELS"
"""The environment variable that lets all kernels be taken (1), or none (anything else); not set: those that are taken
by default."""

INTERPRETER = "TRITON_INTERPRET"
"""The environment variable by which Triton runs kernels on the CPU, to try them."""

DELTA: dict[str, tuple[type, ...]] = {
    "features": (Identity,),
    "network": (Linear,),
    "bias": (DotProduct,),
    "optimiser": (DeltaGradientDescent,),
    "retention": (Decay, Keep),
}
"""The parts of a rule that the kernels of the delta rule know."""

DELTA_WIDTHS = (16, 32, 48, 64)
"""Their head widths: what 16 does not divide would be another kernel of Triton's than the one tried."""

CHUNKS = (16, 32, 64)
"""Their chunks b."""

GRAM_SIZE = 64
"""The largest Gram matrix: at 128 the backward kernel asks for more shared memory than an SM of an H200 has."""

GRAM_TRAINED = 16
"""The largest that the environment makes a kernel take where a gradient is wanted: at 64 rows the backward kernel makes
it five times as slow as PyTorch, at 16 it takes an eighth of the time (docs/results/performance.md)."""


def taken(
    kernels: bool | None,
    refusal: Callable[..., str | None],
    *call: object,
    by_default: Callable[[], bool] | None = None,
) -> bool:
    """Whether a call takes its kernel.

    Args:
        kernels: True: asked for; False: never; None: where the environment variable ``SWITCH`` is 1, or is not set and
            the kernel is one to take by default.
        refusal: what says of ``call`` why it has no kernel, and what would help; None: it has one.
        by_default: what says whether to take it where nobody has asked for it; None: no.

    Raises:
        ValueError: a kernel was asked for, and the call has none.
    """
    switch = os.environ.get(SWITCH)
    asked = kernels or (kernels is None and switch == "1")
    by_default = None if os.environ.get(INTERPRETER) == "1" else by_default  # slow, and for what is asked for
    if not asked and (kernels is False or switch is not None or by_default is None):
        return False
    why = refusal(*call)
    if kernels and why is not None:
        raise ValueError(f"kernels=True, but no kernel {why}; or leave kernels out")
    return why is None and (bool(asked) or (by_default is not None and by_default()))


def is_delta(rule: Rule) -> bool:
    """Whether the delta rule is the optimiser's: only then are its kernels looked into."""
    return type(rule.optimiser) in DELTA["optimiser"]


def on_cuda(x: Tensor) -> bool:
    """Whether x is a plain tensor on a GPU of CUDA: only then is a kernel taken by default."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda and torch.version.hip is None


def fast_delta(x: Tensor) -> bool:
    """Whether its kernels are faster than PyTorch where x is, as they were on an H200. For GPUs before Hopper the
    compiler puts up to 11 kB of each thread's numbers into memory (notes/kernels.md); none has been tried."""
    return on_cuda(x) and torch.cuda.get_device_capability(x.device) >= (9, 0)


def delta_refusal(rule: Rule, device: str, dtype: torch.dtype, shape: torch.Size, gate: CompleteGates) -> str | None:
    """Why ops/triton/delta_rule.py does not compute ``rule`` for q of this device type, dtype and ``shape``
    ``[batch, heads, time, dim]``, to follow "no kernel"; None: it does.

    It computes the delta rule: one matrix on plain keys, the dot product, raw delta steps, linear retention to zero,
    gates one a head, in float32 on CUDA, at widths that fit.
    """
    network, chunk, dim = rule.network, rule.window.chunk, shape[-1]
    unknown = {
        f"knows {type(part).__name__}: {name} must be {_or(kind.__name__ for kind in kinds)}": type(part) not in kinds
        for name, kinds in DELTA.items()
        for part in (getattr(rule, name),)
    }
    unknown |= {
        "knows the layer norm: network must have norm=False": network.norm,
        "knows normalised steps: optimiser must have normalised=False": rule.optimiser.normalised,
        "decays to M_0: retention must have to_initial=False": rule.retention.to_initial,
        f"reads {rule.window.read!r}: window must have read='after'": rule.window.read != "after",
        f"has chunks of {chunk}: window must have chunk={_or(CHUNKS)}": chunk not in CHUNKS,
        f"has heads of width {dim}: it must be {_or(DELTA_WIDTHS)}": dim not in DELTA_WIDTHS,
        f"reads nothing: q is {list(shape)}": 0 in shape[:3],
        "has gates a channel: give eta and alpha as [batch, heads, time]": gate.eta.dim() != 3 or gate.alpha.dim() != 3,
    }
    why = next((why for why, is_so in unknown.items() if is_so), None)
    return _traced() or why or _of_device(device, dtype)


def convolution_refusal(device: str, dtype: torch.dtype) -> str | None:
    """The same of ops/triton/conv_kernel.py, which computes in any floating dtype."""
    return _traced() or _of_device(device, dtype, dtype)


def gram_refusal(device: str, dtype: torch.dtype, size: int) -> str | None:
    """Why gram_newton_schulz.py takes no Gram matrices of this device type and dtype, ``size`` x ``size``,
    to follow "no kernel"; None: it does."""
    if not 0 < size <= GRAM_SIZE:
        return f"takes Gram matrices of {size} rows: they must have 1 to {GRAM_SIZE}"
    return _of_device(device, dtype)


def _or(choices: Iterable[object]) -> str:
    return " or ".join(map(str, choices))


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
