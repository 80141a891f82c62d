"""The table of rules, what can be changed in a rule, and what a new one must do."""

from dataclasses import dataclass, field, replace
from typing import get_args

import pytest
import torch

from atlas_memory import RULES, Rule
from atlas_memory.memory import (
    KINDS,
    L2,
    MLP,
    Decay,
    DeltaGradientDescent,
    DotProduct,
    Exponential,
    GatedMLP,
    Gates,
    GradientDescent,
    Huber,
    Identity,
    Keep,
    Linear,
    Lp,
    LqNorm,
    Momentum,
    Muon,
    Polynomial,
    RowNorm,
    Sigmoid,
    Softmax,
    Window,
    chunkwise,
    fused_recurrent,
    recurrent,
    resolve_rule,
)
from atlas_memory.rules.bias import AttentionalBias
from atlas_memory.rules.features import FeatureMap
from atlas_memory.rules.networks import Network
from atlas_memory.rules.optimisers import Optimiser
from atlas_memory.rules.retention import NonLinearRetention, Retention

from .problems import error, everything, random_problem, worst


def test_a_new_rule_is_a_row():
    """Yaad that forgets nothing, steps with momentum and sees four tokens: values composed, nothing written."""
    rule = replace(RULES["yaad"], retention=Keep(), optimiser=Momentum(), window=Window(size=4, chunk=8))
    problem = random_problem(rule, seed=0, time=19)
    definition = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):  # outputs, state and every outer gradient
        assert worst(everything(form, problem), definition)[0] < 1e-8
    y, end = chunkwise(*problem.arguments())
    first, state = chunkwise(*problem.between(0, 7).arguments())  # any split into calls gives the whole
    rest, state = chunkwise(*problem.between(7, 19).arguments(), state)
    assert error(torch.cat([first, rest], 2), y) < 1e-10
    assert max(error(a, b) for a, b in zip(state.tensors(), end.tensors(), strict=True)) < 1e-10


