"""What the forms require of a bias, an inner optimiser and a retention that is not the library's own. Each is tried on
a few small numbers when the first rule is made with it, so that one that does not fit is refused by its name, and does
not fail somewhere deep in a form.

The library's own are tried by a test (tests/memory/test_contracts.py), and not when they are imported, which would take
longer.

The sizes of the tensors on which a part is tried are all different, so that a sum over the wrong dimension does not fit
by chance. All of it is computed in float64 on the CPU, whatever modes the caller is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from .bias import Bias
from .retention import AnyRetention, Kept, Old
from .sizes import check_size
from .step import At, InnerOptimiser, Sums

BATCH, HEADS, TIME, DIM = 2, 3, 5, 4
ROWS, COLUMNS = 2 * DIM, 7
MATRIX = (BATCH, HEADS, ROWS, COLUMNS)
NOTHING = 2
"""How many of the ``TIME`` tokens on which a bias is tried have no error: the first ones."""


@contextmanager
def _apart() -> Iterator[None]:
    """Leave all modes that the caller may be in: inference, autograd, default device, autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def _numbers(*shape: int, frequency: float = 1.0) -> Tensor:
    """Numbers in (-1, 1) that look drawn; the random generator is left alone."""
    count = torch.arange(1.0, torch.Size(shape).numel() + 1.0, dtype=torch.float64)
    return (frequency * count).sin().reshape(shape)


def _call(part: object, method: str, given: str, *arguments: Any) -> Any:
    """What the method of a part returns; where it fails, a ValueError that names it and says what it was ``given``."""
    try:
        return getattr(part, method)(*arguments)
    except Exception as error:
        if isinstance(error, IndexError) and isinstance(part, InnerOptimiser) and not part.has_momentum:
            given += " (a step that keeps a sum needs has_momentum = True)"
        said = str(error).splitlines()[0] if str(error) else "no reason given"
        name = type(part).__name__
        raise ValueError(f"{name}.{method} failed for {given} with {type(error).__name__}: {said}") from error


def _check_shape(part: object, what: str, found: Any, shape: Sequence[int], words: str) -> None:
    if not isinstance(found, Tensor) or list(found.shape) != list(shape):
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"{type(part).__name__}.{what} must be {words}, here {list(shape)}; got {got}")


def _last(x: Tensor) -> Tensor:
    """The last sequence of a batch and all its heads but the first: what a part answers to them must not depend on what
    it answers to the others."""
    return x[1:, 1:]


def _check_apart(part: object, what: str, alone: Tensor, among: Tensor, advice: str) -> None:
    if not torch.allclose(alone, among, rtol=1e-9, atol=1e-12, equal_nan=True):
        raise ValueError(
            f"{type(part).__name__}.{what} of one sequence changes with what other sequences, heads or tokens are "
            f"beside it: {advice}"
        )


@lru_cache(maxsize=256)
def _try_bias(bias: Bias) -> None:
    """Check the shapes a bias gives, that its numbers and their gradients are finite, that its derivative is that of
    its value, and that its curvature is not too small."""
    name, shape = type(bias).__name__, (BATCH, HEADS, TIME)
    with _apart():
        prediction, v = 2.0 * _numbers(*shape, DIM), _numbers(*shape, DIM + bias.has_delta, frequency=0.7)
        v[..., DIM:] = v[..., DIM:].abs() + 0.1  # the gate delta, where it is read
        prediction[..., 0, :] = v[..., 0, :] = 0.0  # as padding is
        v[..., 1, :DIM] = prediction[..., 1, :]
        given, found, slopes = f"a prediction {[*shape, DIM]} and v {list(v.shape)}", {}, {}
        with torch.enable_grad():
            prediction.requires_grad_()
            for method in ("value", "derivative", "curvature"):
                out = _call(bias, method, given, prediction, v)
                by_coordinate = method == "derivative"
                words = "one number a coordinate, [..., dim]" if by_coordinate else "one number a token, [...]"
                _check_shape(bias, f"{method}(prediction, v)", out, (*shape, DIM) if by_coordinate else shape, words)
                found[method], slopes[method] = out.detach().reshape(*shape, -1), _slope(out, prediction)
        for method, among in found.items():
            alone = getattr(bias, method)(*(_last(x)[..., NOTHING:, :] for x in (prediction, v))).detach()
            among = _last(among)[..., NOTHING:, :]
            _check_apart(bias, method, alone.reshape_as(among), among, "reduce over the last dimension alone, dim=-1")
    for method, numbers in found.items():
        finite = numbers.isfinite().all(-1) & slopes[method].isfinite().all(-1)
        if not finite[..., :NOTHING].all():
            raise ValueError(
                f"{name}.{method} or its gradient is not finite where prediction and v are equal, as they are at "
                "padding. Smooth |e|, for example as sqrt(e^2 + 1e-6), in value, derivative and curvature alike (as Lp "
                "does)"
            )
        if not finite.all():
            raise ValueError(f"{name}.{method} or its gradient is not finite for errors of length about 2")
    gap = (found["derivative"] - slopes["value"]).abs()
    if (gap > 1e-6 + 1e-4 * slopes["value"].abs()).any():
        raise ValueError(
            f"{name}.derivative is not the derivative of {name}.value by the prediction: they differ by up to "
            f"{float(gap.max()):.3g}. Check factors and signs, and that value sums over the coordinates"
        )
    if (least := float(found["curvature"].min())) < 0.0:
        raise ValueError(
            f"{name}.curvature must be a bound on the second derivative, and so at least 0, got {least:.3g}"
        )
    _check_curvature(name, found["curvature"][..., 0], found["derivative"], (prediction - v[..., :DIM]).detach())


