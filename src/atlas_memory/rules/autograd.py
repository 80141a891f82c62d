"""Functions and their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


class Function(torch.autograd.Function):
    """A ``torch.autograd.Function`` that knows the signature of its ``forward``. ``apply`` asks for it at every call,
    and to make it anew takes 8 of the 23 microseconds of a call on a CPU."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Where inspect.signature looks first; that a function may have it is not declared.
        cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``; or where nothing is differentiated its forward pass alone, which takes 20 microseconds less
    on a CPU. A decoded token has four such calls."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(*arguments)


def max_entry(x: Tensor) -> Tensor:
    """The largest entry along the last axis, ``[..., n] -> [...]``, whose gradient goes to one place.

    That of ``amax`` goes to all entries that equal the largest. A compiler that computes x again for the backward pass,
    with other roundings, then finds none that does, and the gradient is lost (notes/diary.md).
    """
    return x.max(-1).values


def is_cheap_to_read(x: Tensor) -> bool:
    """Whether a look at the numbers of ``x`` costs nothing. On a GPU one would have to wait for them; a compiler, the
    transforms of torch.func and fake tensors have none."""
    return x.device.type == "cpu" and can_read(x)


def can_read(x: Tensor) -> bool:
    """Whether the numbers of ``x`` can be looked at, though a GPU may have to be waited for: not under a compiler, in a
    transform or of a fake tensor, nor while a CUDA graph is recorded."""
    if torch.compiler.is_compiling() or is_transformed(x):
        return False
    there = type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
    return there and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` is that of a transform of torch.func, which takes no hooks on what is saved for the backward pass:
    there nothing can be computed again."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without ``torch.autocast`` on a device of this type; the device "meta", which has none, needs none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` of a ``torch.autograd.Function`` as it is outside ``torch.autocast``, which is still on where
    ``loss.backward()`` is called within it: products would be in bfloat16, and in-place ones would mix two dtypes."""

    @wraps(backward)
    def whole(ctx: Any, *gradients: Any) -> Any:
        device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
        with no_autocast(device):
            return backward(ctx, *gradients)

    return whole
