"""Retentions as what they claim to be: W = argmin <g, W> + D(W, W_prev), each solved to its KKT conditions.

The objectives are those of Miras, section 5.2; for entries the objective is separable up to the simplex of a row, so a
point is optimal where all directions that stay feasible ascend.
"""

import pytest
import torch

from atlas_memory.memory import ElasticNet, FDivergence, LqNorm, RowNorm, Sigmoid, Softmax

from .problems import error

ROWS, COLUMNS = 4, 6


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_of_the_gradient(objective, w):
    """Per row, the gradient's largest difference between entries above zero, and how far below that level it falls at
    entries that are zero: both vanish at the minimum over a simplex."""
    w = w.detach().requires_grad_()
    (grad,) = torch.autograd.grad(objective(w), w)
    free = w > 0
    level = torch.where(free, grad, -torch.inf).amax(-1, keepdim=True)
    uneven = (level - torch.where(free, grad, torch.inf).amin(-1, keepdim=True)).max()
    below = (level - torch.where(free, torch.inf, grad)).clamp_min(0).max()
    return uneven.item(), below.item()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_softmax_solves_kullback_leibler_with_entropy(scale, seed):
    """eta <g, W> + scale (KL(W, W_prev) + beta sum W log W) on the scaled simplex: alpha = 1 / (1 + beta), and
    eta / (1 + beta) is the paper's eta' (Eqs. 20-21, where scale is 1)."""
    retention = Softmax(scale)
    previous, g, eta, beta = retention.mirror_map(*3 * [randn(seed, ROWS, COLUMNS)]), randn(9, ROWS, COLUMNS), 0.7, 0.4

    def objective(w):
        divergence = (w * (w / previous).log() - w + previous).sum()
        return eta * (g * w).sum() + scale * (divergence + beta * (w * w.log()).sum())

    a = scale * previous.log() / (1 + beta) - eta / (1 + beta) * g
    w = retention.mirror_map(a, previous, previous)
    assert torch.allclose(w.mean(-1), torch.full((ROWS,), scale).double())
    assert max(spread_of_the_gradient(objective, w)) < 1e-10


@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_f_divergence_solves_pearsons(scale, size):
    """eta <g, W> + sum W_prev f(W / W_prev), f(u) = (u - 1)^2 / 2, W >= 0; large steps push entries to zero."""
    retention = FDivergence(scale)
    previous, a = retention.begin(randn(0, ROWS, COLUMNS))
    assert a.count_nonzero() == 0
    step = size * randn(1, ROWS, COLUMNS)  # eta g

    def objective(w):
        return (step * w).sum() + (previous * (w / previous - 1) ** 2).sum() / 2

    w = retention.mirror_map(-step, previous, previous)
    assert (w >= 0).all() and torch.allclose(w.mean(-1), torch.full((ROWS,), scale).double())
    assert bool((w == 0).any()) == (size > 0.1)
    assert max(spread_of_the_gradient(objective, w)) < 1e-9
    # What is at zero stays there, multiplied, and takes nothing from the rest.
    again = retention.mirror_map(-step, w, previous)
    assert (again[w == 0] == 0).all() and torch.allclose(again.mean(-1), torch.full((ROWS,), scale).double())


@pytest.mark.parametrize("local", [True, False])
def test_elastic_net_solves_its_problem(local):
    """Eq. 22: eta <g, W> + |W - W_prev|^2 / 2 + (eta / beta) |W|^2 / 2 + (eta / a) |W|_1: lambda = beta / (beta + eta),
    zeta = eta lambda and threshold eta beta / (a (eta + beta)). Eq. 23 (FTRL): <sum g, W> + |W|^2 / (2 eta) + |W|_1 / a
    has threshold eta / a."""
    eta, beta, a = 0.3, 0.8, 5.0
    previous, g = randn(0, 50), randn(1, 50)
    if local:
        lam = beta / (beta + eta)
        threshold, accumulated = eta * beta / (a * (eta + beta)), lam * previous - eta * lam * g
        curvature, slope = 1 + eta / beta, eta * g - previous
    else:
        threshold, accumulated = eta / a, previous - eta * g
        curvature, slope = 1.0, -accumulated
    w = ElasticNet(threshold, local).mirror_map(accumulated[None], previous[None], previous[None])[0]
    # Zero lies in curvature w + slope + (eta / a) d|w|: sign(w) where w is not zero, [-1, 1] where it is.
    residual = curvature * w + slope
    assert torch.allclose(residual[w != 0], -(eta / a) * w[w != 0].sign(), atol=1e-12)
    assert (residual[w == 0].abs() <= eta / a).all() and 0 < (w == 0).sum() < 50


