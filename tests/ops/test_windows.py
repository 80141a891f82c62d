"""The band of gates, the products of decays and the step schedule against their definitions."""

import pytest
import torch

from atlas_memory.memory import Window
from atlas_memory.ops.banded import band, decay_matrix, overlapping, running_product, shift_right, stretches


@pytest.mark.parametrize("b,c", [(1, 1), (1, 4), (5, 1), (4, 3), (3, 7)])
def test_band(b, c):
    gamma = torch.rand(2, 3, b, c)
    exists = torch.rand(2, 1, b + c - 1) > 0.3
    expected = torch.zeros(2, 3, b, b + c - 1)
    for t in range(b):
        for j in range(c):
            expected[:, :, t, t - j + c - 1] = gamma[:, :, t, j]
    assert torch.equal(band(gamma), expected)
    assert torch.equal(band(gamma, exists), expected * exists[..., None, :])


def test_decay_matrix_is_exact_at_zero_and_for_tiny_factors():
    factor = torch.tensor([0.5, 0.0, 1e-30, 1e-30, 1.0, 0.9], dtype=torch.float64)
    d = decay_matrix(factor)
    for t in range(6):
        for n in range(6):
            assert d[t, n] == (factor[n + 1 : t + 1].prod() if n <= t else 0.0)


@pytest.mark.parametrize("rows,columns", [(slice(None), slice(None)), (slice(1, None, 2), slice(None)),
                                          (slice(None), slice(1, None, 2)), (slice(5, None, 6), slice(None)),
                                          (slice(None), slice(5, None, 6))])  # fmt: skip
def test_some_of_a_decay_matrix_and_its_gradient(rows, columns):
    factor = torch.rand(2, 3, 6, dtype=torch.float64)
    factor[0, 1, 2] = factor[0, 1, 4] = factor[1, 0, 0] = 0.0
    factor.requires_grad_()
    some = decay_matrix(factor, rows, columns)
    torch.testing.assert_close(some, decay_matrix(factor)[..., rows, :][..., columns], rtol=1e-14, atol=0.0)
    assert torch.autograd.gradcheck(lambda f: decay_matrix(f, rows, columns), factor)
    assert torch.autograd.gradgradcheck(lambda f: decay_matrix(f, rows, columns), factor)


@pytest.mark.parametrize("b", [1, 2, 5, 8])
def test_running_product_and_its_gradient(b):
    factor = torch.rand(2, 3, b, dtype=torch.float64)
    factor[0, 1, b // 2] = factor[0, 1, b - 1] = factor[1, 0, 0] = 0.0
    factor.requires_grad_()
    assert torch.equal(running_product(factor), factor.cumprod(-1))
    weights = torch.randn(2, 3, b, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((p(factor) * weights).sum(), factor)[0] for p in (running_product, _cumprod))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradgradcheck(running_product, factor)


def _cumprod(x):
    return x.cumprod(-1)


def test_shift_right_with_a_shift_a_row():
    x = torch.arange(1.0, 7.0).view(2, 1, 3, 1)
    layout = shift_right(x, torch.tensor([0, 2]), 5)
    assert layout[0, 0, :3, 0].tolist() == [1, 2, 3] and layout[1, 0, 2:, 0].tolist() == [4, 5, 6]


@pytest.mark.parametrize("count,width,step", [(4, 9, 8), (1, 5, 3), (5, 11, 4), (3, 2, 2)])
def test_overlapping_and_its_gradient(count, width, step):
    x = torch.randn(2, (count - 1) * step + width, 3, dtype=torch.float64, requires_grad=True)
    found = overlapping(x, width, step)
    assert torch.equal(found, torch.stack([x[:, i * step : i * step + width] for i in range(count)], 1))
    assert torch.autograd.gradcheck(lambda x: overlapping(x, width, step), x)
    assert torch.autograd.gradgradcheck(lambda x: overlapping(x, width, step).square(), x)


@pytest.mark.parametrize("time,width", [(7, 3), (4, 4), (5, 1)])
def test_stretches_and_their_gradient(time, width):
    x = torch.randn(2, 3, time, dtype=torch.float64, requires_grad=True)
    found = stretches(x, width)
    assert torch.equal(found, overlapping(x.mT, width, 1).flatten(-3, -2).mT) and found.is_contiguous()
    assert torch.autograd.gradcheck(lambda x: stretches(x, width), x)
    assert torch.autograd.gradgradcheck(lambda x: stretches(x, width).square(), x)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "4"])
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="Window size must be an integer >= 1"):
        Window(size=bad)
    with pytest.raises(ValueError, match="Window chunk must be an integer >= 1"):
        Window(chunk=bad)
