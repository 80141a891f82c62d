"""Newton-Schulz against its scalar polynomial on the singular values."""

import math
import sys
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from atlas_memory.memory import gram_polynomial, newton_schulz
from atlas_memory.ops.flops import flop_counter
from atlas_memory.ops.gram_eigenvalues import eigenvalues_pay
from atlas_memory.ops.newton_schulz import gram_cost, saturated, schulz_cost
from atlas_memory.rules.orthogonal import COEFFICIENTS, CONVERGENT, saturate

from .problems import error

SHAPES = [(1, 1), (3, 7), (7, 3), (5, 5), (16, 64), (40, 9)]


def by_svd(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm(dim=(-2, -1))[..., None]
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s[..., None, :] @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_both_faces_equal_the_polynomial_of_the_singular_values(shape, steps):
    s = torch.randn(2, 3, *shape, dtype=torch.float64)
    assert error(newton_schulz(s, steps), by_svd(s, steps)) < 1e-11
    assert error(gram_polynomial(s @ s.mT, steps) @ s, by_svd(s, steps)) < 1e-9


@pytest.mark.parametrize("shape", [(16, 40), (64, 256), (200, 20), (24, 24)])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_float32_against_float64(shape, condition, scale):
    """At any condition and scale 2e-5, outputs and gradients; without a restart long matrices are at 2e-4."""
    g = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(4, n, min(shape), generator=g, dtype=torch.float64))[0] for n in shape)
    spread = torch.logspace(0, -math.log10(condition), min(shape), dtype=torch.float64)
    s = ((u * spread) @ v.mT).float()
    direction = torch.randn(4, *shape, generator=g)
    results = []
    for exact in (s.double(), s * scale):
        exact.requires_grad_()
        out = newton_schulz(exact)
        (grad,) = torch.autograd.grad((out * direction).sum(), exact)
        results.append((out.detach(), grad))
    (expected, slope), (found, gradient) = results
    assert error(found, expected) < 2e-5 and error(expected, by_svd(s.double(), 5)) < 1e-11
    assert error(gradient.double() * scale, slope) < 2e-5


@pytest.mark.parametrize("rows,columns,steps", [(16, 32, 5), (16, 33, 5), (16, 64, 1), (64, 16, 2), (16, 64, 9)])
def test_cost_is_what_runs(rows, columns, steps):
    with flop_counter() as counter:
        newton_schulz(torch.randn(rows, columns), steps)
    assert counter.get_total_flops() / 2 == schulz_cost(rows, columns, steps)
    with flop_counter() as counter:
        gram_polynomial(torch.randn(rows, rows), steps)
    assert counter.get_total_flops() / 2 == gram_cost(rows, steps)


def test_singular_values_end_near_one():
    values = torch.linalg.svdvals(newton_schulz(torch.randn(8, 64, 256)))
    assert values.min() > 0.65 and values.max() < 1.2


@pytest.mark.parametrize("power", [-30, -20, -7, 0, 7, 20, 30])
def test_scale_invariance_in_float32(power):
    s = torch.randn(4, 6, 9)
    assert error(newton_schulz(s * 10.0**power), newton_schulz(s)) < 1e-4


def test_zero_is_zero_with_a_zero_gradient():
    s = torch.zeros(2, 4, 6, requires_grad=True)
    for out in (newton_schulz(s), gram_polynomial(s @ s.mT) @ s):
        assert out.count_nonzero() == 0
        (grad,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), s)
        assert grad.isfinite().all() and grad.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (2, 5)])
def test_gradcheck(shape):
    s = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(newton_schulz, (s,))
    assert gradgradcheck(newton_schulz, (s,))
    assert gradcheck(lambda s: gram_polynomial(s @ s.mT) @ s, (s,), atol=1e-5, rtol=1e-3)


def test_a_single_matrix():
    s = torch.randn(4, 7)
    assert newton_schulz(s).shape == (4, 7)
    assert error(gram_polynomial(s @ s.mT) @ s, newton_schulz(s)) < 1e-3


by_eigenvalues = partial(gram_polynomial, eigenvalues=True)


