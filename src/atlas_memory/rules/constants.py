"""Constants of two numbers, such as the weights of the monomials, that are made once for each device and dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Constant = Callable[[int, int], Tensor]


def kept(shape: Callable[[int, int], tuple[int, ...]]) -> Callable[[Constant], Callable[[int, int, Tensor], Tensor]]:
    """A decorator for a function of two numbers that makes a constant; ``shape`` gives the constant's shape from the
    same two. What it returns has a cache, and a third argument, in whose dtype and on whose device the constant is.

    A GPU would have to wait for a copy, and a CUDA graph cannot have one, so what a GPU needs is kept on it. A compiler
    for a CPU is led past the cache and makes a constant of its own; for other devices it calls a custom operator, which
    looks into the cache."""

    def decorate(make: Constant) -> Callable[[int, int, Tensor], Tensor]:
        @lru_cache(maxsize=64)
        def there(dim: int, i: int, device: torch.device, dtype: torch.dtype) -> Tensor:
            with torch.inference_mode(False):  # a cached inference tensor could never be trained through
                return make(dim, i).to(device, dtype)

        @torch.library.custom_op(f"atlas_memory::constant{make.__name__}", mutates_args=())
        def operator(dim: int, i: int, like: Tensor) -> Tensor:
            return there(dim, i, like.device, like.dtype).clone(memory_format=torch.contiguous_format)

        operator.register_fake(lambda dim, i, like: like.new_empty(shape(dim, i)))

        def found(dim: int, i: int, like: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return make(dim, i).to(like) if like.device.type == "cpu" else operator(dim, i, like.detach())
            if type(like) is not Tensor:  # a fake one perhaps, of which nothing may be kept
                return make(dim, i).to(like)
            return there(dim, i, like.device, like.dtype)

        return found

    return decorate
