"""A bias, an optimiser or a retention that the forms cannot go on with is refused by name when a rule is made."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from atlas_memory.memory import (
    KINDS,
    L2,
    RULES,
    Bias,
    Decay,
    DeltaGradientDescent,
    Exponential,
    Features,
    GradientDescent,
    InnerOptimiser,
    Keep,
    LinearRetention,
    Momentum,
    Muon,
    NewMatrix,
    NonLinearRetention,
    Rule,
)
from atlas_memory.rules.contracts import TRIED, check_part, keeps_any_columns, takes_any_columns
from atlas_memory.rules.gates import rows

OURS = {axis: {kind() for kind in KINDS[axis]} | {getattr(rule, axis) for rule in RULES.values()} for axis in TRIED}


@pytest.mark.parametrize(
    "axis,part", [(axis, part) for axis, parts in OURS.items() for part in sorted(parts, key=repr)]
)
def test_the_librarys_own_pass(axis, part):
    check_part(axis, part)
    if hasattr(part, "normalised"):
        for normalised, online in ((False, True), (True, False), (False, False)):
            check_part(axis, replace(part, normalised=normalised, online=online))


@dataclass(frozen=True)
class Square(Bias):
    """What the broken ones below are made of."""

    def value(self, prediction, v):
        return (prediction - v).square().sum(-1)

    def derivative(self, prediction, v):
        return 2.0 * (prediction - v)

    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], 2.0)


class OfCoordinates(Square):
    def value(self, prediction, v):
        return (prediction - v).square()


class WithoutFactor(Square):
    def derivative(self, prediction, v):
        return prediction - v


class CurvatureOfCoordinates(Square):
    def curvature(self, prediction, v):
        return torch.full_like(prediction, 2.0)


class Bent(Square):
    """|e|^1.5, whose |derivative| / |error| is infinite at zero."""

    def value(self, prediction, v):
        return (prediction - v).abs().pow(1.5).sum(-1)

    def derivative(self, prediction, v):
        e = prediction - v
        return 1.5 * e.sign() * e.abs().sqrt()

    def curvature(self, prediction, v):
        return 1.5 * (prediction - v).abs().amax(-1).pow(-0.5)


class BentBound(Square):
    def curvature(self, prediction, v):
        return (prediction - v).norm(dim=-1).pow(-0.5)


class Falling(Square):
    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], -1.0)


class TooFlat(Square):
    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], 1.0)


class OverTokens(Square):
    """Weighted by a mean over all tokens, of which value, derivative and curvature are right but for the gradient's."""

    def value(self, prediction, v):
        return (prediction - v).square().sum(-1) * v.abs().mean()

    def derivative(self, prediction, v):
        return 2.0 * (prediction - v) * v.abs().mean()

    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], 2.0)


@dataclass(frozen=True)
class Weighted(Square):
    """A part that is no number."""

    weight: torch.Tensor | None = None


class OfTheOneBefore(Square):
    """Weighted by the error of the token before, which of the first tokens is zero."""

    def weight(self, prediction, v):
        error = (prediction - v).detach().square().sum(-1)
        return 1.0 / (1.0 + torch.cat([torch.zeros_like(error[..., :1]), error[..., :-1]], -1))

    def value(self, prediction, v):
        return self.weight(prediction, v) * super().value(prediction, v)

    def derivative(self, prediction, v):
        return self.weight(prediction, v)[..., None] * super().derivative(prediction, v)


class DeltaForgotten(Square):
    def value(self, prediction, v):
        return (prediction - v[..., :-1]).square().sum(-1)


@dataclass(frozen=True)
class Corner(Square):
    """Quadratic up to an error, then linear, with half of the slope that it should have there."""

    at: float = 5.0

    def value(self, prediction, v):
        max_abs = (prediction - v).abs()
        return torch.where(max_abs <= self.at, max_abs.square(), 2.0 * self.at * max_abs - self.at**2).sum(-1)

    def derivative(self, prediction, v):
        e = prediction - v
        return torch.where(e.abs() <= self.at, 2.0 * e, self.at * e.sign())


