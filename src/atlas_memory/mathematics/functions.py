"""Functions and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``; or where nothing is differentiated its forward pass alone: ``apply`` looks up a signature at
    every call, which takes 30 microseconds on a CPU, and a decoded token has four such calls."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(*arguments)


def largest(x: Tensor) -> Tensor:
    """The largest entry along the last axis, ``[..., n] -> [...]``, whose gradient goes to one place.

    That of ``amax`` goes to all entries that equal the largest. A compiler that computes x again for the backward pass,
    with other roundings, then finds none that does, and the gradient is lost (docs/diary.md).
    """
    return x.max(-1).values


def without_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``backward`` of a ``torch.autograd.Function`` as it is outside ``torch.autocast``, which is still on where
    ``loss.backward()`` is called within it: products would be in bfloat16, and those in place of two precisions."""

    @wraps(backward)
    def whole(ctx: Any, *gradients: Any) -> Any:
        device = next((g.device.type for g in gradients if g is not None), "cpu")
        with torch.autocast(device, enabled=False):
            return backward(ctx, *gradients)

    return whole