def _check_curvature(name: str, curvature: Tensor, derivative: Tensor, error: Tensor) -> None:
    """Where a bias pulls a prediction towards v and rests there, no bound on its second derivative is below
    |derivative| / |error|, and neither is the other bound that ``curvature`` may be."""
    if derivative[..., :NOTHING, :].abs().max() > 1e-6:
        return  # it does not rest at v: the dot product never does
    pull, at_most = derivative.norm(dim=-1), curvature * error.norm(dim=-1)
    if (pull > 1e-6 + (1.0 + 1e-6) * at_most).any():
        times = float((pull / at_most.clamp_min(1e-12))[..., NOTHING:].max())
        raise ValueError(
            f"{name}.curvature is too small, and steps would be too long: |derivative| is up to {times:.3g} times "
            "curvature |prediction - v|, and with a bound on the second derivative it is at most 1 times as much"
        )


def _slope(out: Tensor, prediction: Tensor) -> Tensor:
    """The gradient of the sum of ``out``; zero where it does not depend on the prediction."""
    if not out.requires_grad:
        return torch.zeros_like(prediction)
    (slope,) = torch.autograd.grad(out.sum(), prediction, allow_unused=True)
    return torch.zeros_like(prediction) if slope is None else slope


def _sums(optimiser: InnerOptimiser) -> Sums:
    count = optimiser.sums(optimiser.sees)
    return tuple(_numbers(*MATRIX, frequency=0.3 + 0.2 * i) for i in range(count))


def _at(optimiser: InnerOptimiser, channels: bool, under: Callable[[Tensor], Tensor]) -> At:
    """What a step is told of a token (``At``), with one gate a head or one a channel."""
    theta, eta = (0.5 + 0.4 * _numbers(BATCH, HEADS, *(DIM,) * n) for n in (0, int(channels)))
    chunk = optimiser.every or 4
    size = 1.0 + theta if optimiser.bounded else None
    rates = _call(optimiser, "rates", f"eta {list(eta.shape)}", theta, eta, size, chunk, chunk)
    return At(rates.theta, rates.write, rates.apply, rates.plain, eta, theta, under)


@lru_cache(maxsize=256)
def _try_optimiser(optimiser: InnerOptimiser) -> None:
    """Check the sums and the step with one gate a head and, unless the optimiser refuses them, with channel-wise gates;
    and what it says errors see (``written``)."""
    if optimiser.every is not None:
        check_size(f"{type(optimiser).__name__} every", optimiser.every)
    with _apart():
        sums, weights, g = _sums(optimiser), _numbers(*MATRIX), _numbers(*MATRIX, frequency=0.7)
        for channels in (False,) if optimiser.mixes_rows else (False, True):
            given = (
                f"{len(sums)} sums (has_momentum={optimiser.has_momentum}), matrices {list(MATRIX)} and gates "
                f"{[BATCH, HEADS, DIM] if channels else [BATCH, HEADS]} (rows(gate, matrix) multiplies them)"
            )
            made = _call(optimiser, "step", given, sums, weights, g, _at(optimiser, channels, lambda w: w))
            _check_step(optimiser, made, len(sums))
        if optimiser.sees:
            found = _call(optimiser, "written", f"{len(sums)} sums", sums, weights, g)
            _check_shape(optimiser, "written(sums, weights, frozen)", found, MATRIX, "a matrix, [..., rows, columns]")
        _check_first_step(optimiser, weights, g)
        _check_step_apart(optimiser, sums, weights, g)