class Detached(Square):
    def derivative(self, prediction, v):
        return super().derivative(prediction, v).detach()


class Cubic(Square):
    """Has a constant for a curvature that grows."""

    def value(self, prediction, v):
        return ((prediction - v).square() + 1e-6).pow(1.5).sum(-1)

    def derivative(self, prediction, v):
        e = prediction - v
        return 3.0 * e * (e.square() + 1e-6).sqrt()

    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], 10.0)


class Slanted(Square):
    """Does not rest at v."""

    bound = 0.0

    def value(self, prediction, v):
        return torch.nn.functional.softplus(prediction - v).sum(-1)

    def derivative(self, prediction, v):
        return (prediction - v).sigmoid()

    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], self.bound)


class SlantedLittle(Slanted):
    bound = 0.1


class LinearInName(Square):
    is_linear = True


class QuadraticInName(Cubic):
    is_quadratic = True

    def curvature(self, prediction, v):
        return 30 * (prediction - v).abs().amax(-1)


class InPlace(Square):
    def value(self, prediction, v):
        v *= 0.5
        return super().value(prediction, v)


class Drawn(Square):
    def value(self, prediction, v):
        return super().value(prediction, v) * torch.rand(())


@dataclass(frozen=True)
class Nothing(Bias):
    """No method at all."""


@dataclass
class Thawed(Bias):
    """Not frozen, so that it has no hash."""


class OfFour(Square):
    """Of heads 4 wide, and no others."""

    def derivative(self, prediction, v):
        return 2.0 * (prediction - v) * torch.tensor([1.0, 1.0, 1.0, 1.0])


class InSingle(Square):
    def derivative(self, prediction, v):
        return (2.0 * (prediction - v)).float()


