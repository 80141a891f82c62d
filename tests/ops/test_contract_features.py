"""A feature map that does not agree with itself is refused by name; one with ``size`` and ``expand`` is enough."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from atlas_memory import NeuralMemory
from atlas_memory.memory import KINDS, RULES, Exponential, Features, Rule, chunkwise, fused_recurrent, recurrent

from .problems import everything, random_problem, worst


@dataclass(frozen=True)
class Fourier(Features):
    """cos and sin of fixed random projections, whose kernel is about exp(-|x - y|^2 / 2)."""

    count: int = 6

    def size(self, dim):
        return 2 * self.count

    def expand(self, x, sqrt_a=None):
        generator = torch.Generator().manual_seed(self.count)
        to = torch.randn(x.shape[-1], self.count, generator=generator, dtype=torch.float64).to(x)
        z = x @ to
        return torch.cat([z.cos(), z.sin()], -1) * self.count**-0.5


@dataclass(frozen=True)
class Squares(Features):
    """x and the squares of its entries."""

    def size(self, dim):
        return 2 * dim

    def own(self, dim):
        return slice(0, dim)

    def expand(self, x, sqrt_a=None):
        return torch.cat([x, x.square()], -1)


@pytest.mark.parametrize("features", [Fourier(), Squares()], ids=repr)
@pytest.mark.parametrize("name", ["omeganet", "titans", "atlas", "atlas++", "gated-deltanet", "ttt-linear"])
def test_one_of_ones_own(features, name, monkeypatch):
    """In all forms, and in a layer, whose fresh memory makes hidden units about as long as those of other rules."""
    rule = replace(RULES[name], features=features)
    problem = random_problem(rule, 3, time=11)
    oracle = everything(recurrent, problem)
    for form in (chunkwise, fused_recurrent):
        gap, where = worst(everything(form, problem), oracle)
        assert gap < 1e-8, where
    layer = NeuralMemory(16, 2, rule).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    y, state = layer(x)
    first, state = layer(x[:, :7])
    assert torch.allclose(torch.cat([first, layer(x[:, 7:], state)[0]], 1), y, atol=1e-10)
    if rule.network.feature_mapped[0] and name != "gated-deltanet":
        unit = torch.nn.functional.normalize(torch.randn(500, 8), dim=-1)
        out = features.expand(unit) @ rule.initial_weights(1, 8)[0][0].mT
        assert 0.2 < out.square().mean() * (1 if rule.network.residual else 1 / 8) * 8 < 12
    monkeypatch.setitem(KINDS, "features", (*KINDS["features"], type(features)))
    assert RULES[name].vary(features={"kind": type(features).__name__}).features == type(features)()


class WrongKernel(Squares):
    def kernel(self, x, y, sqrt_a=None):
        return 2.0 * super().kernel(x, y)


class DetachedKernel(Squares):
    def kernel(self, x, y, sqrt_a=None):
        return super().kernel(x.detach(), y)


class WrongNorm(Squares):
    def squared_norm(self, x, sqrt_a=None):
        return x.square().sum(-1)


class WrongColumns(Squares):
    def columns(self, x, keys, sqrt_a=None):
        return 2.0 * self.expand(x)


class Anew(Fourier):
    def expand(self, x, sqrt_a=None):
        return torch.cat([x, torch.randn_like(x)], -1)


class OverTokens(Squares):
    def expand(self, x, sqrt_a=None):
        return torch.cat([x, x - x.mean(-2, keepdim=True)], -1)


class OverTheBatch(Squares):
    def expand(self, x, sqrt_a=None):
        return torch.cat([x, x - x.mean(0, keepdim=True)], -1)


class OwnInName(Fourier):
    def own(self, dim):
        return slice(0, dim)


class BehindOthers(Squares):
    def own(self, dim):
        return slice(dim, 2 * dim)

    def expand(self, x, sqrt_a=None):
        return torch.cat([x.square(), x], -1)


class Longer(Squares):
    def size(self, dim):
        return 2 * dim + 1


class OneWidth(Squares):
    def expand(self, x, sqrt_a=None):
        return x @ torch.ones(16, 32).to(x)


class RootAtZero(Squares):
    def expand(self, x, sqrt_a=None):
        return torch.cat([x, x.abs().sqrt()], -1)


@dataclass(frozen=True)
class EndlessAndLonger(Exponential):
    """Features without end, on a memory that would begin with other columns than its keys have entries."""

    def size(self, dim):
        return dim + 1


@dataclass(frozen=True)
class NoMethods(Features):
    """Nothing."""


@dataclass(frozen=True)
class NoBase:
    """Another kind of class."""


@dataclass(frozen=True)
class Scaled(Squares):
    scale: torch.Tensor | None = None


@pytest.mark.parametrize(
    "features,message",
    [
        (WrongKernel(), r"WrongKernel.kernel\(x, y\) is not the product of expand\(x\) and expand\(y\)"),
        (DetachedKernel(), r"DetachedKernel.kernel\(x, y\) has another gradient than"),
        (WrongNorm(), r"WrongNorm.squared_norm\(x\) is not the squared length of expand\(x\)"),
        (WrongColumns(), r"WrongColumns.columns\(x, keys\) is not expand\(x\)"),
        (Anew(), "Anew.expand returns other numbers when it is called again"),
        (OverTokens(), "OverTokens.expand of one sequence changes .*each key alone"),
        (OverTheBatch(), "OverTheBatch.expand of one sequence changes .*each key alone"),
        (OwnInName(), r"OwnInName.own\(dim\) must be the slice of phi\(x\) that is x itself.*slice\(0, 0\)"),
        (BehindOthers(), r"BehindOthers: entries of phi\(x\) before x itself must be 1\.0, its constant; put"),
        (Longer(), r"Longer.expand must be \[..., size\(dim\)\], here \[2, 3, 5, 9\]; got shape \[2, 3, 5, 8\]"),
        (EndlessAndLonger(), r"EndlessAndLonger.size\(dim=4\) is 5: on endless features .* let size return dim"),
        (OneWidth(), r"OneWidth.expand failed for keys \[2, 3, 5, 4\], of any width"),
        (RootAtZero(), "RootAtZero: the gradient of .* is not finite; smooth it where x is zero"),
        (NoMethods(), r"NoMethods.size failed .*NoMethods has no method size\(dim\)"),
        (NoBase(), "features NoBase must derive from Features"),
        (Scaled(torch.ones(())), "features Scaled must be a frozen dataclass of numbers.*scale is a Tensor"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_one_that_does_not_fit(features, message):
    with pytest.raises(ValueError, match=message):
        Rule(features=features)


@dataclass(frozen=True)
class Differences(Features):
    """x and the differences of its entries, which are zero where all of these are the same."""

    whole: bool = True

    def size(self, dim):
        return dim * (1 + self.whole)

    def own(self, dim):
        return slice(0, dim * self.whole)

    def expand(self, x, sqrt_a=None):
        others = x - x.roll(1, -1)
        return torch.cat([x, others], -1) if self.whole else others


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["omeganet", "ttt-linear"])
def test_a_fresh_memory_on_features_that_are_zero_at_equal_entries(name, whole):
    for m_0 in replace(RULES[name], features=Differences(whole)).initial_weights(2, 16):
        assert m_0.isfinite().all()


def test_the_length_of_what_a_fresh_memory_sees():
    """Features without x among them are seen by random columns, by which each entry has the variance of an
    isometry's."""
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(400, 16), dim=-1)
    for rule in (RULES["omeganet"], replace(RULES["omeganet"], features=Fourier(64))):
        out = rule.features.expand(unit) @ rule.initial_weights(1, 16)[0][0].mT
        assert math.isclose(out.square().mean(), 1 / 16, rel_tol=0.3)
