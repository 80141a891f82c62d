"""The Gram kernel against rules/orthogonal.py."""

import pytest
import torch

from atlas_memory.memory import gram_polynomial, newton_schulz

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.ops.triton.gram_newton_schulz import gram_newton_schulz

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def of_symmetric(gram: torch.Tensor, steps: int = 5, floor: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel makes its input symmetric."""
    return gram_polynomial(0.5 * (gram + gram.mT), steps, floor=floor)


def with_gradient(form, gram, weight, *options):
    gram = gram.clone().requires_grad_()
    q = form(gram, *options)
    return q.detach(), torch.autograd.grad((q * weight).sum(), gram)[0]


@pytest.mark.parametrize(
    "size,columns,steps", [(16, 24, 5), (32, 32, 5), (19, 40, 5), (5, 3, 3), (64, 96, 5), (16, 16, 1)]
)
def test_equals_the_polynomial(size, columns, steps):
    """Values and gradients, at any scale; the gradient weight is not symmetric, nor the given matrix."""
    g = torch.Generator().manual_seed(size)
    s = torch.randn(3, 2, size, columns, generator=g, dtype=torch.float64)
    s[0] *= 1e-12
    s[1] *= 1e9
    noise = torch.randn(3, 2, size, size, generator=g, dtype=torch.float64)
    gram = s @ s.mT * (1 + 0.1 * noise)
    weight = torch.randn(gram.shape, generator=g, dtype=torch.float64)
    expected = with_gradient(of_symmetric, gram, weight, steps)
    got = with_gradient(gram_newton_schulz, gram, weight, steps)
    for a, b in zip(got, expected, strict=True):
        for i in range(3):
            assert error(a[i], b[i]) < 1e-10


@pytest.mark.parametrize("size", [16, 19])
def test_equals_the_polynomial_with_a_floor(size):
    g = torch.Generator().manual_seed(size)
    s = torch.randn(3, 2, size, 40, generator=g, dtype=torch.float64)
    s[0], s[1] = 0.0, 1e3 * s[1]
    weight = torch.randn(3, 2, size, size, generator=g, dtype=torch.float64)
    floor = torch.rand(3, 1, 1, 1, generator=g, dtype=torch.float64)
    expected = with_gradient(of_symmetric, s @ s.mT, weight, 5, floor)
    for a, b in zip(with_gradient(gram_newton_schulz, s @ s.mT, weight, 5, floor), expected, strict=True):
        assert all(error(a[i], b[i]) < 1e-10 for i in range(3))


def test_orthogonalises():
    s = torch.randn(4, 16, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert error(gram_newton_schulz(s @ s.mT) @ s, newton_schulz(s)) < 1e-8


def test_float32_is_as_good_as_the_polynomial_in_float32():
    g = torch.Generator().manual_seed(0)
    s = torch.randn(4, 32, 64, generator=g)
    gram, weight = s @ s.mT, torch.randn(4, 32, 32, generator=g)
    truth = with_gradient(of_symmetric, gram.double(), weight.double())
    plain = with_gradient(of_symmetric, gram, weight)
    for a, b, exact in zip(with_gradient(gram_newton_schulz, gram, weight), plain, truth, strict=True):
        assert a.dtype == torch.float32
        assert error(a, exact) < max(1e-5, 2 * error(b, exact))


def test_zero_gives_zero_with_a_zero_gradient():
    gram = torch.zeros(2, 16, 16)
    gram[1] = torch.eye(16)
    q, grad = with_gradient(gram_newton_schulz, gram, torch.ones(16, 16))
    assert not q[0].any() and not grad[0].any() and q[1].any()


def test_no_matrices():
    assert gram_newton_schulz(torch.zeros(0, 16, 16)).shape == (0, 16, 16)