@pytest.mark.parametrize(
    "bias,message",
    [
        (OfFour(), r"OfFour.derivative failed for a prediction \[2, 3, 5, 7\]"),
        (InSingle(), "InSingle.derivative.* must keep the dtype of what is given, float64; got torch.float32"),
        (OfCoordinates(), r"OfCoordinates.value\(prediction, v\) must be one number a token.*got shape \[2, 3, 5, 4\]"),
        (WithoutFactor(), "WithoutFactor.derivative is not the derivative of WithoutFactor.value"),
        (CurvatureOfCoordinates(), r"CurvatureOfCoordinates.curvature\(prediction, v\) must be one number a token"),
        (Bent(), "Bent.derivative or its gradient is not finite where prediction and v are equal.*Smooth"),
        (BentBound(), "BentBound.curvature or its gradient is not finite where prediction and v are equal"),
        (Falling(), "Falling.curvature must be a bound on the second derivative, .* got -1"),
        (TooFlat(), "TooFlat.curvature is too small.*up to 2 times"),
        (OverTokens(), r"OverTokens.value of one sequence changes with what .* tokens are beside it.*dim=-1"),
        (OfTheOneBefore(), r"OfTheOneBefore.value of one sequence changes with what .* tokens are beside it.*dim=-1"),
        (Corner(), "Corner.derivative is not the derivative of Corner.value.*first at an error of length"),
        (Detached(), "the gradient of Detached.derivative is not the second derivative of Detached.value"),
        (Cubic(), "Cubic.curvature is too small.*up to 23"),
        (Slanted(), "Slanted.curvature must be a bound on the second derivative, and above 0.* got 0"),
        (SlantedLittle(), "SlantedLittle.curvature is too small.*the second derivative is up to 1.97"),
        (LinearInName(), "LinearInName says that it is_linear, and its derivative depends on the prediction"),
        (QuadraticInName(), r"QuadraticInName says that it is_quadratic, and its derivative is not curvature"),
        (InPlace(), "InPlace.value changes in place what it is given"),
        (Drawn(), "Drawn.value returns other numbers when it is called again"),
        (Weighted(torch.ones(())), "bias Weighted must be a frozen dataclass of numbers.*weight is a Tensor"),
        (DeltaForgotten(), r"DeltaForgotten.value failed for a prediction .*\[2, 3, 5, 4\]"),
        (Nothing(), r"Nothing.value failed .* has no method value\(prediction, v\)"),
        (Thawed(), "bias Thawed must be a frozen dataclass"),
        (Momentum(), "bias Momentum must derive from Bias"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_bias(bias, message):
    with pytest.raises(ValueError, match=message):
        Rule(bias=bias)


class Undeclared(Square):
    """Without a decorator: what it is made with is no field."""

    def __init__(self, factor):
        object.__setattr__(self, "factor", factor)


def test_what_is_no_field():
    with pytest.raises(ValueError, match=r"bias Undeclared holds factor beside its fields.*@dataclass"):
        Rule(bias=Undeclared(1.0))


@pytest.mark.parametrize(
    "registered,message",
    [
        (Square, "must be a tuple of classes, got <class"),
        ((L2, Square()), r"must be a tuple of classes, got \(.*L2.*, Square\(\)\): register a class by"),
        ((L2, "Square"), "must be a tuple of classes"),
        ((*KINDS["bias"], type("Lp", (Square,), {})), "Lp under the name of a class of the library: give it"),
        (
            (*KINDS["bias"], Square, type("Square", (Square,), {"__module__": "elsewhere"})),
            "elsewhere.Square under the",
        ),
    ],
    ids=["no tuple", "instance", "name", "taken", "twice"],
)
def test_what_is_registered(registered, message, monkeypatch):
    monkeypatch.setitem(KINDS, "bias", registered)
    with pytest.raises(ValueError, match=r"KINDS\['bias'\] .*" + message):
        RULES["titans"].vary(bias={"kind": "L2"})


def test_a_class_that_is_defined_again(monkeypatch):
    again = dataclass(frozen=True)(type("Square", (Square,), {}))
    monkeypatch.setitem(KINDS, "bias", (*KINDS["bias"], Square, again))
    assert type(RULES["titans"].vary(bias={"kind": "Square"}).bias) is again


@dataclass(frozen=True)
class Plain(InnerOptimiser):
    has_momentum = True

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        return (s,), rows(at.apply, s)


@dataclass(frozen=True)
class BetweenSteps(InnerOptimiser):
    """Its theta weighs what comes in, also where theta is 1."""

    every: int | None = 4
    has_momentum = True

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(1.0 - at.theta, g)
        return (s,), rows(at.apply, s)


class OneSum(Plain):
    def step(self, sums, weights, g, at):
        return sums[0], g


class StepAlone(Plain):
    def step(self, sums, weights, g, at):
        return rows(at.apply, g)


class SumsForgotten(Plain):
    def step(self, sums, weights, g, at):
        return (), g


class MomentumForgotten(Plain):
    has_momentum = False


class Bare(Plain):
    def step(self, sums, weights, g, at):
        s = at.theta * sums[0] + g
        return (s,), s


class BareWrite(Plain):
    """Works with one gate a head, and not with gates of channels."""

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + at.write[..., None, None] * g
        return (s,), s


class Summed(Plain):
    def step(self, sums, weights, g, at):
        return sums, g.sum(-1)


class Sign(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g
        return (s,), rows(at.apply, s.sign())


class Upwards(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g
        return (s,), -rows(at.apply, s)


class RootOfZero(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g.square()
        return (s,), rows(at.apply, g / (s.sqrt() + 1e-8))


class Growing(Plain):
    """Sums gradients without a weight."""

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g
        return (s,), rows(at.apply, s)


class OfOneLength(Plain):
    normalised = True

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(1.0 - at.theta, g)
        return (s,), rows(at.apply, s / (s.norm(dim=(-2, -1), keepdim=True) + 1e-6))


class Unbounded(OfOneLength):
    normalised = False


class InItself(Plain):
    kept: ClassVar[dict] = {}

    def step(self, sums, weights, g, at):
        self.kept["s"] = self.kept.get("s", 0.0) + g
        return sums, rows(at.apply, self.kept["s"])


@dataclass(frozen=True)
class Assigns(Plain):
    def step(self, sums, weights, g, at):
        self.s = g
        return sums, rows(at.apply, g)


class SumsInPlace(Plain):
    def step(self, sums, weights, g, at):
        s = sums[0].mul_(at.theta[..., None, None]).add_(g)
        return (s,), rows(at.apply, s)


class RatesOverTheBatch(Plain):
    def rates(self, theta, eta, size, every, chunk):
        return super().rates(theta, eta / size.mean(), None, every, chunk)


class TurnsOverTheBatch(Plain):
    def end_chunk(self, sums):
        return tuple(s - s.mean(0) for s in sums)


class ShownOverTheBatch(Plain):
    def readout_weights(self, sums, weights, stepped):
        return weights - weights.mean(0)


class ShownByOne(Plain):
    def readout_weights(self, sums, weights, stepped):
        return weights if stepped else weights - sums[0]


class WrittenOverTheBatch(Plain):
    def chunk_change(self, sums, weights, frozen):
        return weights - frozen.mean(0)


class OverTheBatch(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + g
        return (s,), rows(at.apply, s / (1.0 + s.abs().mean()))


@dataclass(frozen=True)
class Every(Plain):
    every: int | None = None


class CutsGradients(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(at.write, g.detach())
        return (s,), rows(at.apply, s)


class CutsRates(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        return (s,), rows(at.apply.detach(), s)


class CutsSums(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(at.write, g)
        return (s.detach(),), rows(at.apply, s)


class KeepsNoMomentum(Plain):
    def step(self, sums, weights, g, at):
        return (g,), rows(at.apply, rows(at.write, g))


class KeepsTheOldSum(Plain):
    def step(self, sums, weights, g, at):
        return sums, rows(at.apply, rows(at.write, g))


class WithoutEta(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(1.0 - at.theta, g)
        return (s,), 0.1 * s


class WithoutGradient(Plain):
    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + weights
        return (s,), rows(at.apply, s)


class Still(Plain):
    def step(self, sums, weights, g, at):
        return super().step(sums, weights, g, at)[0], 0.0 * g


@dataclass(frozen=True)
class NoStep(InnerOptimiser):
    """No method at all."""


@pytest.mark.parametrize(
    "optimiser,message",
    [
        (CutsGradients(), "CutsGradients.step changes with g, and lets no gradient through to it"),
        (CutsRates(), "CutsRates.step changes with apply, and lets no gradient through to it"),
        (CutsSums(), "CutsSums.step: every sum changes with .*, and lets no gradient through to it"),
        (
            OneSum(),
            r"OneSum.step must return \(sums, step\) with a tuple of sums, such as \(\(s,\), s\), got a Tensor and",
        ),
        (StepAlone(), r"StepAlone.step must return \(sums, step\).* got a Tensor$"),
        (SumsForgotten(), "SumsForgotten.step was given 1 sums and returned 0"),
        (
            MomentumForgotten(),
            r"MomentumForgotten.step failed for 0 sums .*needs has_momentum = True\) with IndexError",
        ),
        (BetweenSteps(), r"BetweenSteps.step loses the tokens between two steps \(every=4\)"),
        (Upwards(), r"Upwards.step goes up: the step is subtracted from the memory"),
        (RootOfZero(), r"RootOfZero.step or its gradient is not finite where the gradient and the sums are zero"),
        (Bare(), r"Bare.step failed for .*rows\(gate, matrix\) multiplies"),
        (BareWrite(), r"BareWrite.step failed for .*gates \[2, 3, 4\]"),
        (Summed(), r"Summed.step: the step must be shaped as g, .*here \[2, 3, 8, 7\]; got shape \[2, 3, 8\]"),
        (OverTheBatch(), r"OverTheBatch.step of one sequence changes .*dim=\(-2, -1\)"),
        (InItself(), "InItself.step returns other numbers when it is called again.*returns in sums"),
        (Assigns(), r"Assigns.step failed .*cannot assign to field.*returns in sums \(has_momentum = True\)"),
        (SumsInPlace(), r"SumsInPlace.step changes in place .*w.mul_"),
        (RatesOverTheBatch(), "RatesOverTheBatch.rates: apply of one sequence changes"),
        (TurnsOverTheBatch(), "TurnsOverTheBatch.end_chunk of one sequence changes"),
        (ShownOverTheBatch(), "ShownOverTheBatch.readout_weights of one sequence changes"),
        (ShownByOne(), r"ShownByOne.readout_weights failed for stepped=tensor.*\(pick of gates.py takes both\)"),
        (WrittenOverTheBatch(), "WrittenOverTheBatch.chunk_change of one sequence changes"),
        (KeepsNoMomentum(), "KeepsNoMomentum.step does not use sum 0 that it is given"),
        (KeepsTheOldSum(), "KeepsTheOldSum.step does not use sum 0 that it is given"),
        (WithoutEta(), "WithoutEta.step does not use the gate eta: multiply the step by at.apply"),
        (WithoutGradient(), "WithoutGradient.step does not use the gradient g"),
        (Still(), "Still.step returns a step of zero"),
        (Every(0), "Every every must be an integer >= 1, got 0"),
        (Every(2.0), "Every every must be an integer >= 1, got 2.0"),
        (NoStep(), r"NoStep.step failed .*NoStep has no method step\(sums, weights, g, at\)"),
        (L2(), "optimiser L2 must derive from InnerOptimiser"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_an_optimiser(optimiser, message):
    with pytest.raises(ValueError, match=message):
        replace(RULES["titans"], optimiser=optimiser)


def test_long_steps_are_warned_of(recwarn):
    """Whether sums grow, or steps have a length of their own; what says that it is not bounded may be as long as it
    likes."""
    with pytest.warns(
        UserWarning, match=r"Growing.step is [\d.]+ times as long as s g .*\(1 - theta\) g in place of g"
    ):
        replace(RULES["titans"], optimiser=Growing())
    with pytest.warns(UserWarning, match=r"OfOneLength.step is .* with entries of about 0.01"):
        replace(RULES["titans"], optimiser=OfOneLength())
    recwarn.clear()
    replace(RULES["titans"], optimiser=Unbounded())
    assert not recwarn


@dataclass(frozen=True)
class NoSettle(NonLinearRetention):
    """No method at all."""


class Narrow(NoSettle):
    def mirror_map(self, a, frozen, initial):
        return a[..., 1:]


class AmongHeads(NoSettle):
    def mirror_map(self, a, frozen, initial):
        return a.softmax(-3)


class NoSums(NoSettle):
    fixed_row_sums = True

    def mirror_map(self, a, frozen, initial):
        return a


@dataclass(frozen=True)
class Linearly(LinearRetention):
    """Set by what the cases make of it: what is kept of W."""

    kind: str = "clamped"

    def keep(self, old, step, alpha, first, last):
        if self.kind == "bare":
            kept = alpha[..., None, None] * old.weights
        else:
            kept = rows(alpha, old.weights).clamp(-0.05, 0.05)
        new = kept - step
        return new if self.kind == "alone" else NewMatrix(new, new, None)


def kept(w):
    return NewMatrix(w, w, None)


class Adds(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(alpha, old.weights) + step)


class Drops(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(alpha, old.weights))


class OfTitans(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(1.0 - alpha, old.weights) - step)


class AtTheFirst(Linearly):
    def keep(self, old, step, alpha, first, last):
        w = old.weights - old.weights.mean(0) if first is True else old.weights
        return kept(rows(alpha, w) - step)


class IfFirst(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept((2.0 if first else 1.0) * rows(alpha, old.weights) - step)


class WorksInPlace(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(old.weights.mul_(0.9).sub_(step))


class NotANumber(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(alpha, old.weights) * float("nan") - step)


class RootAtZero(NoSettle):
    def mirror_map(self, a, frozen, initial):
        return a.abs().sqrt()


class CutsSteps(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(alpha, old.weights) - step.detach())


class CutsTheOld(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(rows(alpha, old.weights.detach()) - step)


class CutsA(NoSettle):
    def mirror_map(self, a, frozen, initial):
        return a.detach() / 2.0


class WithoutAlpha(Linearly):
    def keep(self, old, step, alpha, first, last):
        return kept(0.95 * old.weights - step)


class HasAnAccumulator(Linearly):
    def keep(self, old, step, alpha, first, last):
        new = rows(alpha, old.weights) - step
        return NewMatrix(new, new, new)


class SettlesNothing(Linearly):
    def keep(self, old, step, alpha, first, last):
        return NewMatrix(rows(alpha, old.weights) - step, None, None)


class SmallHome(Linearly):
    def decay_target(self, initial):
        return initial[0], None


class OneHome(Linearly):
    def decay_target(self, initial):
        return initial


@pytest.mark.parametrize(
    "retention,message",
    [
        (NotANumber(), "NotANumber.keep: weights is not finite"),
        (RootAtZero(), "RootAtZero.keep: .* not finite; add a small number under every root"),
        (CutsSteps(), "CutsSteps.keep: weights changes with the step, and lets no gradient through.*detached"),
        (CutsTheOld(), "CutsTheOld.keep: weights changes with W, and lets no gradient through"),
        (CutsA(), "CutsA.keep: .* lets no gradient through"),
        (OneHome(), r"OneHome.decay_target must return a pair.*\(initial, None\)"),
        (
            SmallHome(),
            r"SmallHome.decay_target must be .*each None or shaped as M_0, here \[3, 8, 7\]; got shape \[8, 7\]",
        ),
        (WithoutAlpha(), "WithoutAlpha.keep reads nothing of the gate alpha.*or set gated = False"),
        (HasAnAccumulator(), "HasAnAccumulator.keep returns an accumulator.*set has_mirror_map = True and let begin"),
        (SettlesNothing(), "SettlesNothing.keep: mirrored must be shaped as W.*got None"),
        (Adds(), "Adds.keep does not go down along the step"),
        (Drops(), "Drops.keep does not go down along the step"),
        (OfTitans(), "OfTitans.keep keeps less where alpha is larger.*Titans' letter"),
        (AtTheFirst(), "AtTheFirst.keep: weights of one sequence changes"),
        (IfFirst(), r"IfFirst.keep failed for .*first=tensor.*pick of gates.py takes both"),
        (WorksInPlace(), "WorksInPlace.keep changes in place what it is given.*caller's state"),
        (AmongHeads(), r"AmongHeads.keep: weights of one sequence changes .*dim=\(-2, -1\)"),
        (Linearly("bare"), r"Linearly.keep failed for .*alpha \[2, 3, 4\] \(rows\(alpha, matrix\) multiplies them\)"),
        (Linearly("alone"), r"Linearly.keep must return NewMatrix\(.* got a Tensor$"),
        (NoSettle(), r"NoSettle.begin failed .*NoSettle has no method mirror_map\(a, frozen, initial\)"),
        (NoSums(), "NoSums says fixed_sums.* a step changes the sums of its rows, or they differ"),
        (Narrow(), r"Narrow.mirror_map\(a, frozen, initial\) must be shaped as a"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_retention(retention, message):
    with pytest.raises(ValueError, match=message):
        replace(RULES["titans"], retention=retention)


def test_what_is_inherited_is_no_field(monkeypatch):
    monkeypatch.setitem(KINDS, "optimiser", (*KINDS["optimiser"], Plain))
    rule = RULES["titans"].vary(optimiser={"kind": "Plain"})
    with pytest.raises(
        ValueError, match="Plain has no field 'normalised'; it has no fields: Plain inherits normalised; declare"
    ):
        rule.vary(optimiser={"normalised": False})
    with pytest.raises(ValueError, match=r"Momentum has no field 'every'; choose one of normalised, online\.$"):
        RULES["titans"].vary(optimiser={"every": 4})


def test_only_what_does_not_read_entries_goes_with_endless_features():
    """There a memory has a column a key, and the sign of a column's numbers is not that of the matrix's entries."""
    for known in (
        GradientDescent(),
        Momentum(),
        DeltaGradientDescent(),
        DeltaGradientDescent(after_decay=True),
        Plain(),
    ):
        assert takes_any_columns(known)
    for other in (Muon(), Muon(normalised=False), Sign()):
        assert not takes_any_columns(other)
    with pytest.raises(ValueError, match="Sign reads the entries of a matrix, and Exponential"):
        replace(RULES["dot"], optimiser=Sign())
    assert replace(RULES["dot"], optimiser=Plain()).features == Exponential()
    assert keeps_any_columns(Decay()) and keeps_any_columns(Keep())
    assert not keeps_any_columns(Linearly()) and not keeps_any_columns(RULES["memora"].retention)
    with pytest.raises(
        ValueError, match=r"Linearly reads the entries of a matrix, and Exponential.* take Decay or Keep"
    ):
        replace(RULES["dot"], retention=Linearly())


def test_it_is_tried_in_any_mode_and_draws_nothing():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        replace(RULES["titans"], bias=Square(), optimiser=Plain())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_waits_is_known_without_being_said():
    class Estimated(Plain):
        def chunk_change(self, sums, weights, frozen):
            return -sums[-1]

    assert (
        Estimated.estimates_change
        and Muon.estimates_change
        and not Plain.estimates_change
        and not Momentum.estimates_change
    )


@dataclass(frozen=True)
class CutsKeys(Features):
    def size(self, dim):
        return dim

    def expand(self, x, sqrt_a=None):
        return 1.0 * x.detach()


def test_features_that_cut_gradients():
    with pytest.raises(ValueError, match=r"CutsKeys\.expand changes with x, and lets no gradient through to it"):
        check_part("features", CutsKeys())


@dataclass(frozen=True)
class OfKeysBefore(CutsKeys):
    """Of each key the one before, or the sum of all up to it."""

    summed: bool = False

    def expand(self, x, sqrt_a=None):
        if x.dim() == 1:
            return x
        return x.cumsum(-2) if self.summed else torch.cat([torch.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2)


class OfManyKeys(CutsKeys):
    def expand(self, x, sqrt_a=None):
        return x + 0.0 * x[..., :1, :]


class UnitKeys(CutsKeys):
    def expand(self, x, sqrt_a=None):
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    "features,message",
    [
        (OfKeysBefore(), "OfKeysBefore.expand of one sequence changes with what .* tokens are beside it"),
        (OfKeysBefore(summed=True), "OfKeysBefore.expand of one sequence changes with what .* tokens are beside it"),
        (OfManyKeys(), r"OfManyKeys.expand failed for one key \[4\], with no dimensions in front"),
        (UnitKeys(), "UnitKeys.expand is not finite for keys .* zero.*to every divisor"),
    ],
)
def test_features_of_more_than_their_key(features, message):
    """The first key is zero, so that what comes of it alone tells nothing."""
    with pytest.raises(ValueError, match=message):
        check_part("features", features)
