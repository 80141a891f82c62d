"""Whether a kernel computes here what PyTorch does, found out once, before it is first taken unasked.

Of kernels that are right in the interpreter and on one GPU, a version of Triton has made code that reads beyond its
memory (docs/kernels.md), and a GPU with less shared memory than an H200 cannot start some of them. So a kernel that
nobody asked for has a small trial first: what it gives and its gradients beside those of PyTorch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from threading import Thread

import torch
from torch import Tensor

BOUND = 1e-3
"""How far, of its length, a kernel's tensor may be from PyTorch's in float32. Three products of TF32 parts are 1e-6
off, plain TF32 products 4e-3."""
HALF_BOUND = 3e-2
"""The same for kernels that give bfloat16 or float16."""

_found: dict[Hashable, bool] = {}


def proven(trial: Callable[..., float], *about: Hashable) -> bool:
    """Whether ``trial(*about)``, which gives the largest distance as ``distance`` does over what is allowed, was below
    1 when it was tried; a trial that fails warns once. While a CUDA graph is recorded, nothing can be tried: False."""
    key = (trial, *about)
    if key not in _found:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        _found[key] = _passes(trial, about)
    return _found[key]


def _passes(trial: Callable[..., float], about: tuple[Hashable, ...]) -> bool:
    """In a thread of its own, where no mode and no hook of the caller's is on."""
    problems = ["it did not end"]

    def run() -> None:
        try:
            far = trial(*about)
            problems[0] = "" if far < 1.0 else f"it was off by {far:.1e} times what is allowed"
        except Exception as error:  # of any kind: Triton's compiler, its launcher, the GPU
            problems[0] = " ".join(f"{type(error).__name__}: {error}".split())[:200]

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if problems[0]:
        name = trial.__module__.rsplit(".", 1)[-1]
        warnings.warn(f"the Triton kernels {name} are not taken on this GPU: {problems[0]}", stacklevel=2)
    return not problems[0]


def distance(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest |found - expected| / |expected| of two rows of tensors, in float64, over what is allowed; infinite
    for what is no number."""
    far = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        bound = BOUND if torch.finfo(ours.dtype).bits >= 32 else HALF_BOUND
        gap = ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() / bound
        far = max(far, gap if gap == gap else float("inf"))
    return far
