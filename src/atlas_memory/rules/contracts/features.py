"""What the forms require of a feature map."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..features import Features
from ..validation import check_size
from .trying import BATCH, DIM, HEADS, TIME, apart, call, check_apart, check_gradients, check_shape, last, numbers

FRONT = (BATCH, HEADS, TIME)


@lru_cache(maxsize=256)
def try_features(features: Features) -> None:
    """Check phi(x), its kernel and its length against one another, in values and gradients, where x is zero, too; and
    where in phi(x) x itself stands."""
    with apart():
        x, y = numbers(*FRONT, DIM), numbers(BATCH, HEADS, TIME + 1, DIM, frequency=0.7)
        x[..., 0, :] = 0.0  # as padding is
        size, sqrt_a = call(features, "size", f"dim={DIM}", DIM), call(features, "initial_sqrt_a", "nothing")
        check_size(f"{type(features).__name__}.size(dim={DIM})", size)
        if features.infinite and size != DIM:
            raise ValueError(
                f"{type(features).__name__}.size(dim={DIM}) is {size}: on endless features a matrix has the columns of "
                "M_0, one for each entry of a key, and then one for every key; let size return dim"
            )
        of_each: dict[str, tuple[Any, tuple[int, ...], str]] = {}
        if not features.infinite:  # first, since the others are made of it
            of_each["expand"] = (call(features, "expand", _given(x), x, sqrt_a), (*FRONT, size), "[..., size(dim)]")
            _check_finite(features, of_each["expand"][0])
        of_each |= {
            "squared_norm": (call(features, "squared_norm", _given(x), x, sqrt_a), FRONT, "|phi(x)|^2, [...]"),
            "kernel": (call(features, "kernel", _given(x), x, y, sqrt_a), (*FRONT, TIME + 1), "[..., n, m]"),
            "columns": (
                call(features, "columns", _given(x), x, y, sqrt_a),
                (*FRONT, size + (TIME + 1) * features.infinite),
                "a number for each column",
            ),
        }
        for method, (found, shape, words) in of_each.items():
            check_shape(features, method, found, shape, words)
            among = {"kernel": (y,), "columns": (y,)}.get(method, ())
            alone = getattr(features, method)(last(x), *map(last, among), sqrt_a)
            check_apart(features, method, alone, last(found), "make phi of each key alone")
        if features.infinite:
            return
        phi, later = of_each["expand"][0], features.expand(x[..., 2:, :], sqrt_a)  # without one that is not zero, too
        check_apart(features, "expand", later, phi[..., 2:, :], "make phi of each key alone")
        one = call(features, "expand", f"one key [{DIM}], with no dimensions in front", x[0, 0, 2], sqrt_a)
        check_apart(features, "expand", one, phi[0, 0, 2], "make phi of each key alone")
        _check_own(features, x, phi)
        _check_kernel(features, x, y, sqrt_a)
        check_gradients(features, "expand", lambda x: features.expand(x, sqrt_a), {"x": x})


def _check_finite(features: Features, phi: Any) -> None:
    if isinstance(phi, Tensor) and not phi.isfinite().all():
        raise ValueError(
            f"{type(features).__name__}.expand is not finite for keys in (-1, 1) or for a key that is zero, as padding "
            "is: add a small number to every divisor and under every root"
        )


def _given(x: Tensor) -> str:
    return f"keys {list(x.shape)}, of any width"


def _check_own(features: Features, x: Tensor, phi: Tensor) -> None:
    own = call(features, "own", f"dim={DIM}", DIM)
    is_slice = isinstance(own, slice) and isinstance(own.start, int) and isinstance(own.stop, int)
    if not is_slice or (own.start < own.stop and not torch.equal(phi[..., own], x)):
        raise ValueError(
            f"{type(features).__name__}.own(dim) must be the slice of phi(x) that is x itself, slice(0, 0) where there "
            f"is none, got {own!r}"
        )
    if own.start < own.stop and not (phi[..., : own.start] == features.constant).all():
        raise ValueError(
            f"{type(features).__name__}: entries of phi(x) before x itself must be {features.constant}, its constant; "
            "put others behind x"
        )


def _check_kernel(features: Features, x: Tensor, y: Tensor, sqrt_a: Tensor | None) -> None:
    name = type(features).__name__
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        phi, psi = features.expand(x, sqrt_a), features.expand(y, sqrt_a)
        kernel, squared = phi @ psi.mT, phi.square().sum(-1)
        for method, found, expected, words in (
            ("kernel(x, y)", features.kernel(x, y, sqrt_a), kernel, "the product of expand(x) and expand(y)"),
            ("squared_norm(x)", features.squared_norm(x, sqrt_a), squared, "the squared length of expand(x)"),
            ("columns(x, keys)", features.columns(x, y, sqrt_a), phi, "expand(x)"),
        ):
            gap = (found - expected).detach().abs().max()
            if not gap <= 1e-9 + 1e-9 * expected.abs().max():
                raise ValueError(f"{name}.{method} is not {words}: they differ by up to {float(gap):.3g}")
            ours, theirs = (_slope(out, x) for out in (found, expected))
            if not (ours.isfinite().all() and theirs.isfinite().all()):
                raise ValueError(f"{name}: the gradient of {method} is not finite; smooth it where x is zero")
            if not torch.allclose(ours, theirs, rtol=1e-7, atol=1e-9):
                raise ValueError(f"{name}.{method} has another gradient than {words}: nothing of it may be detached")


def _slope(out: Tensor, x: Tensor) -> Tensor:
    weighed = (out * numbers(*out.shape, frequency=0.9)).sum()
    if not weighed.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(weighed, x, retain_graph=True)[0]