def test_eigenvalues_that_are_equal_close_or_zero():
    """Divided differences have nothing to divide by: identities, low ranks, and pairs an ulp apart."""
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=g, dtype=torch.float64))[0]
    values = torch.ones(5, 8, dtype=torch.float64)
    values[1, 3:] = 0.0
    values[2, 1] += 2e-16
    values[3] = torch.logspace(0, -18, 8)
    values[4] = 0.0
    results = []
    for eigenvalues in (True, False):
        gram = ((basis * values[:, None]) @ basis.mT).requires_grad_()
        q = gram_polynomial(gram, eigenvalues=eigenvalues)
        results.append((q.detach(), *torch.autograd.grad((q * basis).sum(), gram)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, 0.5 * (expected + expected.mT), rtol=1e-9, atol=1e-9)


def test_eigenvalues_of_nothing_of_nan_and_twice():
    """A NaN stays in its own matrix, as with products, where LAPACK would raise. Second derivatives, vmap, none."""
    gram = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    gram[1, 0, 2] = torch.nan
    q = by_eigenvalues(gram)
    assert q[0].isfinite().all() and q[1].isnan().all()
    assert by_eigenvalues(torch.zeros(0, 3, 3, dtype=torch.float64)).shape == (0, 3, 3)
    s = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    loose = {"atol": 1e-5, "rtol": 1e-3}
    assert gradcheck(lambda s: by_eigenvalues(s @ s.mT, 3) @ s, (s,), **loose)
    assert gradgradcheck(lambda s: by_eigenvalues(s @ s.mT, 2) @ s, (s,), **loose)
    torch.testing.assert_close(torch.vmap(by_eigenvalues)(s @ s.mT), by_eigenvalues(s @ s.mT))


def test_when_eigenvalues_pay(monkeypatch):
    square = torch.zeros(64, 64, dtype=torch.float64)
    for threads, pays in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert eigenvalues_pay(square) is pays
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert (
        not eigenvalues_pay(square.float())
        and not eigenvalues_pay(square[:31])
        and not eigenvalues_pay(square.to("meta"))
    )


@pytest.mark.parametrize("eigenvalues", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("many", [2, 9])
def test_the_backward_passes_are_those_of_autograd(steps, many, eigenvalues, monkeypatch):
    """Of the iteration as printed, on wide, square and tall matrices, all at once and in blocks."""
    a, b, c = COEFFICIENTS
    module = sys.modules[newton_schulz.__module__]
    monkeypatch.setattr(module, "CACHED", 4 * 6 * 6 * 8)
    for rows, columns in ((6, 30), (6, 6), (9, 4)):
        x = torch.randn(many, rows, columns, dtype=torch.float64, requires_grad=True)
        weights = torch.randn_like(x)
        unit = x / x.square().sum((-2, -1), keepdim=True).sqrt()
        for _ in range(steps):
            gram = unit @ unit.mT
            unit = a * unit + (b * gram + c * gram @ gram) @ unit
        gram = x @ x.mT
        for found in (newton_schulz(x, steps), gram_polynomial(gram, steps, None, eigenvalues) @ x):
            torch.testing.assert_close(found, unit, rtol=1e-9, atol=1e-11)
            gradients = [torch.autograd.grad(y, x, weights, retain_graph=True)[0] for y in (found, unit)]
            torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_saturating_equals_the_polynomial_of_the_singular_values(shape, size):
    """All three ways; nothing is made larger, and what is not huge comes to sigma / sqrt(sigma^2 + 1)."""
    s = size * torch.randn(2, 3, *shape, dtype=torch.float64)
    a, b, c = CONVERGENT
    u, sigma, v = torch.linalg.svd(s, full_matrices=False)
    length = (sigma.square().sum(-1, keepdim=True) + 1).sqrt()
    x = q = (sigma.square() + 1).sqrt() / length
    for _ in range(5):
        x = a * x + b * x**3 + c * x**5
    moved = sigma / length * x / q
    expected = u * moved[..., None, :] @ v
    floor = torch.ones(1, 1, dtype=torch.float64)
    for eigenvalues in (True, False):
        by_gram = gram_polynomial(s @ s.mT, floor=floor, eigenvalues=eigenvalues) @ s
        assert error(by_gram, expected) < 1e-10
    assert error(saturate(s), expected) < 1e-11 and error(saturated(s), expected) < 1e-11
    assert (moved <= sigma * (1 + 1e-12)).all() and (moved <= 1 + 1e-12).all()
    if length.max() < 4:
        assert error(moved, sigma / (sigma.square() + 1).sqrt()) < 1e-3


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_saturating_is_differentiable_twice_and_everywhere(shape):
    g = torch.Generator().manual_seed(0)
    s = torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
    assert gradcheck(saturated, s) and gradgradcheck(saturated, s)
    for size in (0.0, 1e-30, 1e-3, 1e3, 1e18):
        for dtype in (torch.float32, torch.float64):
            x = (size * s.detach()).to(dtype).requires_grad_()
            y = saturated(x)
            (slope,) = torch.autograd.grad(y.sum(), x)
            assert y.isfinite().all() and slope.isfinite().all() and y.abs().max() <= 1.0 + 1e-5
            if size < 1e-2:
                torch.testing.assert_close(y, x, rtol=1e-4, atol=0.0)
