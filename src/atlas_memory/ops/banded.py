"""What chunks are laid out with: windows and decays as matrices, and tokens at the offsets of their rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.autograd import Function, call

EVERYTHING = slice(None)


def band(gamma: Tensor, exists: Tensor | None = None) -> Tensor:
    """Gamma[t, i] = gamma_i^(t): the gates as a banded matrix over the window tokens.

    Args:
        gamma: ``[..., b, c]``, entry j of row t weighs token t - j.
        exists: ``[..., b + c - 1]`` bool, which window tokens there are, token i at place i + c - 1; None: all.

    Returns:
        ``[..., b, b + c - 1]``; column t + c - 1 is token t itself.
    """
    b, c = gamma.shape[-2:]
    oldest_first = gamma.flip(-1)
    if exists is not None:
        oldest_first = torch.where(exists.unfold(-1, c, 1), oldest_first, 0.0)
    # Row t holds its c gates starting at column t: pad rows to b + c, and let reshaping skew them.
    return F.pad(oldest_first, (0, b)).flatten(-2)[..., : b * (b + c - 1)].unflatten(-1, (b, b + c - 1))


def decay_matrix(factor: Tensor, rows: slice | None = None, columns: slice | None = None) -> Tensor:
    """D[t, n] = factor_{n+1} * ... * factor_t for n <= t, else 0: ``[..., b] -> [..., b, b]``; or some of its rows, or
    some of its columns.

    Each row or column is a running product. That is exact for any factor, zero included, where a ratio of cumulative
    products or a logarithm is not; and so is its gradient.
    """
    b = factor.shape[-1]
    return call(_Decay, factor, _bounds(rows, b), _bounds(columns, b))


Range = tuple[int, int, int]


def _bounds(part: slice | None, length: int) -> Range:
    """What ``part.indices(length)`` is, for a slice that goes forward; None: everything. PyTorch 2.11's compiler knows
    neither that nor a default argument that is a slice."""
    if part is None:
        return 0, length, 1
    start, stop = part.start or 0, length if part.stop is None else part.stop
    start, stop = (at + length if at < 0 else at for at in (start, stop))
    return max(start, 0), min(stop, length), part.step or 1


class _Decay(Function):
    """``decay_matrix`` with its gradient, dD[t, n] / dfactor_m = D[t, m] D[m - 1, n]. PyTorch's own gradient of a
    running product looks for zeros: it waits for the numbers, or under a compiler makes a dozen more passes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, rows: Range, columns: Range) -> Tensor:
        return _running_products(factor, slice(*rows), slice(*columns))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Range, Range], output: Tensor) -> None:
        factor, ctx.rows, ctx.columns = inputs
        ctx.whole = output.shape[-2] == output.shape[-1]
        ctx.save_for_backward(factor, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        factor, output = ctx.saved_tensors
        if ctx.columns[0] == factor.shape[-1] - 1:  # the last column has no factor in it
            return torch.zeros_like(factor), None, None
        if output.shape[-1] == factor.shape[-1] and not ctx.whole:
            d, through = output, _scan(factor[..., None, :], g)  # sum_n g[t, n] D[s, n]
        else:
            d = output if ctx.whole else _running_products(factor, EVERYTHING, EVERYTHING)
            d, through = d[..., slice(*ctx.rows), :], g @ d[..., slice(*ctx.columns)].mT
        return F.pad((d[..., 1:] * through[..., :-1]).sum(-2), (1, 0)), None, None


def _scan(factor: Tensor, x: Tensor) -> Tensor:
    """h_m = x_m + factor_m h_{m-1} along the last axis, in as many passes as the length has binary digits."""
    step = 1
    while step < x.shape[-1]:
        x = x + factor * F.pad(x[..., :-step], (step, 0))
        factor, step = factor * F.pad(factor[..., :-step], (step, 0)), 2 * step
    return x


def _running_products(factor: Tensor, rows: slice, columns: slice) -> Tensor:
    b = factor.shape[-1]
    ones = torch.ones(b, b, dtype=torch.bool, device=factor.device)
    if len(range(b)[rows]) < b:  # along each row, from the right; else along each column, from the top
        upto = ones.tril()[rows]
        running = torch.where(upto, factor[..., None, :], 1.0).flip(-1).cumprod(-1).flip(-1)
        return torch.where(upto, F.pad(running[..., 1:], (0, 1), value=1.0), 0.0)[..., columns]
    running = torch.where(ones.tril(-1)[:, columns], factor[..., :, None], 1.0).cumprod(-2)
    return running.tril() if running.shape[-1] == b else torch.where(ones.tril()[:, columns], running, 0.0)


def running_product(factor: Tensor) -> Tensor:
    """factor_1 * ... * factor_t for each t, ``[..., b]``."""
    return call(_RunningProduct, factor)


class _RunningProduct(Function):
    """``running_product`` with its gradient, exact for any factor: with P_t the product up to t, dfactor_m is P_{m-1}
    times h_m = g_m + factor_{m+1} h_{m+1}. PyTorch's own waits for a GPU, to look for zeros."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor) -> Tensor:
        return factor.cumprod(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        factor, output = ctx.saved_tensors
        h, inter_block, step = g, F.pad(factor[..., 1:], (0, 1)), 1
        while step < factor.shape[-1]:  # h_m of the next `step` tokens, then of twice as many
            h = h + inter_block * F.pad(h[..., step:], (0, step))
            inter_block = inter_block * F.pad(inter_block[..., step:], (0, step))
            step *= 2
        return F.pad(output[..., :-1], (1, 0), value=1.0) * h


def overlapping(x: Tensor, width: int, step: int) -> Tensor:
    """Stretches of ``width`` tokens that begin every ``step`` tokens: ``[..., time, dim] -> [..., n, width, dim]``,
    with time = (n - 1) step + width."""
    return call(_Overlapping, x, width, step)


def added(x: Tensor, step: int) -> Tensor:
    """The transpose of ``overlapping``: stretches that begin every ``step`` tokens, added where they overlap,
    ``[..., n, width, dim] -> [..., time, dim]``."""
    return call(_Added, x, step)


class _Overlapping(Function):
    """``overlapping`` with its gradient, for PyTorch's own gradient of ``unfold`` goes number by number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, width: int, step: int) -> Tensor:
        return x.unfold(-2, width, step).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        ctx.step = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return added(g, ctx.step), None, None


class _Added(Function):
    """``added`` with its gradient: as many slices are added as there are whole or begun steps in a stretch, each in
    place, where PyTorch's own gradient would copy the sum each time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, step: int) -> Tensor:
        count, width = x.shape[-3:-1]
        shifts = -(-width // step)
        total = x.new_zeros(*x.shape[:-3], count + shifts - 1, step, x.shape[-1])
        for shift in range(shifts):
            part = x[..., shift * step : (shift + 1) * step, :]
            total[..., shift : shift + count, : part.shape[-2], :].add_(part)  # `+=` would copy the slice to itself
        return total.flatten(-3, -2)[..., : (count - 1) * step + width, :]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.width, ctx.step = inputs[0].shape[-2], inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return overlapping(g, ctx.width, ctx.step), None


def stretches(x: Tensor, width: int) -> Tensor:
    """Stretches of ``width`` columns that begin at every column, one behind the other: ``[..., n, time] -> [..., n,
    (time - width + 1) width]``. It is what ``overlapping`` does with rows, and lies by rows, too."""
    return call(_Stretches, x, width)


class _Stretches(Function):
    """``stretches`` with its gradient, for PyTorch's own gradient of ``unfold`` goes number by number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, width: int) -> Tensor:
        return x.unfold(-1, width, 1).flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return call(_StretchesAdded, g, ctx.width), None


class _StretchesAdded(Function):
    """The transpose of ``stretches``, with its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, width: int) -> Tensor:
        places = x.unflatten(-1, (-1, width)).unbind(-1)
        count = places[0].shape[-1]
        total = x.new_zeros(*x.shape[:-1], count + width - 1)
        for i, place in enumerate(places):
            total[..., i : i + count].add_(place)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.width = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return stretches(g, ctx.width), None


def shift_right(x: Tensor, by: Tensor | None, length: int) -> Tensor:
    """Place each row of ``x`` ``[batch, ..., time, dim]`` at its offset ``by`` ``[batch]`` (None: 0) in a layout of
    ``length`` slots.

    Returns:
        the layout ``[batch, ..., length, dim]``. Slots that no token of x has hold anything.
    """
    time = x.shape[-2]
    if by is None:  # padding by nothing would copy
        return x if length == time else F.pad(x, (0, 0, 0, length - time))
    source = torch.arange(length, device=x.device) - by[:, None]
    return take(x, source.clamp(0, max(time - 1, 0)))


def take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of each row at its indices ``[batch, n]``: ``[batch, ..., time, dim] -> [batch, ..., n, dim]``."""
    shape = (index.shape[0],) + (1,) * (x.dim() - 3) + (index.shape[1], 1)
    return x.gather(-2, index.view(shape).expand(*x.shape[:-2], -1, x.shape[-1]))