# What tests/reference cannot check, since it starts at the printed rows: what the rows are themselves.
FADING = Decay(to_initial=True)  # deep memories do not come back from zero; the papers print Decay()
ROWS = {
    "atlas": (Polynomial(2), MLP(2, 4), FADING, Muon(steps=5, every=1)),
    "atlas++": (Polynomial(2), GatedMLP(4), FADING, Muon()),
    "omeganet": (Polynomial(2), MLP(2, 4), FADING, GradientDescent()),
    "dla": (Polynomial(2), MLP(2, 4), FADING, GradientDescent()),
    "swla": (Polynomial(2, constant=0.1), Linear(), Decay(), GradientDescent(normalised=False)),
    "deeptransformer": (Exponential(), MLP(2, 4), FADING, GradientDescent()),
    "swdt": (Exponential(64), MLP(2, 4), FADING, GradientDescent()),
    "dot": (Exponential(), MLP(2, 4), FADING, GradientDescent()),
    "titans": (Identity(), MLP(2, 4), FADING, Momentum()),
    "moneta": (Identity(), MLP(2, 4, norm=True), LqNorm(4, to_initial=True), GradientDescent()),
    "yaad": (Identity(), MLP(2, 4, norm=True), FADING, GradientDescent()),
    "memora": (Identity(), MLP(2, 4, norm=True), Softmax(scale=0.5, to_initial=True), GradientDescent()),
    "hope": (Identity(), MLP(2, 4), FADING, DeltaGradientDescent()),
    "deltanet": (Identity(), Linear(), Keep(), DeltaGradientDescent(normalised=False)),
    "gated-deltanet": (Identity(), Linear(), Decay(), DeltaGradientDescent(normalised=False, after_decay=True)),
    "ttt-linear": (Polynomial(1), Linear(residual=True, norm=True), Keep(), GradientDescent()),
    "ttt-mlp": (Polynomial(1), MLP(2, 4, bias=True, norm=True), Keep(), GradientDescent()),
    "lact": (Identity(), GatedMLP(1, "silu", residual=False), RowNorm(), Muon(every=None)),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_are_what_the_papers_say(name):
    rule = RULES[name]
    assert (rule.features, rule.network, rule.retention, rule.optimiser) == ROWS[name]


@dataclass(frozen=True)
class Doubled(L2):
    """A bias from outside, with a field that the library's has, too."""

    scale: float = 2.0


def test_printed_leaves_what_no_paper_prints_otherwise():
    rule = replace(RULES["lact"], bias=Doubled(), optimiser=Muon(steps=3, every=4, read_pending=True))
    printed = rule.printed()
    assert printed == replace(rule, optimiser=Muon(3, 4, normalised=False, online=False)) == printed.printed()
    assert RULES["lact"].printed().window == Window(1, 64, read="frozen")  # one step a chunk


def test_windows_and_biases_of_the_rows():
    wide = {name for name, rule in RULES.items() if rule.window.size > 1}
    assert wide == {"atlas", "atlas++", "omeganet", "atlas-linear", "atlas-identity", "swla", "swdt", "dot"}
    hebbian = {name for name, rule in RULES.items() if rule.bias == DotProduct()}
    assert hebbian == {"dla", "swla", "deeptransformer", "swdt", "deltanet", "gated-deltanet", "lact"}
    assert RULES["moneta"].bias == Lp(3) and RULES["yaad"].bias == Huber("mixture", corner=1.0)
    assert {name for name, rule in RULES.items() if rule.window.read != "after"} == {"hope"}


def test_kinds_are_what_a_rule_is_typed_with():
    unions = {
        "features": FeatureMap,
        "network": Network,
        "bias": AttentionalBias,
        "retention": Retention,
        "optimiser": Optimiser,
    }
    assert {name: set(KINDS[name]) for name in unions} == {name: set(get_args(union)) for name, union in unions.items()}
    assert KINDS["window"] == (Window,) and len(KINDS) == 6


@pytest.mark.parametrize("part,kind", [(part, kind) for part, kinds in KINDS.items() for kind in kinds])
def test_vary_puts_any_kind_there(part, kind):
    """From a rule that goes with every one of them."""
    rule = Rule(Identity(), optimiser=GradientDescent(), window=Window(1, 4))
    changed = rule.vary(**{part: {"kind": kind.__name__}})
    present = getattr(rule, part)
    assert getattr(changed, part) == (present if isinstance(present, kind) else kind())
    assert replace(changed, **{part: present}) == rule


def test_vary_of_a_kind_that_is_there_keeps_its_other_fields():
    rule = RULES["lact"].vary(optimiser={"kind": "Muon", "steps": 3}, bias={"kind": "Lp", "p": 1.5})
    assert rule.optimiser == Muon(steps=3, every=None) and rule.bias == Lp(1.5)
    options = {"kind": "Lp"}
    RULES["lact"].vary(bias=options)
    assert options == {"kind": "Lp"}  # what is passed stays as it is


def test_a_part_in_anothers_place_is_named():
    for name in ("features", "network", "window"):
        with pytest.raises(ValueError, match=rf"{name} of a rule must be .*, got L2\(scale=1.0\)"):
            Rule(**{name: L2()})
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"rule must be Rule\(\.\.\.\), got a str"):
        chunkwise("deltanet", None, q, q, q, Gates(q[..., 0]))


def test_parts_are_instances_of_dataclasses():
    for part in ("L2", L2):
        with pytest.raises(ValueError, match=r"bias of a rule must be a dataclass that .*, got .*L2"):
            replace(RULES["titans"], bias=part)


def test_what_waits_needs_a_momentum():
    @dataclass(frozen=True)
    class Late(GradientDescent):
        every: int = 4

    with pytest.raises(ValueError, match="Late every=4 needs a momentum"):
        replace(RULES["omeganet"], optimiser=Late())


def test_every_none_is_once_a_chunk():
    once = RULES["atlas"].vary(optimiser={"every": None}, window={"size": 2, "chunk": 4})
    assert once.every == 4 and RULES["atlas"].every == 1 and RULES["titans"].every == 1
    problem = random_problem(once, 0, time=11)
    at_the_end = replace(problem, rule=once.vary(optimiser={"every": 4}))
    for form in (recurrent, chunkwise, fused_recurrent):
        assert worst(everything(form, problem), everything(form, at_the_end))[0] == 0.0


