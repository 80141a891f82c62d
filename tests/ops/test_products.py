"""Products of large matrices with tokens, whose gradients are our own."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from atlas_memory.ops import fast_weight
from atlas_memory.ops.fast_weight import add_product, times

TOKENS, MATRICES, SHARED, WRITTEN = (6, 4, 5), (6, 7, 5), (3, 7, 5), (6, 4, 7)


@pytest.mark.parametrize(
    "product,shapes",
    [(times, (TOKENS, MATRICES)), (times, (TOKENS, SHARED)), (add_product, (TOKENS, MATRICES, WRITTEN))],
    ids=["times", "times, one matrix for all sequences", "add_product"],
)
def test_products_of_large_matrices(monkeypatch, product, shapes) -> None:
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = product(*given)
    monkeypatch.setattr(fast_weight, "LARGE", 0)
    out = product(*given)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(out.square().sum(), given)
    for mine, theirs, like in zip(gradients, torch.autograd.grad(expected.square().sum(), given), given, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert mine.stride()[-1] == like.stride()[-1] == 1  # by rows, as what they are gradients of
    assert gradcheck(product, given) and gradgradcheck(product, given)
