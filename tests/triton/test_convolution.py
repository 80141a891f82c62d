"""The kernel of the short convolution against the same in PyTorch."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.layers.short_conv import ShortConvolution, _Convolution
from atlas_memory.ops.triton import kernel_support as dispatch
from atlas_memory.ops.triton.conv_kernel import convolve, convolve_back

SHAPES = [(2, 37, 70, 4), (1, 1, 5, 4), (2, 33, 64, 1), (1, 64, 130, 3)]


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("batch,time,channels,taps", SHAPES)
def test_equals_pytorch(batch, time, channels, taps, dtype, bound):
    x = torch.randn(batch, time + taps - 1, channels, dtype=dtype, requires_grad=True)
    w = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
    by_y = torch.randn(batch, time, channels, dtype=dtype)
    y = _Convolution.apply(x, w)
    expected = [y, *torch.autograd.grad(y, [x, w], by_y)]
    found = [convolve(x.detach(), w.detach()), *convolve_back(x.detach(), w.detach(), by_y)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype and (ours - theirs).double().norm() <= bound * theirs.double().norm()


def test_the_layer_takes_it(monkeypatch):
    """Where it is asked for: outputs, what is carried, gradients and theirs are those without."""
    layer = ShortConvolution(6).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for switch in ("0", "1"):
        monkeypatch.setenv(dispatch.SWITCH, switch)
        y, past = layer(x[:, :5])
        z, past = layer(x[:, 5:], past)
        loss = (torch.cat([y, z], 1) ** 3).sum()
        first = torch.autograd.grad(loss, [x, layer.weight], retain_graph=True)
        twice = torch.autograd.grad(loss, [x, layer.weight], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in twice), [x, layer.weight])
        found.append([y, z, past, *first, *twice, *second])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
