"""How ``torch.compile`` is asked for: with a way around wrong gradients of PyTorch's CPU compiler.

Up to PyTorch 2.13, inductor's code for a CPU keeps an intermediate of two fused loops in a buffer as long as the inner
loop, and where it also vectorises the outer one, eight rows overwrite one another there (pytorch issue 185702, mended
for 2.14). Nothing is said; here it was gradients of theta and gamma that came out wrong. Without that kind of fusion
everything is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..mathematics.rules import Rule


def compile_options(device: str = "cpu") -> dict[str, Any]:
    """What to hand to ``torch.compile`` for a module that lies on a device of this type: for a CPU the way around, and
    that a memory's many small calls are made from C++ (4 to 10 % less time); for others nothing.

    >>> compiled = torch.compile(torch.nn.Linear(2, 2), options=compile_options())
    """
    if device != "cpu":
        return {}
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) >= (2, 14):
        return {"cpp_wrapper": True}
    from .compiler_passes import SeparateLoops

    return {"cpp_wrapper": True, "_post_fusion_custom_pass": SeparateLoops()}


def laid_out(x: Tensor) -> Tensor:
    """x with the strides of a tensor by itself. Those of a chunk cut from a sequence depend on its length, and a
    compiler makes other code for other strides, of dimensions of size 1 too."""
    return x.contiguous().flatten().view(x.shape)


@cache
def compiled_for_rule(function: Callable[..., Any], rule: Rule, device: str) -> Callable[..., Any]:
    """A chunk's ``function`` compiled, for each shape that it meets on a device of this type; on a CPU, what its
    activations found is kept for the backward pass (4 % less time). Each rule has code of its own: a compiler that met
    too many rules in one function would give up on it."""
    options = compile_options(device)
    if device == "cpu":
        from .compiler_passes import KeepActivations

        options["joint_custom_pre_pass"] = KeepActivations()
    code = function.__code__.replace(co_name=f"{function.__name__}_{abs(hash(rule))}")
    return torch.compile(FunctionType(code, function.__globals__), dynamic=False, options=options)
