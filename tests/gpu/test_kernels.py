"""The Triton kernels, compiled, against the definition in float64: outputs, state and every gradient."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.kernels.dispatch import INTERPRETER
from atlas_memory.memory import chunkwise, gram_polynomial

from ..kernels.test_chunk import RULES, kernel
from ..memory.problems import error, everything, random_problem, worst
from .test_memories import from_gpu, on_gpu

pytestmark = pytest.mark.skipif(
    os.environ.get(INTERPRETER) == "1", reason=f"kernels are interpreted: set {INTERPRETER}=0"
)


@pytest.mark.parametrize("name", RULES)
def test_chunk_equals_chunkwise(name):
    equal(RULES[name], heads=3, time=37, dim=16)


@pytest.mark.parametrize("time,dim,size,chunk", [(5, 16, 3, 16), (70, 32, 8, 32), (133, 64, 1, 64), (133, 64, 8, 32)])
@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_chunk_at_other_shapes(name, time, dim, size, chunk):
    equal(RULES[name].vary(window={"size": size, "chunk": chunk}), heads=2, time=time, dim=dim)


def small_steps(rule, **options):
    """A random problem whose steps, which these rules do not bound, stay small: windows of 8 diverge otherwise."""
    problem = random_problem(rule, 0, batch=2, **options)
    with torch.no_grad():
        problem.gates.eta.mul_(0.1)
    return problem


def equal(rule, **sizes) -> None:
    """As near to float64 as float32 is on a CPU, but for a factor."""
    exact = small_steps(rule, **sizes)
    oracle = everything(chunkwise, exact)
    problem = small_steps(rule, dtype=torch.float32, **sizes)
    allowed, _ = worst(everything(chunkwise, problem), oracle)
    gap, where = worst(from_gpu(kernel, on_gpu(problem)), oracle)
    assert gap < max(1e-5, 8 * allowed), (where, allowed)


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
        assert error(ours, exact) < max(1e-5, 8 * error(single, exact))
