"""How ``torch.compile`` is asked for: with a way around wrong gradients of PyTorch's CPU compiler.

Up to PyTorch 2.13, inductor's code for a CPU keeps an intermediate of two fused loops in a buffer as long as the inner
loop, and where it also vectorises the outer one, eight rows overwrite one another there (pytorch issue 185702, mended
for 2.14). Nothing is said; here it was gradients of theta and gamma that came out wrong. Without that kind of fusion
everything is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile_options() -> dict[str, Any]:
    """What to hand to ``torch.compile(model)``, on any device; nothing from PyTorch 2.14 on.

    >>> compiled = torch.compile(torch.nn.Linear(2, 2))
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) >= (2, 14):
        return {}
    from .separate_loops import SeparateLoops

    return {"_post_fusion_custom_pass": SeparateLoops()}


def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """``function`` compiled, for each shape that it meets on a device of this type."""
    # On a CPU the many small calls of a chunk are made from C++: 4 % less time.
    return torch.compile(function, dynamic=False, options={**compile_options(), "cpp_wrapper": device == "cpu"})
