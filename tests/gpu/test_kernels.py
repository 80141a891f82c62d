"""The Triton kernels, compiled, against the definition in float64: outputs, state and every gradient."""

import math
import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.layers.short_conv import _Convolution
from atlas_memory.memory import chunkwise, gram_polynomial
from atlas_memory.ops.triton.conv_kernel import convolve, convolve_back
from atlas_memory.ops.triton.kernel_support import INTERPRETER

from ..ops.problems import error, everything, random_problem, worst
from ..triton.test_convolution import SHAPES
from ..triton.test_delta import NAMES, alike, closed, rule_of
from .test_memories import from_gpu, on_gpu

pytestmark = pytest.mark.skipif(
    os.environ.get(INTERPRETER) == "1", reason=f"kernels are interpreted: set {INTERPRETER}=0"
)


@pytest.mark.parametrize("time,dim,chunk", [(5, 16, 16), (37, 48, 16), (70, 32, 32), (133, 16, 64), (256, 64, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_delta_equals_chunkwise(name, time, dim, chunk):
    equal(rule_of(name, chunk), heads=3, time=time, dim=dim)


@pytest.mark.parametrize("spoil", [closed, alike])
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_delta_with_closed_gates_and_equal_keys(spoil, chunk):
    rule = rule_of("gated-deltanet", chunk)
    equal(rule, spoil=spoil, heads=2, time=100, dim=64)


def test_delta_twice():
    """Gradients of gradients are PyTorch's."""
    problem = on_gpu(random_problem(rule_of("gated-deltanet"), 0, dtype=torch.float32, time=40, dim=16))
    found = []
    for kernels in (True, False):
        y, _ = chunkwise(*problem.arguments(), kernels=kernels)
        (first,) = torch.autograd.grad(y.square().sum(), problem.k, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), problem.v)[0])
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("batch,time,channels,taps", SHAPES)
def test_convolution(batch, time, channels, taps, dtype, bound):
    x = torch.randn(batch, time + taps - 1, channels, dtype=dtype, requires_grad=True)
    w = torch.randn(channels, taps, dtype=dtype, requires_grad=True)
    by_y = torch.randn(batch, time, channels, dtype=dtype)
    y = _Convolution.apply(x, w)
    expected = [y, *torch.autograd.grad(y, [x, w], by_y)]
    x, w, by_y = (t.detach().cuda() for t in (x, w, by_y))
    for ours, theirs in zip([convolve(x, w), *convolve_back(x, w, by_y)], expected, strict=True):
        assert (ours.cpu() - theirs).double().norm() <= bound * theirs.double().norm()


def equal(rule, spoil=None, **sizes) -> None:
    """As near to float64 as float32 is on a CPU, but for a factor."""
    exact, problem = (
        random_problem(rule, 0, batch=2, dtype=dtype, **sizes) for dtype in (torch.float64, torch.float32)
    )
    if spoil is not None:
        with torch.no_grad():
            spoil(exact), spoil(problem)
    oracle = everything(chunkwise, exact)
    allowed, _ = worst(everything(chunkwise, problem), oracle)
    gap, where = worst(from_gpu(partial(chunkwise, kernels=True), on_gpu(problem)), oracle)
    assert gap < max(1e-5, 8 * allowed) < math.inf, (where, allowed)


@pytest.mark.parametrize("size", [5, 16, 31, 64])
@pytest.mark.parametrize("floor", [None, 0.01])
def test_gram_polynomial(size, floor):
    draw = torch.Generator().manual_seed(0)
    s = torch.randn(6, size, 2 * size, generator=draw, dtype=torch.float64)
    s[0] = 0.0
    weights = torch.randn(6, size, size, generator=draw, dtype=torch.float64)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.float32), ("cuda", torch.float32)):
        gram = (s @ s.mT).to(device, dtype).requires_grad_()
        under = None if floor is None else torch.full((6, 1, 1), floor, device=device, dtype=dtype)
        q = gram_polynomial(gram, 5, under, kernels=device == "cuda")
        (grad,) = torch.autograd.grad((q * weights.to(q)).sum(), gram)
        results.append([x.detach().cpu() for x in (q, 0.5 * (grad + grad.mT))])
    for exact, single, ours in zip(*results, strict=True):
        assert error(ours, exact) < max(1e-5, 8 * error(single, exact)) < math.inf
