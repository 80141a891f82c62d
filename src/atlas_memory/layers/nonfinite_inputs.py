"""Tokens that hold NaN or an infinity.

Such a token must not change an output before it. In a product over tokens it would: 0 x NaN is NaN. So a layer reads
zeros in its place, and NaN is put into the outputs and the state afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.precision import are_finite, are_near
from ..rules.autograd import is_cheap_to_read

MAX_ABS = 1e10
"""Entries of x are clamped to +-``MAX_ABS``: products of larger ones overflow in float32."""
MAX_ABS_ATTENTION = 1e4
"""The same for attention: beyond, rounding errors of scores alone are too large for exp in the backward pass."""
MAX_ABS_FLOAT16 = 1e3
"""The same in float16; gradients may overflow there."""


def replace_nonfinite(x: Tensor, max_abs: float = MAX_ABS) -> tuple[Tensor, Tensor | None]:
    """x ``[batch, time, dim]`` clamped to +-``max_abs`` and zero at tokens that are not finite; and which these are,
    bool ``[batch, time]``. None: there are none, or they were left NaN (``propagates_nan``)."""
    max_abs = MAX_ABS_FLOAT16 if x.dtype == torch.float16 else max_abs
    if is_cheap_to_read(x) and are_near(x, max_abs):
        return x, None
    nonfinite, x = ~are_finite(x), x.clamp(-max_abs, max_abs)
    if propagates_nan(x):
        return restore_nan(x, nonfinite), None
    return x.masked_fill(nonfinite[..., None], 0.0), nonfinite


def propagates_nan(x: Tensor) -> bool:
    """Whether NaN may pass through the layer: where one token ``[batch, 1, dim]`` is read alone, without gradients."""
    return x.shape[1] == 1 and not torch.is_grad_enabled()


def restore_nan(y: Tensor, where: Tensor) -> Tensor:
    """y ``[batch, time, dim]`` with NaN at the tokens ``where`` ``[batch, time]``."""
    return y.masked_fill(where[..., None], torch.nan)


def restore_nan_in_state(state: Any, rows: Tensor) -> Any:
    """A ``State`` with NaN in all floating-point tensors of the ``rows``, bool ``[batch]``."""

    def fill(t: Tensor) -> Tensor:
        return t.masked_fill(rows.view(-1, *(1,) * (t.dim() - 1)), torch.nan) if t.is_floating_point() else t

    return state.map(fill)