@pytest.mark.parametrize(
    "parts,message",
    [
        (
            {"features": Exponential()},
            "Muon reads the entries .* Exponential .* take Polynomial",
        ),
        (
            {"features": Exponential(), "optimiser": GradientDescent(), "retention": LqNorm()},
            "LqNorm reads the entries",
        ),
        (
            {"optimiser": DeltaGradientDescent()},
            "for a window of one token, .* got 8 and Decay",
        ),
        (
            {"optimiser": DeltaGradientDescent(), "window": Window(1), "retention": RowNorm()},
            "got 1 and RowNorm",
        ),
        ({"retention": Softmax()}, r"with Muon take Softmax\(lag=False\)"),
        ({"retention": Sigmoid(), "window": Window(1, read="before")}, "Sigmoid .* read='before'"),
    ],
)
def test_what_does_not_go_together_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Rule(**parts)
    with pytest.raises(ValueError, match=message):
        replace(Rule(), **parts)


@pytest.mark.parametrize("retention", [kind for kind in KINDS["retention"] if issubclass(kind, NonLinearRetention)])
def test_every_nonlinear_retention_goes_with_muon_and_momentum(retention):
    value = Softmax(lag=False) if retention is Softmax else retention()
    assert Rule(retention=value).retention == value
    assert Rule(retention=retention(), optimiser=Momentum()).optimiser == Momentum()


def test_ablations_differ_from_atlas_in_one_part():
    parts = ("features", "network", "bias", "retention", "optimiser", "window")
    for name in ("atlas++", "omeganet", "atlas-linear", "atlas-identity", "atlas-c1"):
        assert sum(getattr(RULES[name], p) != getattr(RULES["atlas"], p) for p in parts) == 1


def test_vary_changes_only_what_it_names():
    rule = RULES["atlas"].vary(optimiser={"every": 4}, window={"size": 2})
    assert rule.optimiser == Muon(every=4) and rule.window == Window(2, 16)
    assert rule.network == RULES["atlas"].network and RULES["atlas"].optimiser.every == 1


@pytest.mark.parametrize(
    "parts,message",
    [
        ({"optimizer": {}}, "a rule has no part 'optimizer'; did you mean optimiser"),
        (
            {"optimiser": {"rate": 1}},
            "optimiser Muon has no field 'rate'; choose one of steps, every, precise",
        ),
        ({"retention": {"alpha": 1}}, "retention Decay has no field 'alpha'; choose one of to_initial"),
        ({"optimiser": 3}, "must map fields to values"),
        ({"optimiser": {"steps": 0}}, "Muon steps must be an integer >= 1"),
        ({"features": {"degree": 0}}, "degree must be an integer >= 1"),
        (
            {"features": {"kind": "Fourier"}},
            "features has no kind 'Fourier'; choose one of Identity, Polynomial, Expon",
        ),
        ({"bias": {"kind": "Muon"}}, "bias has no kind 'Muon'; choose one of L2, DotProduct"),
        ({"features": {"kind": "Identity", "degree": 2}}, "features Identity has no field 'degree'; it has no fields"),
        ({"bias": {"kind": "Lp", "p": 0.5}}, "Lp p must be >= 1"),
        ({"retention": {"kind": "Softmax"}}, "a lag token is for gradient descent and momentum"),
        ({"network": {"activation": ["gelu"]}}, "MLP activation must be a word such as 'gelu', got"),
        ({"network": {"norm": "no"}}, "MLP norm must be true or false, got 'no'"),
    ],
)
def test_vary_refuses(parts, message):
    with pytest.raises(ValueError, match=message):
        RULES["atlas"].vary(**parts)


def test_vary_puts_a_kind_there_whose_fields_have_no_default(monkeypatch):
    @dataclass(frozen=True)
    class Weighed(L2):
        weight: float = field(kw_only=True)

    monkeypatch.setitem(KINDS, "bias", (*KINDS["bias"], Weighed))
    assert RULES["titans"].vary(bias={"kind": "Weighed", "weight": 2.0, "scale": 0.5}).bias == Weighed(0.5, weight=2.0)
    with pytest.raises(ValueError, match="bias Weighed has no default for weight: give 'weight' a value"):
        RULES["titans"].vary(bias={"kind": "Weighed"})


def test_resolve():
    assert resolve_rule("atlas") is RULES["atlas"]
    assert resolve_rule("atlas", window=3).window == Window(3, 16)
    assert resolve_rule(Rule(), chunk_size=8).window == Window(8, 8)
    with pytest.raises(ValueError, match="unknown rule 'atlsa'; did you mean atlas"):
        resolve_rule("atlsa")
