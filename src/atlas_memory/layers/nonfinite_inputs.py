"""What layers do with tokens that are no numbers.

A token that holds NaN or an infinity changes no output before it. Inside a layer it would: in a product over tokens,
0 x NaN is NaN. So the layer reads zeros in its place, and NaN is put afterwards into the outputs that would have seen
it and into the state. Gradients of earlier outputs at earlier tokens are then those without it, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.precision import are_finite, are_near
from ..rules.autograd import is_cheap_to_read

MAX_ABS = 1e10
"""Entries of x are cut to +-``MAX_ABS``, so that whatever is finite gives finite outputs and gradients: products of
what is made of larger ones overflow in float32."""
FAR_OF_ATTENTION = 1e4
"""The same for attention, which in its backward pass takes exp of a difference of two scores: from about 1e9 on their
roundings alone are too large."""
FAR_OF_FLOAT16 = 1e3
"""The same in float16, whose largest number is 65,504. Gradients may overflow there."""


def admit(x: Tensor, max_abs: float = MAX_ABS) -> tuple[Tensor, Tensor | None]:
    """What is read of tokens ``[batch, time, width]``: x cut to +-``max_abs``, and zero at tokens that are no numbers;
    and which these are, bool ``[batch, time]``. None: there is none, or they are left NaN (``passes``)."""
    max_abs = FAR_OF_FLOAT16 if x.dtype == torch.float16 else max_abs
    if is_cheap_to_read(x) and are_near(x, max_abs):
        return x, None
    bad, x = ~are_finite(x), x.clamp(-max_abs, max_abs)
    if passes(x):
        return spoilt(x, bad), None
    return x.masked_fill(bad[..., None], 0.0), bad


def passes(x: Tensor) -> bool:
    """Whether a token that is no number may pass through a layer as it is, into output and state: in the reading of one
    token ``[batch, 1, width]`` without gradients, where nothing is beside it."""
    return x.shape[1] == 1 and not torch.is_grad_enabled()


def spoilt(y: Tensor, where: Tensor) -> Tensor:
    """y ``[batch, time, width]`` with NaN at the tokens ``where`` ``[batch, time]``."""
    return y.masked_fill(where[..., None], torch.nan)


def spoilt_rows(state: Any, rows: Tensor) -> Any:
    """A ``State`` with NaN in all floating-point tensors of some rows, bool ``[batch]``."""

    def spoil(t: Tensor) -> Tensor:
        return t.masked_fill(rows.view(-1, *(1,) * (t.dim() - 1)), torch.nan) if t.is_floating_point() else t

    return state.map(spoil)
