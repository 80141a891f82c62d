"""expand and kernel are one feature map; the map is the paper's."""

import itertools
import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from atlas_memory import PolynomialFeatures
from atlas_memory.memory import Identity, Polynomial, l2_normalise

from .problems import error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [0.0, 1e-5, 1e4])
def test_the_gradient_of_a_length_of_one_is_finite(dtype, length):
    x = torch.full((2, 4), length, dtype=dtype, requires_grad=True)
    y = l2_normalise(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("dim,degree", [(1, 1), (1, 4), (3, 1), (4, 2), (3, 3), (2, 5), (5, 4)])
def test_expand_and_kernel_agree_with_gradients(dim, degree):
    phi = Polynomial(degree)
    x, y = (torch.randn(3, n, dim, dtype=torch.float64, requires_grad=True) for n in (5, 4))
    sqrt_a = torch.randn(degree + 1, dtype=torch.float64, requires_grad=True)
    explicit = phi.expand(x, sqrt_a) @ phi.expand(y, sqrt_a).mT
    implicit = phi.kernel(x, y, sqrt_a)
    assert phi.expand(x, sqrt_a).shape[-1] == phi.size(dim) == math.comb(dim + degree, degree)
    assert error(explicit, implicit) < 1e-12
    assert error(phi.squared_norm(x, sqrt_a), phi.expand(x, sqrt_a).square().sum(-1)) < 1e-12
    weight = torch.randn_like(explicit)
    grads = [
        torch.autograd.grad((out * weight).sum(), (x, y, sqrt_a), retain_graph=True) for out in (explicit, implicit)
    ]
    assert max(error(a, b) for a, b in zip(*grads, strict=True)) < 1e-10


def test_features_are_the_monomials_with_multinomial_weights():
    x = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    expected = []
    for j in range(4):
        for m in itertools.combinations_with_replacement(range(3), j):
            repeats = math.prod(math.factorial(m.count(i)) for i in set(m))
            expected.append(
                math.sqrt(1 / math.factorial(j))
                * math.sqrt(math.factorial(j) / repeats)
                * math.prod(x[i].item() for i in m)
            )
    assert torch.allclose(Polynomial(3).expand(x), torch.tensor(expected, dtype=torch.float64))


def test_kernel_starts_as_the_taylor_series_of_exp():
    x, y = (
        l2_normalise(torch.randn(50, 8, dtype=torch.float64)),
        l2_normalise(torch.randn(50, 8, dtype=torch.float64)),
    )
    product = x @ y.mT
    assert error(Polynomial(2).kernel(x, y), 1 + product + product**2 / 2) < 1e-12
    assert (Polynomial(8).kernel(x, y) - product.exp()).abs().max() < 1e-5


def test_coefficients_drop_degrees():
    """a_1 = 1, the rest 0, is the plain key (section 3.1)."""
    x = torch.randn(6, 4)
    only_linear = Polynomial(3).expand(x, torch.tensor([0.0, 1.0, 0.0, 0.0]))
    assert torch.equal(only_linear[:, 1:5], x) and only_linear.count_nonzero() == x.numel()


def test_module_owns_its_coefficients():
    phi = PolynomialFeatures(dim=5, degree=2)
    x, y = torch.randn(2, 7, 5), torch.randn(2, 3, 5)
    assert phi(x).shape == (2, 7, phi.size) and phi.size == 21
    assert torch.allclose(phi(x) @ phi(y).mT, phi.kernel(x, y), atol=1e-5)
    assert list(dict(phi.named_parameters())) == ["sqrt_a"]


def test_identity():
    x, y = torch.randn(4, 3), torch.randn(5, 3)
    assert Identity().size(3) == 3 and torch.equal(Identity().expand(x), x)
    assert torch.equal(Identity().kernel(x, y), x @ y.mT)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-3, 1.0, 1e10, 1e25])
def test_l2_normalise_at_any_scale(scale):
    x = (scale * torch.randn(7, 5)).requires_grad_()
    y = l2_normalise(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and (y.norm(dim=-1) <= 1 + 1e-6).all()
    if scale >= 1e-3:
        assert torch.allclose(y, x.detach() / (x.detach() / scale).norm(dim=-1, keepdim=True) / scale, atol=1e-4)


def test_bad_arguments():
    for degree in (0, -1, 1.5):
        with pytest.raises(ValueError, match="degree must be an integer >= 1"):
            Polynomial(degree)
    with pytest.raises(ValueError, match="dim must be an integer >= 1"):
        PolynomialFeatures(0)
    with pytest.raises(ValueError, match=r"sqrt_a must have shape \[3\]"):
        Polynomial(2).expand(torch.randn(2, 2), torch.ones(2))


def test_compiled_for_other_devices_constants_are_made_there():
    """A CUDA graph can have no copy from the CPU."""
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return make_boxed_func(module)

    x = torch.randn(5, 3, device="meta", requires_grad=True)
    torch.compile(Polynomial(3).expand, backend=aot_autograd(fw_compiler=backend), fullgraph=True)(
        x, torch.ones(4, device="meta")
    ).sum().backward()
    made = [n.meta["val"] for graph in graphs for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert made and all(value.device.type == "meta" for value in made)
    for name, like in itertools.product(("weights", "selection"), (torch.randn(3), torch.randn(3).double())):
        operator = getattr(torch.ops.atlas_memory, f"constant_{name}")
        torch.library.opcheck(operator, (3, 1, like))
        assert operator(3, 1, like).dtype == like.dtype


def test_a_constant_of_another_size():
    """Its square is in the kernel, and x stands behind it as ever."""
    x = torch.randn(2, 7, dtype=torch.float64)
    features = Polynomial(2, constant=0.1)
    assert error(features.kernel(x, x), Polynomial(2).kernel(x, x) - 1.0 + 0.01) < 1e-12
    assert error(features.expand(x) @ features.expand(x).mT, features.kernel(x, x)) < 1e-12
    assert torch.equal(features.expand(x)[..., features.own(7)], x)
    with pytest.raises(ValueError, match="Polynomial constant must be a finite number above 0, got 0"):
        Polynomial(2, constant=0)


def test_nothing_is_kept_of_a_pass_without_numbers():
    """Such as ``atlas plan`` makes: what comes after it finds constants, not what stood for them."""
    features = Polynomial(3)
    with FakeTensorMode():
        features.expand(torch.randn(2, 7, dtype=torch.float64))
    x = torch.randn(2, 7, dtype=torch.float64)
    assert error(features.kernel(x, x), features.expand(x) @ features.expand(x).mT) < 1e-12