def _check_step_apart(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    at = _at(optimiser, False, lambda w: w)
    among = optimiser.step(sums, weights, g, at)[1]
    gates: dict[str, Any] = {name: _last(x) for name, x in zip(at._fields, at, strict=True) if isinstance(x, Tensor)}
    alone = optimiser.step(tuple(map(_last, sums)), _last(weights), _last(g), at._replace(**gates))[1]
    _check_apart(optimiser, "step", alone, _last(among), "reduce over rows and columns alone, dim=(-2, -1)")


def _check_first_step(optimiser: InnerOptimiser, weights: Tensor, g: Tensor) -> None:
    """Check the first step, whose sums are zero: it goes down; and where the gradient g is zero as well, the step is
    finite, with a finite gradient."""
    name, at = type(optimiser).__name__, _at(optimiser, False, lambda w: w)
    nothing = tuple(torch.zeros_like(g) for _ in _sums(optimiser))
    if ((optimiser.step(nothing, torch.zeros_like(g), g, at)[1] * g).sum((-2, -1)) < 0.0).any():
        raise ValueError(
            f"{name}.step goes up: the step is subtracted from the memory, so return it along the gradient"
        )
    with torch.enable_grad():
        rest = torch.zeros_like(g).requires_grad_()
        after, made = optimiser.step(nothing, weights, rest, at)
        out = torch.stack([*after, made])
        (slope,) = torch.autograd.grad(out.sum(), rest) if out.requires_grad else (rest.detach(),)
    if not (out.isfinite().all() and slope.isfinite().all()):
        raise ValueError(
            f"{name}.step or its gradient is not finite where the gradient and the sums are zero, as they are at "
            "padding: add a small number under every root and to every divisor"
        )


def _check_step(optimiser: InnerOptimiser, made: Any, count: int) -> None:
    name = type(optimiser).__name__
    pair = isinstance(made, tuple) and len(made) == 2
    if not pair or not isinstance(made[0], tuple):
        got = f"a {type(made[0]).__name__} and a {type(made[1]).__name__}" if pair else f"a {type(made).__name__}"
        raise ValueError(f"{name}.step must return (sums, step) with a tuple of sums, such as ((s,), s), got {got}")
    if len(made[0]) != count:
        raise ValueError(
            f"{name}.step was given {count} sums and returned {len(made[0])}: it must return as many as it was given, "
            "one where has_momentum is True, none else, or as many as its method sums(live) says"
        )
    for what, found in [("the step", made[1]), *(("every sum", s) for s in made[0])]:
        _check_shape(optimiser, f"step: {what}", found, MATRIX, "shaped as g, [..., rows, columns]")


@lru_cache(maxsize=256)
def takes_any_columns(optimiser: InnerOptimiser) -> bool:
    """Whether the step of W A, for any matrix A, is the step of W times A. Then it is the same in whatever basis the
    columns are written down, and is known where the matrix itself is not: with infinitely many features a memory holds
    a column for every key (``Exponential``), and not the entries of W."""
    with _apart():
        sums, weights, g = _sums(optimiser), _numbers(*MATRIX), _numbers(*MATRIX, frequency=0.7)
        basis = _numbers(COLUMNS, 6, frequency=0.9)
        f = basis[0]  # the first key's features, as each row of B is one key's. W = C B is known by its columns C

        def of_columns(w: Tensor) -> Tensor:
            return torch.nn.functional.pad((w @ (basis @ f))[..., None], (0, COLUMNS - 1))

        def of_entries(w: Tensor) -> Tensor:
            return (w @ f)[..., None] * f

        def step(by: Callable[[Tensor], Tensor], under: Callable[[Tensor], Tensor]) -> list[Tensor]:
            at = _at(optimiser, False, under)
            after, made = optimiser.step(tuple(map(by, sums)), by(weights), by(g), at)
            return [*after, made]

        known = step(lambda w: w, of_columns)
        exact = step(lambda w: w @ basis, of_entries)
        return all(torch.allclose(a @ basis, b, rtol=1e-6, atol=1e-9) for a, b in zip(known, exact, strict=True))


@lru_cache(maxsize=256)
def _try_keep(retention: AnyRetention) -> None:
    """Check the memory with which a retention begins, and what it keeps of one."""
    name, shape = type(retention).__name__, (HEADS, ROWS, COLUMNS)
    with _apart():
        initial = _call(retention, "start", f"a matrix {list(shape)}", _numbers(*shape))
        begun = _call(retention, "begin", f"M_0 {list(shape)}", initial)
        home = _call(retention, "home", f"M_0 {list(shape)}", initial)
        weights, dual = begun[0].repeat(BATCH, 1, 1, 1), None if begun[1] is None else begun[1].repeat(BATCH, 1, 1, 1)
        _check_shape(retention, "settle(a, frozen, initial)", weights, MATRIX, "shaped as a, [..., rows, columns]")
        old, step = Old(weights, weights, dual, initial, *home), 0.1 * _numbers(*MATRIX, frequency=0.7)
        for gates in ([BATCH, HEADS], [BATCH, HEADS, DIM]):
            alpha = 0.5 + 0.4 * _numbers(*gates)
            given = f"matrices {list(MATRIX)} and alpha {gates} (rows(alpha, matrix) multiplies them)"
            kept = _call(retention, "keep", given, old, step, alpha, False, True)
            if not isinstance(kept, Kept) or (kept.dual is None) == retention.settles:
                raise ValueError(
                    f"{name}.keep must return Kept(weights, settled, dual), dual None unless `settles`, got a "
                    f"{type(kept).__name__}"
                )
            for part, found in zip(kept._fields, kept, strict=True):
                if found is not None:
                    _check_shape(retention, f"keep: {part}", found, MATRIX, "shaped as W, [..., rows, columns]")
        w, w_home, a_home = _last(weights), *(None if m is None else m[1:] for m in home)
        one = Old(w, w, None if dual is None else _last(dual), initial[1:], w_home, a_home)
        alone = _call(retention, "keep", given, one, _last(step), _last(alpha), False, True).settled
        _check_apart(retention, "keep", alone, _last(kept.settled), "reduce over rows and columns alone, dim=(-2, -1)")


@lru_cache(maxsize=256)
def keeps_any_columns(retention: AnyRetention) -> bool:
    """``takes_any_columns`` of a retention: whether what is kept of W A, for any matrix A, is what is kept of W times
    A. It is not where there is an accumulator, from which W is settled entry by entry."""
    if retention.settles:
        return False
    with _apart():
        weights, step, basis = _numbers(*MATRIX), _numbers(*MATRIX, frequency=0.7), _numbers(COLUMNS, 6, frequency=0.9)
        alpha, initial = 0.5 + 0.4 * _numbers(BATCH, HEADS), _numbers(HEADS, ROWS, COLUMNS, frequency=0.5)

        def kept(by: Callable[[Tensor], Tensor]) -> Tensor:
            first, home = by(initial), retention.home(by(initial))
            old = Old(by(weights), by(weights), None, first, *home)
            return cast(Kept, _call(retention, "keep", "columns", old, by(step), alpha, False, True)).weights

        return torch.allclose(kept(lambda w: w) @ basis, kept(lambda w: w @ basis), rtol=1e-6, atol=1e-9)


TRIED: dict[str, tuple[type, Callable[[Any], None]]] = {
    "bias": (Bias, _try_bias),
    "optimiser": (InnerOptimiser, _try_optimiser),
    "retention": (AnyRetention, _try_keep),
}
"""The axes of a rule whose choices are tried: the class from which they derive, and the function that tries one."""


def check_part(axis: str, part: object) -> None:
    """Try the choice on an axis of ``TRIED``; an equal one that has been tried before is not tried again.

    Raises:
        ValueError: one that does not derive from the axis's class, cannot be hashed, lacks a method, fails, or gives
            what the forms cannot go on with.
    """
    base, try_it = TRIED[axis]
    name = type(part).__name__
    if not isinstance(part, base):
        raise ValueError(f"{axis} {name} must derive from {base.__name__}, or from a class that does")
    wanted = f"{axis} {name} must be a frozen dataclass of numbers, names and tuples"
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(f"{wanted}: {error}") from error
    for field in fields(part):  # type: ignore[arg-type]  # its instances derive from a dataclass
        if isinstance(value := getattr(part, field.name), Tensor | Module):
            raise ValueError(
                f"{wanted}, which a configuration can hold: {field.name} is a {type(value).__name__}. What is learned "
                "belongs to a layer; a number that varies from token to token is a gate"
            )
    try_it(part)
