"""Calls of functions that have a gradient of their own."""

from __future__ import annotations

from typing import Any

import torch


def call(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply``; or where nothing is differentiated its forward pass alone: ``apply`` looks up a signature at
    every call, which takes 30 microseconds on a CPU, and a decoded token has four such calls."""
    return function.apply(*arguments) if torch.is_grad_enabled() else function.forward(*arguments)
