"""``check_rule`` and ``check_mixer`` find a wrong part of each kind, by its name, and pass what is right."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from atlas_memory.layers.stateful import Stateful
from atlas_memory.memory import (
    MLP,
    RULES,
    Bias,
    DotProduct,
    Features,
    InnerOptimiser,
    LinearRetention,
    Momentum,
    NewMatrix,
    NonLinearRetention,
    State,
)
from atlas_memory.rules.gates import rows
from atlas_memory.testing import check_mixer, check_rule


@pytest.mark.parametrize("name", RULES)
def test_the_rules_of_the_library_pass(name):
    network = RULES[name].network
    check_rule(
        replace(RULES[name], network=replace(network, expansion=1) if "atlas" in name and network.residual else network)
    )


@dataclass(frozen=True)
class Square(Bias):
    def value(self, prediction, v):
        return (prediction - v).square().sum(-1)

    def derivative(self, prediction, v):
        return 2.0 * (prediction - v)

    def curvature(self, prediction, v):
        return torch.full_like(prediction[..., 0], 2.0)


@dataclass(frozen=True)
class Cosines(Features):
    count: int = 3

    def size(self, dim):
        return self.count

    def expand(self, x, sqrt_a=None):
        return (x @ torch.linspace(-1.0, 1.0, x.shape[-1] * self.count).reshape(x.shape[-1], -1).to(x)).cos()


@dataclass(frozen=True)
class Averaged(InnerOptimiser):
    has_momentum = True
    every: int | None = 1

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + rows(1.0 - at.theta, g)
        return (s,), rows(at.apply, s)


@dataclass(frozen=True)
class Friction(LinearRetention):
    """Long rows are forgotten faster."""

    def keep(self, old, step, alpha, first, last):
        w = old.weights
        new = w / (1.0 + rows(1.0 - alpha, w.square().sum(-1, keepdim=True).expand_as(w))) - step
        return NewMatrix(new, new, None)


@dataclass(frozen=True)
class Ball(NonLinearRetention):
    def mirror_map(self, a, frozen, initial):
        return a / a.norm(dim=-1, keepdim=True).clamp_min(1.0)


class Heavier(Momentum):
    """Of a class that the fast form knows, and something else."""

    def step(self, sums, weights, g, at):
        sums, step = super().step(sums, weights, g, at)
        return sums, 0.5 * step + 0.25 * sums[0]

    def end_chunk(self, sums):
        return tuple(0.5 * s for s in sums)


@dataclass(frozen=True)
class Adagrad(InnerOptimiser):
    """A sum without theta, which is never negative."""

    normalised: bool = False
    online: bool = True

    def sums(self, online):
        return 1

    def step(self, sums, weights, g, at):
        squares = sums[0] + g.square()
        return (squares,), rows(at.apply, g / (squares + 1e-3).sqrt())


@dataclass(frozen=True)
class Directions(Averaged):
    """Orthogonalises every gradient on its way into S, also where no step is due."""

    every: int | None = 2
    normalised: bool = False

    def step(self, sums, weights, g, at):
        s = rows(at.theta, sums[0]) + at.orthogonalise(g, 3)
        return (s,), rows(at.apply, s)


OWN = {"bias": Square(), "features": Cosines(), "optimiser": Averaged(), "retention": Friction()}
ALONE = [{axis: part} for axis, part in OWN.items()]


@pytest.mark.parametrize(
    "name,parts",
    [
        *(
            ("titans", parts)
            for parts in (*ALONE, OWN, {"optimiser": Directions()}, {"optimiser": Adagrad()}, {"retention": Ball()})
        ),
        *((name, {"optimiser": Heavier()}) for name in ("omeganet", "memora", "tnt", "atlas++")),
        *((name, {"features": Cosines()}) for name in ("atlas", "gated-deltanet", "ttt-linear")),
    ],
)
def test_parts_of_ones_own_pass(name, parts):
    check_rule(replace(RULES[name], **parts))


class WrongBack(MLP):
    def back(self, weights, cache, error):
        first, last = super().back(weights, cache, error)
        return 2.0 * first, last


def growing(self, sums, weights, g, at):
    s = rows(at.theta, sums[0]) + g
    return (s,), rows(at.apply, s)


def hidden(self):
    object.__setattr__(self, "factor", 2.0)


AVERAGED, FRICTION = Averaged().step, Friction().keep
WRONG: dict[str, tuple[type, dict[str, Any], str]] = {
    "half": (Square, {"derivative": lambda _, p, v: p - v}, "derivative is not the derivative of half.value"),
    "detached": (
        Square,
        {"derivative": lambda _, p, v: 2.0 * (p - v).detach()},
        "derivative is not that of its values",
    ),
    "tokens": (Square, {"value": lambda _, p, v: (p - v).square().sum(-1) * v.std()}, "value of one sequence, head or"),
    "flat": (Square, {"curvature": lambda _, p, v: torch.ones_like(p[..., 0])}, "curvature is too small"),
    "root": (Square, {"curvature": lambda _, p, v: (p - v).norm(dim=-1).rsqrt()}, "curvature .* not finite at zero"),
    "undeclared": (Square, {"__init__": hidden}, "has {'factor'} beside its fields"),
    "drawn": (Square, {"value": lambda _, p, v: torch.rand(p.shape[:-1])}, "value returns something else"),
    "norm": (Cosines, {"squared_norm": lambda _, x, a=None: x.square().sum(-1)}, "squared_norm"),
    "sums": (Cosines, {"expand": lambda _, x, a=None: x.cumsum(-2)[..., :3]}, "expand of one"),
    "longer": (Cosines, {"size": lambda _, dim: 4}, r"expand must return float64 \(2, 3, 4\)"),
    "up": (Averaged, {"step": lambda _, s, w, g, at: (s, -rows(at.apply, g))}, "step must be along the gradient"),
    "batch": (Averaged, {"step": lambda _, s, w, g, at: (s, g / g.std())}, "step of one sequence"),
    "cut": (
        Averaged,
        {"step": lambda _, s, w, g, at: AVERAGED(s, w, g.detach(), at)},
        "step is not that of its values",
    ),
    "still": (
        Averaged,
        {"step": lambda _, s, w, g, at: (s, rows(at.apply, g).detach())},
        "step is not that of its val",
    ),
    "far": (Square, {"value": lambda _, p, v: (p - v).cosh().log().sum(-1)}, "value is not finite in float32"),
    "growing": (Averaged, {"step": growing}, "step is .* times as long"),
    "forgot": (Averaged, {"step": lambda _, s, w, g, at: ((), g)}, "step must return 1 sums"),
    "place": (Averaged, {"step": lambda _, s, w, g, at: ((s[0].add_(g),), g)}, "step changes its arguments in place"),
    "titans": (
        Friction,
        {"keep": lambda _, old, step, a, *at: FRICTION(old, step, 1.0 - a, *at)},
        "keep keeps less where",
    ),
    "drops": (Friction, {"keep": lambda _, old, step, a, *at: FRICTION(old, 0.0 * step, a, *at)}, "keep must subtract"),
    "flags": (
        Friction,
        {"keep": lambda _, old, step, a, i, j: FRICTION(old, step, a if i else 0.5 * a, i, j)},
        "keep failed",
    ),
    "heads": (Ball, {"mirror_map": lambda _, a, frozen, initial: a.softmax(-3)}, "begin of one sequence"),
    "rows": (Ball, {"fixed_row_sums": True}, "rows have different sums"),
    "back": (WrongBack, {}, ""),
}
BASES = {"bias": Bias, "features": Features, "optimiser": InnerOptimiser, "network": MLP, "retention": object}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_named(name):
    base, methods, message = WRONG[name]
    part = type(name, (base,), methods)()
    axis = next(axis for axis, kind in BASES.items() if isinstance(part, kind))
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        check_rule(replace(RULES["titans"], **{axis: part}))


def test_a_rule_is_made_of_parts_that_nobody_checked():
    """Only whether they are dataclasses of their axes, and go together."""
    part = type("half", (Square,), {"value": None})()
    assert replace(RULES["titans"], bias=part).vary(window={"size": 2}).bias is part
    with pytest.raises(ValueError, match=r"bias of a rule must be a dataclass that derives from Bias"):
        replace(RULES["titans"], bias=Averaged())
    with pytest.raises(ValueError, match="bias Thawed must be a frozen dataclass"):
        replace(RULES["titans"], bias=dataclass(type("Thawed", (Bias,), {}))())
    with pytest.raises(ValueError, match=r"Averaged every must be an integer >= 1, got 0\.5"):
        replace(RULES["titans"], optimiser=Averaged(every=0.5))


def test_infinite_features_take_what_declares_that_it_reads_no_entries():
    linear, heavier = (
        type(name, (Averaged,), x)() for name, x in (("A", {"supports_infinite_features": True}), ("B", {}))
    )
    check_rule(replace(RULES["dot"], optimiser=linear, bias=DotProduct()))
    inherits = type("C", (Momentum,), {"step": Momentum.step})()  # what is overridden is declared anew
    for optimiser in (heavier, inherits):
        with pytest.raises(ValueError, match=f"{type(optimiser).__name__} reads the entries of a matrix"):
            replace(RULES["dot"], optimiser=optimiser)
    with pytest.raises(ValueError, match="Friction reads the entries of a matrix"):
        replace(RULES["dot"], retention=Friction())


@dataclass(frozen=True, repr=False)
class Last(State):
    x: torch.Tensor


class Before(Stateful):
    """Every token is answered with the one before it, once its gain is not zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.gain, self.kept = dim, torch.nn.Parameter(torch.zeros(dim)), None

    def _forward(self, x: Any, state: Any, length: Any) -> Any:
        before = torch.cat([x.new_zeros(len(x), 1, self.dim) if state is None else state.x, x], 1)
        at = torch.full((len(x),), x.shape[1]) if length is None else length
        return self.gain * before[:, :-1], Last(before[torch.arange(len(x)), at, None])

    def forward(self, x: Any, state: Any = None, mask: Any = None) -> Any:
        return self.forward_masked(x, state, mask)


