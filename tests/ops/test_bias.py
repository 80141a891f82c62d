"""Every attentional bias against its formula in the papers."""

import math

import pytest
import torch

from atlas_memory.memory import L2, DotProduct, Huber, Lp, RobustL2

E = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64)  # |e|_2 = 2.35, |e|_1 = 3.5
V = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64)
NORM, NORM_1 = math.sqrt(0.09 + 1.44 + 4.0), 3.5


def huber_by_coordinate(delta):
    """Miras Eq. 13."""
    return sum(0.5 * e * e if abs(e) <= delta else delta * (abs(e) - 0.5 * delta) for e in E.tolist())


def huber_of_the_norm(delta):
    """Miras Eq. 15."""
    return 0.5 * NORM**2 if delta >= NORM else delta * (NORM - 0.5 * delta)


def huber_mixture(delta):
    """Miras Eq. 16: its far step is eta delta grad |e|_1."""
    return 0.5 * NORM**2 if delta >= NORM else delta * NORM_1


def huber_rounded(delta):
    """The same, its absolute values rounded over half of delta / sqrt(d)."""
    rounded = (E.square() + (0.5 * delta) ** 2 / len(E)).sqrt().sum().item()
    return 0.5 * NORM**2 if delta >= NORM else delta * rounded


def robust(delta):
    """max over |dv| <= delta of 1/2 |e - dv|^2 (Miras section 5.1)."""
    return 0.5 * NORM**2 + delta * NORM + 0.5 * delta**2


def value(bias, delta=None):
    v = V if delta is None else torch.cat([V, torch.tensor([delta]).double()])
    return bias.value(V + E, v).item()


def test_biases_without_a_threshold():
    assert value(L2()) == pytest.approx(NORM**2, rel=1e-12)
    assert value(L2(0.5)) == pytest.approx(NORM**2 / 2, rel=1e-12)
    assert value(DotProduct()) == pytest.approx(-((V + E) @ V).item(), rel=1e-12)  # minus: a write, not an erasure
    for p in (1.0, 1.5, 2.0, 3.0):
        assert value(Lp(p)) == pytest.approx(sum(abs(e) ** p for e in E.tolist()), rel=1e-4)  # but for the smoothing


@pytest.mark.parametrize("delta", [0.05, 0.5, 1.5, 2.3, 2.4, 10.0])
@pytest.mark.parametrize(
    "bias,formula",
    [
        (Huber("coordinates", corner=1.0), huber_by_coordinate),  # which is the mixture's
        (Huber("norm"), huber_of_the_norm),
        (Huber("mixture"), huber_mixture),
        (Huber("mixture", corner=0.5), huber_rounded),
        (RobustL2(), robust),
    ],
    ids=["coordinates", "norm", "mixture", "rounded", "robust"],
)
def test_biases_with_a_threshold(bias, formula, delta):
    assert value(bias, delta) == pytest.approx(formula(delta), rel=1e-5)


def test_the_robust_bias_is_the_worst_shift():
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    shifts = 0.7 * torch.stack([angles.cos(), angles.sin()], -1)
    e = torch.tensor([0.6, -1.1], dtype=torch.float64)
    searched = 0.5 * (e - shifts).square().sum(-1).max()
    ours = RobustL2().value(e, torch.tensor([0.0, 0.0, 0.7], dtype=torch.float64))
    assert ours == pytest.approx(searched.item(), rel=1e-4)


@pytest.mark.parametrize(
    "bias,step",
    [
        # Miras Eq. 11: p sign(e) |e|^(p - 1); Eq. 14; Eq. 15; Eq. 16; e + delta e / |e|
        (Lp(3.0), 3 * E.sign() * E.abs() ** 2),
        (Lp(1.0), E.sign()),
        (Huber("coordinates"), torch.where(E.abs() <= 1, E, E.sign())),
        (Huber("norm"), E / NORM),
        (Huber("mixture"), E.sign()),
        (RobustL2(), E + E / NORM),
    ],
    ids=["l3", "l1", "coordinates", "norm", "mixture", "robust"],
)
def test_derivatives_are_the_printed_steps(bias, step):
    v = torch.cat([V, torch.ones(1).double()]) if bias.has_delta else V
    assert torch.allclose(bias.derivative(V + E, v), step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [L2(), Lp(1.0), Lp(3.0), RobustL2(), *map(Huber, ("coordinates", "norm", "mixture"))])
def test_no_error_is_a_stationary_point(bias):
    v = torch.cat([V, torch.ones(1).double()]) if bias.has_delta else V
    assert bias.derivative(V, v).count_nonzero() == 0


@pytest.mark.parametrize("p,left", [(1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 1 / 3), (6.0, 0.6)])
def test_a_full_step_under_lp_goes_up_to_the_value_and_not_beyond(p, left):
    """What it leaves of the largest coordinate, the smallest for p below 2; no coordinate changes its sign."""
    bias = Lp(p)
    after = E - bias.derivative(V + E, V) / bias.curvature(V + E, V)
    shares = after / E
    assert shares.min().item() == pytest.approx(left, abs=1e-4)
    assert shares.min() > -1e-4 and shares.max() < 1


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"Lp p must be >= 1, got 0\.5"):
        Lp(0.5)
    with pytest.raises(ValueError, match="Huber over must be 'coordinates', 'norm' or 'mixture', got 'l1'"):
        Huber("l1")
    with pytest.raises(ValueError, match=r"Huber corner must be >= 0, got -1\.0"):
        Huber("mixture", corner=-1.0)
    with pytest.raises(ValueError, match="L2 scale must be a finite number above 0"):
        L2(-1.0)
