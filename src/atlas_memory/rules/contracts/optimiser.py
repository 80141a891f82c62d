"""What the forms require of an inner optimiser."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from ..step import InnerOptimiser, Sums, TokenGates
from ..validation import check_size
from .trying import BATCH, DIM, HEADS, MATRIX, apart, call, check_apart, check_gradients, check_shape, last, numbers

MATRIX_WORDS = "a matrix, [..., rows, columns]"


def make_sums(optimiser: InnerOptimiser) -> Sums:
    """As many sums as an optimiser keeps."""
    return tuple(numbers(*MATRIX, frequency=0.3 + 0.2 * i) for i in range(optimiser.sums(optimiser.is_online)))


def make_at(optimiser: InnerOptimiser, channels: bool, along_key: Callable[[Tensor], Tensor]) -> TokenGates:
    """What a step is told of a token (``TokenGates``), with one gate a head or one a channel."""
    theta, eta = (0.5 + 0.4 * numbers(BATCH, HEADS, *(DIM,) * n) for n in (0, int(channels)))
    chunk = optimiser.every or 4
    size = 1.0 + theta if optimiser.normalised else None
    rates = call(optimiser, "rates", f"eta {list(eta.shape)}", theta, eta, size, chunk, chunk)
    alone = optimiser.rates(last(theta), last(eta), None if size is None else last(size), chunk, chunk)
    for name, among, few in zip(rates._fields, rates, alone, strict=True):
        if among is not None and few is not None:
            advice = "gates of different sequences and heads have nothing to do with one another"
            check_apart(optimiser, f"rates: {name}", few, last(among), advice)
    return TokenGates(rates.theta, rates.write, rates.apply, rates.plain, eta, theta, along_key)


@lru_cache(maxsize=256)
def try_optimiser(optimiser: InnerOptimiser) -> None:
    """Check the sums and the step with one gate a head and, unless the optimiser refuses them, with channel-wise gates;
    what it says errors see (``written``), how it answers (``shown``), and how it ends a chunk (``end_chunk``)."""
    if optimiser.every is not None:
        check_size(f"{type(optimiser).__name__} every", optimiser.every)
    with apart():
        sums, weights, g = make_sums(optimiser), numbers(*MATRIX), numbers(*MATRIX, frequency=0.7)
        for channels in (False,) if optimiser.mixes_rows else (False, True):
            at = make_at(optimiser, channels, lambda w: w)
            _check_step(optimiser, _step(optimiser, sums, weights, g, at, channels), len(sums))
        _check_first_step(optimiser, weights, g)
        if optimiser.every != 1 and sums:
            _check_between_steps(optimiser, sums, weights, g)
        _check_reads(optimiser, sums, weights, g)
        _check_gradients(optimiser, sums, weights, g)
        _check_step_apart(optimiser, sums, weights, g)
        _check_others(optimiser, sums, weights, g)
        _warn_of_length(optimiser, g)


def _step(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor, at: TokenGates, channels: bool) -> Any:
    given = (
        f"{len(sums)} sums (has_momentum={optimiser.has_momentum}), matrices {list(MATRIX)} and gates "
        f"{[BATCH, HEADS, DIM] if channels else [BATCH, HEADS]} (rows(gate, matrix) multiplies them)"
    )
    if not sums:
        given += " (a step that keeps a sum needs has_momentum = True)"
    return call(optimiser, "step", given, sums, weights, g, at)


def _check_others(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    """Check ``written``, ``end_chunk`` and ``shown``: their shapes, and that sequences and heads do not meet."""
    given, few = f"{len(sums)} sums", tuple(map(last, sums))
    if optimiser.is_online:
        found = call(optimiser, "chunk_change", given, sums, weights, g)
        check_shape(optimiser, "written(sums, weights, frozen)", found, MATRIX, MATRIX_WORDS)
        check_apart(optimiser, "chunk_change", optimiser.chunk_change(few, last(weights), last(g)), last(found))
    turned = call(optimiser, "end_chunk", given, sums)
    if len(turned) != len(sums):
        raise ValueError(f"{type(optimiser).__name__}.turn was given {len(sums)} sums and returned {len(turned)}")
    for alone, among in zip(optimiser.end_chunk(few), turned, strict=True):
        check_shape(optimiser, "turn: every sum", among, MATRIX, MATRIX_WORDS)
        check_apart(optimiser, "end_chunk", alone, last(among))
    for stepped in (False, True, torch.tensor([False, True])):
        given = f"stepped={stepped!r}, a bool or one for each sequence (pick of gates.py takes both)"
        shown = call(optimiser, "readout_weights", given, sums, weights, stepped)
        check_shape(optimiser, "shown(sums, weights, stepped)", shown, MATRIX, MATRIX_WORDS)
        alone = optimiser.readout_weights(few, last(weights), stepped if isinstance(stepped, bool) else stepped[1:])
        check_apart(optimiser, "readout_weights", alone, last(shown))


def _check_step_apart(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    at = make_at(optimiser, False, lambda w: w)
    among = optimiser.step(sums, weights, g, at)[1]
    gates: dict[str, Any] = {name: last(x) for name, x in zip(at._fields, at, strict=True) if isinstance(x, Tensor)}
    alone = optimiser.step(tuple(map(last, sums)), last(weights), last(g), at._replace(**gates))[1]
    check_apart(optimiser, "step", alone, last(among))


def _check_first_step(optimiser: InnerOptimiser, weights: Tensor, g: Tensor) -> None:
    """Check the first step, whose sums are zero: it goes down; and where the gradient g is zero as well, the step is
    finite, with a finite gradient."""
    name, at = type(optimiser).__name__, make_at(optimiser, False, lambda w: w)
    nothing = tuple(torch.zeros_like(g) for _ in make_sums(optimiser))
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


def _check_between_steps(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    """Check that what is read between two steps gets into the sums, though theta is 1 there."""
    at = make_at(optimiser, False, lambda w: w)
    at = at._replace(theta=torch.ones_like(at.theta))
    one, other = (optimiser.step(sums, weights, new, at)[0] for new in (g, numbers(*MATRIX, frequency=1.1)))
    if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        raise ValueError(
            f"{type(optimiser).__name__}.step loses the tokens between two steps (every={optimiser.every!r}): theta is "
            "1 there, and with that nothing of the gradient gets into the sums. Weigh it by at.write, which is made "
            "before, and put the 1 - theta into rates, as Momentum has it"
        )


def _check_reads(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    """Check that there is a step, and that every sum, the gradient and the gate eta change something."""
    name, at = type(optimiser).__name__, make_at(optimiser, False, lambda w: w)

    def made(sums: Sums, g: Tensor, at: TokenGates) -> list[Tensor]:
        """All that is made of the sums: those after the token, what errors and answers see of them, and the step."""
        after, step = optimiser.step(sums, weights, g, at)
        seen = [optimiser.chunk_change(sums, weights, weights)] if optimiser.is_online else []
        return [*after, *seen, optimiser.readout_weights(sums, weights, False), step]

    before = made(sums, g, at)

    def changes(sums: Sums, g: Tensor, at: TokenGates) -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(before, made(sums, g, at), strict=True)]

    if not before[-1].any():
        raise ValueError(f"{name}.step returns a step of zero, with which a memory never learns")
    for i, s in enumerate(sums):
        changed = changes((*sums[:i], s.flip(-1), *sums[i + 1 :]), g, at)
        if not any(changed[:i] + changed[i + 1 :]):
            raise ValueError(
                f"{name}.step does not use sum {i} that it is given, neither for the step nor for another sum: make "
                "the step of it, or keep no such sum (has_momentum = False, unless there is a method sums)"
            )
    if not any(changes(sums, g.flip(-1), at)):
        raise ValueError(f"{name}.step does not use the gradient g")
    plain = None if at.plain is None else 2.0 * at.plain
    if not any(changes(sums, g, at._replace(write=2.0 * at.write, apply=2.0 * at.apply, plain=plain))):
        raise ValueError(
            f"{name}.step does not use the gate eta: multiply the step by at.apply, or the gradient by at.write if a "
            "method rates puts the step size there"
        )


def _check_gradients(optimiser: InnerOptimiser, sums: Sums, weights: Tensor, g: Tensor) -> None:
    """Check that gradients get through a step to all that it depends on."""
    at = make_at(optimiser, False, lambda w: w)
    gates: dict[str, Any] = {name: x for name, x in zip(at._fields, at, strict=True) if isinstance(x, Tensor)}
    given = {"g": g, "W": weights} | {f"sum {i}": s for i, s in enumerate(sums)} | gates

    def step(which: int = -1, **changed: Tensor) -> Tensor:
        """The step, or one of the sums after it."""
        of = tuple(changed[f"sum {i}"] for i in range(len(sums)))
        now = at._replace(**{name: cast(Any, changed[name]) for name in gates})
        after, made = optimiser.step(of, changed["W"], changed["g"], now)
        return made if which < 0 else after[which]

    check_gradients(optimiser, "step", step, given)
    for i in range(len(sums)):
        check_gradients(optimiser, "step: every sum", partial(step, i), given)


REPEATS, LONGEST = 60, 1.5
"""After so many tokens of the same gradient a normalised step should be no longer than so many times s g."""


def _warn_of_length(optimiser: InnerOptimiser, g: Tensor) -> None:
    """Warn of steps that call themselves bounded and are not: that are longer than s g, with s the size that is right
    for plain steps along the gradient, where the gradient is small, or where the same one comes often."""
    if not optimiser.normalised:
        return
    at = make_at(optimiser, False, torch.zeros_like)
    for size in (1.0, 0.01):
        sums = tuple(torch.zeros_like(g) for _ in make_sums(optimiser))
        for _ in range(REPEATS):
            sums, step = optimiser.step(sums, torch.zeros_like(g), size * g, at)
        plain = at.alpha / (1.0 + at.theta)  # eta and size as ``make_at`` has them
        times = float((step.norm(dim=(-2, -1)) / (plain * size * g.norm(dim=(-2, -1)))).max())
        if times > LONGEST:
            warnings.warn(
                f"{type(optimiser).__name__}.step is {times:.3g} times as long as s g where the same gradient g, with "
                f"entries of about {size:g}, comes again and again: a memory that reads one pair often may diverge. "
                "Weigh what goes into a sum, (1 - theta) g in place of g, and make a step that has a length of its own "
                "as long as the gradient; or say bounded = False, if steps are to have the length eta",
                stacklevel=2,
            )
            return


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
        check_shape(optimiser, f"step: {what}", found, MATRIX, "shaped as g, [..., rows, columns]")