def in_itself(self, x, state=None, mask=None):
    y, self.kept = Before.forward(self, x, None if state is None else self.kept, mask)
    return y, self.kept


def future(self, x, state=None, mask=None):
    y, after = Before.forward(self, x, state, mask)
    return y.flip(1), after


def changing(self, x, state=None, mask=None):
    y, after = Before.forward(self, x, state, mask)
    if state is not None and x.shape[1]:
        state.x.copy_(x[:, -1:])
    return y, after


def dropout(self, x, state=None, mask=None):
    return Before.forward(self, torch.nn.functional.dropout(x, 0.5, self.training), state, mask)


@pytest.mark.parametrize(
    "forward,message",
    [
        (lambda self, x, state=None, mask=None: Before.forward(self, x, None, mask), "answers otherwise in calls of"),
        (in_itself, "answers otherwise in calls of"),
        (
            lambda self, x, s=None, m=None: Before.forward(self, x + torch.rand(()), s, m),
            "answers otherwise when it is called",
        ),
        (changing, "changes the state that it is given"),
        (future, "sees the future"),
        (lambda self, x, s=None, m=None: Before.forward(self, x - x.mean(0), s, m), "answers a row otherwise"),
        (lambda self, x, state=None, mask=None: Before.forward(self, x, state), "answers otherwise beside padding"),
        (
            lambda self, x, s=None, m=None: Before.forward(self.requires_grad_(False), x.detach(), s, m),
            "lets no gradient",
        ),
        (dropout, "answers otherwise in training"),
    ],
    ids=range(9),
)
def test_a_wrong_mixer_is_named(forward, message):
    check_mixer(Before(6, 1))
    with pytest.raises(ValueError, match=f"Wrong {message}"):
        check_mixer(type("Wrong", (Before,), {"forward": forward}))
    with pytest.raises(ValueError, match="Linear must derive from Stateful"):
        check_mixer(torch.nn.Linear)