def test_elastic_net_forgets_what_falls_below_and_ftrl_does_not():
    zero, write = torch.zeros(1, 1), torch.full((1, 1), 0.6)
    for local, end in ((True, 0.0), (False, 0.2)):
        retention, a = ElasticNet(1.0, local), zero
        for _ in range(2):
            mirrored = retention.mirror_map(a + write, zero, zero)
            a = retention.restart(a + write, mirrored)
        assert mirrored.item() == pytest.approx(end)
    initial = torch.tensor([[0.5, 2.0]])
    assert ElasticNet(1.0).begin(initial)[1].tolist() == [[0.0, 1.0]]  # it starts as it goes on, from W
    assert ElasticNet(1.0, local=False).begin(initial)[1] is initial


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sigmoid_is_a_bregman_step(scale):
    """eta <g, W> + D_F(W, W_prev), F' = logit(W / scale): F'(W) = F'(W_prev) - eta g, and entries stay inside."""
    retention, step = Sigmoid(scale), 5 * randn(1, ROWS, COLUMNS)
    a = randn(0, ROWS, COLUMNS)
    previous = retention.mirror_map(a, a, a)
    w = retention.mirror_map(a - step, previous, a)
    assert ((w > 0) & (w < scale)).all()
    assert torch.allclose((w / scale).logit(), (previous / scale).logit() - step)


@pytest.mark.parametrize("q", [2.0, 3.0, 4.0])
def test_l_q_is_the_mirror_map_of_half_the_squared_norm(q):
    """FTRL with |W|_p^2 / 2, 1/p + 1/q = 1, has W = grad |A|_q^2 / 2 = sign(A) |A|^(q - 1) / |A|_q^(q - 2). The paper's
    Eq. 24 keeps A where this has sign(A) |A|^(q - 1), which for q = 2 is the same; what we hold is Eq. 24."""
    a = randn(0, ROWS, COLUMNS)
    w = LqNorm(q).mirror_map(a, a, a)
    assert error(w, a / torch.linalg.vector_norm(a, q) ** (q - 2)) < 1e-12
    if q == 2.0:
        assert torch.equal(w, a)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-3, 1e3, 1e12])
def test_l_q_at_any_size(size):
    a = (size * torch.randn(ROWS, COLUMNS)).requires_grad_()
    w = LqNorm().mirror_map(a, a, a)
    (grad,) = torch.autograd.grad(w.sum(), a)
    assert w.isfinite().all() and grad.isfinite().all()


def test_row_norm_keeps_lengths_and_directions():
    initial, a = randn(0, ROWS, COLUMNS), 7 * randn(1, ROWS, COLUMNS)
    w = RowNorm().mirror_map(a, a, initial)
    assert torch.allclose(w.norm(dim=-1), initial.norm(dim=-1))
    assert torch.allclose(torch.cosine_similarity(w, a, dim=-1), torch.ones(ROWS).double())


@pytest.mark.parametrize("kind", [Softmax, Sigmoid, FDivergence])
def test_bad_scales(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__} scale must be a finite number above 0, got 0"):
        kind(scale=0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="ElasticNet threshold must be >= 0, got -1"):
        ElasticNet(-1)
    with pytest.raises(ValueError, match=r"LqNorm q must be >= 2, got 1\.5"):
        LqNorm(1.5)
