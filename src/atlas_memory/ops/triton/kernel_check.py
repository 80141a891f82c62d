"""Whether a kernel computes here what PyTorch does, found out once, before it is first taken by default.

Of kernels that are right in the interpreter and on one GPU, a version of Triton has made wrong code (notes/kernels.md),
and a GPU with less shared memory than an H200 cannot start some of them. So a kernel that nobody asked for has a small
check first: what it gives and its gradients beside those of PyTorch. That does not help where a kernel reads memory
that nobody has: CUDA then fails whatever the process does next.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable
from importlib import import_module
from threading import Lock, Thread

import torch
from torch import Tensor

BOUND = 1e-4
"""How far, of its length, a kernel's tensor in float32 may be from PyTorch's in float64. Right ones are 1e-6 off, those
with plain TF32 products 5e-4."""
HALF_BOUND = 3e-2
"""The same for kernels that give bfloat16 or float16."""

_found: dict[Hashable, bool] = {}
_lock = Lock()


def matches_pytorch(name: str, *about: Hashable) -> bool:
    """Whether the kernels of the module ``name`` compute what PyTorch does: ``deviation`` of ``about``, a function of
    the module, must be below 1. It is the largest ``distance``, over what is allowed.

    What fails warns once. False, with nothing tried, while a CUDA graph is recorded and inside a backward pass, whose
    thread the check would wait for.
    """
    key = (name, *about)
    if key not in _found:
        recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if recorded or torch._C._current_graph_task_id() != -1:
            return False
        with _lock:
            if key not in _found:
                why = _mismatch(name, about)
                _found[key] = not why
                if why:
                    warnings.warn(f"the Triton kernels {name} are not taken on this GPU: {why}", stacklevel=2)
    return _found[key]


def _mismatch(name: str, about: tuple[Hashable, ...]) -> str:
    """Why the kernels fail their check; empty: they do not. In a thread of its own, which has none of the caller's
    grad and inference modes, autocast and hooks."""
    why = ["it did not end"]

    def run() -> None:
        try:
            off = import_module(f"{__package__}.{name}").deviation(*about)
            why[0] = "" if off < 1.0 else f"it was off by {off:.1e} times what is allowed"
        except Exception as error:  # of any kind: an import, Triton's compiler, its launcher, the GPU
            why[0] = " ".join(f"{type(error).__name__}: {error}".split())[:200]

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return why[0]


def distance(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest |found - expected| / |expected| of two rows of tensors, in float64, over what is allowed; infinite
    for what is no number."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        bound = BOUND if torch.finfo(ours.dtype).bits >= 32 else HALF_BOUND
        gap = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() / bound
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst
