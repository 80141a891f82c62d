"""How ``torch.compile`` is asked for: with a way around wrong gradients of PyTorch's CPU compiler.

Up to PyTorch 2.13, inductor's code for a CPU keeps an intermediate of two fused loops in a buffer as long as the inner
loop, and where it also vectorises the outer one, eight rows overwrite one another there (pytorch issue 185702, mended
for 2.14). There is no warning; in this library gradients of theta and gamma came out wrong. Without that kind of fusion
everything is right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..rules.rule import Rule


def compile_options(device: str | torch.device = "cpu") -> dict[str, Any]:
    """The options to give to ``torch.compile`` for a module on a device of this type. For a CPU they are the way around
    wrong gradients, and let a memory's many small calls be made from C++ (4 to 10 % less time), compiled apart from the
    loops (in 0.6 to 0.8 of the time); for others none.

    Examples:
        >>> compiled = torch.compile(torch.nn.Linear(2, 2), options=compile_options())

    Raises:
        ValueError: a device that PyTorch does not know.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device must be one such as cpu or cuda, got {device!r}: {error}") from error
    if kind != "cpu":
        return {}
    options: dict[str, Any] = {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 14):
        from .compiler_passes import SeparateLoops

        options["_post_fusion_custom_pass"] = SeparateLoops()
    return options


def with_own_strides(x: Tensor) -> Tensor:
    """x with the strides of a tensor that is no part of another. The strides of a chunk cut from a sequence depend on
    the sequence's length, and a compiler makes new code for every new stride, even of a dimension of size 1."""
    return x.contiguous().flatten().view(x.shape)


@cache
def compiled_for_rule(function: Callable[..., Any], rule: Rule, device: str) -> Callable[..., Any]:
    """``function``, which reads a chunk, compiled for each shape that it is called with on a device of this type. On a
    CPU, what its activations computed is kept for the backward pass (4 % less time). Each rule has compiled code of its
    own: a compiler that met too many rules in one function would give up on it."""
    options = compile_options(device)
    if device == "cpu":
        from .compiler_passes import KeepActivations

        options["joint_custom_pre_pass"] = KeepActivations()
    code = function.__code__.replace(co_name=f"{function.__name__}_{abs(hash(rule))}")
    return torch.compile(FunctionType(code, function.__globals__), dynamic=False, options=options)
