"""What the forms require of a bias."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..bias import Bias
from .trying import BATCH, DIM, HEADS, TIME, apart, call, check_apart, check_shape, last, numbers

NOTHING = 2
"""How many of the ``TIME`` tokens on which a bias is tried have no error: the first ones."""
SHAPE = (BATCH, HEADS, TIME)
SIZES = (1.0, 0.01, 30.0, 1000.0)
"""How large the errors are: a loss may be another one far out."""


@lru_cache(maxsize=256)
def try_bias(bias: Bias) -> None:
    """Check the shapes a bias gives, that its numbers and their gradients are finite, that its derivative is that of
    its value, and that its curvature is not too small."""
    with apart():
        for size, dim in (*((size, DIM) for size in SIZES), (1.0, DIM + 3)):  # heads are of any width
            prediction, v = 2.0 * size * numbers(*SHAPE, dim), numbers(*SHAPE, dim + bias.has_delta, frequency=0.7)
            v[..., :dim] *= size
            v[..., dim:] = v[..., dim:].abs() + 0.1  # the gate delta, where it is read
            prediction[..., 0, :] = v[..., 0, :] = 0.0  # as padding is
            v[..., 1, :dim] = prediction[..., 1, :]
            _try(bias, prediction, v, size)


def _try(bias: Bias, prediction: Tensor, v: Tensor, size: float) -> None:
    name, found, slopes = type(bias).__name__, {}, {}
    given = f"a prediction {list(prediction.shape)} and v {list(v.shape)}"
    with torch.enable_grad():
        prediction.requires_grad_()
        for method in ("value", "derivative", "curvature"):
            out = call(bias, method, given, prediction, v)
            by_coordinate = method == "derivative"
            words = "one number a coordinate, [..., dim]" if by_coordinate else "one number a token, [...]"
            check_shape(bias, f"{method}(prediction, v)", out, prediction.shape if by_coordinate else SHAPE, words)
            slope = _slope(out, prediction)
            found[method], slopes[method] = out.detach().reshape(*SHAPE, -1), slope.detach()
            if method == "value":
                bent = _slope(slope, prediction).detach()
    some = slice(NOTHING + 1, None)  # without a token that has an error, too
    for method, among in found.items():
        alone = getattr(bias, method)(*(last(x)[..., some, :] for x in (prediction, v))).detach()
        among = last(among)[..., some, :]
        check_apart(bias, method, alone.reshape_as(among), among, "reduce over the last dimension alone, dim=-1")
    whole = torch.ones(SHAPE, dtype=torch.bool)
    for method, out in found.items():
        finite = out.isfinite().all(-1) & slopes[method].isfinite().all(-1)
        whole &= finite
        if not finite[..., :NOTHING].all():
            raise ValueError(
                f"{name}.{method} or its gradient is not finite where prediction and v are equal, as at padding (where "
                "the gate delta, if v ends in it, is zero too). Smooth |e|, for example as sqrt(e^2 + 1e-6), in value, "
                "derivative and curvature alike (as Lp does)"
            )
        if size == 1.0 and not finite.all():
            raise ValueError(f"{name}.{method} or its gradient is not finite for errors of length about 2")
    whole &= (found["value"].abs() < 1e100).all(-1)  # what overflows says nothing about the rest
    error = (prediction - v[..., : prediction.shape[-1]]).detach()
    _check_derivative(name, found["derivative"], slopes, bent, error, whole)
    if bias.is_linear:
        other = bias.derivative(prediction.detach() + 1.0, v)
        if not torch.allclose(other, found["derivative"], rtol=1e-9, atol=1e-12):
            raise ValueError(
                f"{name} says that it is_linear, and its derivative depends on the prediction: set is_linear = False"
            )
    if bias.is_quadratic and not torch.allclose(
        found["derivative"], found["curvature"] * error, rtol=1e-6, atol=1e-12, equal_nan=True
    ):
        raise ValueError(
            f"{name} says that it is_quadratic, and its derivative is not curvature (prediction - v): set "
            "is_quadratic = False"
        )
    _check_curvature(name, found["curvature"][..., 0], found["derivative"], slopes["derivative"], error, whole)


def _check_derivative(
    name: str, derivative: Tensor, slopes: dict[str, Tensor], bent: Tensor, error: Tensor, whole: Tensor
) -> None:
    """Check the derivative against that of the value, and its gradient against the value's second derivative."""
    gap = torch.where(whole[..., None], (derivative - slopes["value"]).abs(), 0.0)
    wrong = (gap > 1e-6 + 1e-4 * slopes["value"].abs()).any(-1)
    if wrong.any():
        at = float(error.norm(dim=-1)[wrong].min())
        raise ValueError(
            f"{name}.derivative is not the derivative of {name}.value by the prediction: they differ by up to "
            f"{float(gap.max()):.3g}, first at an error of length {at:.3g}. Check factors and signs, that value sums "
            "over the coordinates, and that nothing of it is detached"
        )
    there = whole[..., None] & bent.isfinite()
    there[..., :NOTHING, :] = False  # autograd has no second derivative of |e|^2, written so, where e is zero
    gap = torch.where(there, (slopes["derivative"] - bent).abs(), 0.0)
    if (gap > 1e-6 + 1e-3 * bent.abs()).any():
        raise ValueError(
            f"the gradient of {name}.derivative is not the second derivative of {name}.value: they differ by up to "
            f"{float(gap.max()):.3g}. It must not be detached, since the outer model learns through it"
        )


def _check_curvature(
    name: str, curvature: Tensor, derivative: Tensor, bent: Tensor, error: Tensor, whole: Tensor
) -> None:
    """Where a bias pulls a prediction towards v and rests there, no bound on its second derivative is below
    |derivative| / |error|, and neither is the other bound that ``curvature`` may be. Where it does not rest, the bound
    must hold for the second derivative, of which ``bent`` is the sum of all columns."""
    if (least := float(curvature.min())) <= 0.0:
        raise ValueError(
            f"{name}.curvature must be a bound on the second derivative, and above 0, since steps are divided by it, "
            f"got {least:.3g}"
        )
    rests = bool(derivative[..., :NOTHING, :].abs().max() <= 1e-6)  # the dot product never does
    pull, at_most = (derivative, error) if rests else (bent, torch.ones_like(bent))
    pull, at_most = pull.norm(dim=-1), curvature * at_most.norm(dim=-1)
    if (whole & (pull > 1e-6 + (1.0 + 1e-6) * at_most)).any():
        times = float((pull / at_most.clamp_min(1e-12))[..., NOTHING:][whole[..., NOTHING:]].max())
        raise ValueError(
            f"{name}.curvature is too small, and steps would be too long: "
            + (
                f"|derivative| is up to {times:.3g} times curvature |prediction - v|, and with a bound on the second "
                "derivative it is at most 1 times as much"
                if rests
                else f"the second derivative is up to {times:.3g} times as large"
            )
        )


def _slope(out: Tensor, prediction: Tensor) -> Tensor:
    """The gradient of the sum of ``out``, itself to be differentiated; zero where it does not depend on the
    prediction."""
    if not out.requires_grad:
        return torch.zeros_like(prediction)
    (slope,) = torch.autograd.grad(out.sum(), prediction, allow_unused=True, create_graph=True)
    return torch.zeros_like(prediction) if slope is None else slope
