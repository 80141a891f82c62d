"""Helpers for custom gradients, autocast, and tensors without numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """A ``torch.autograd.Function`` with a cached signature of ``forward``: a third of the time of an ``apply``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Where inspect.signature looks first.
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``, or without gradients its forward pass alone, which is faster."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(*arguments)


def max_entry(x: Tensor) -> Tensor:
    """The largest entry along the last axis. The gradient of ``amax`` would go to all entries that equal it."""
    return x.max(-1).values


def is_cheap_to_read(x: Tensor) -> bool:
    """Whether the numbers of ``x`` can be read without waiting for a GPU."""
    if x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return not is_transformed(x)


def can_read(x: Tensor) -> bool:
    """Whether ``x`` has numbers to read: not in a compiler, torch.func, a fake tensor or the recording of a CUDA
    graph."""
    if torch.compiler.is_compiling() or is_transformed(x):
        return False
    real = type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
    return real and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` is inside a transform of torch.func, which supports no hooks on saved tensors."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without ``torch.autocast`` on this device; the device "meta" has none."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: ``backward`` of a ``torch.autograd.Function`` without ``torch.autocast``."""

    @wraps(backward)
    def whole(ctx: Any, *gradients: Any) -> Any:
        device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
        with no_autocast(device):
            return backward(ctx, *gradients)

    return whole
