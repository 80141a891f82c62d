"""What the compiler is told; that what it makes is right is tested in tests/layers/test_execution.py."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from atlas_memory import compile_options
from atlas_memory.ops.compiler_passes import KeepActivations
from atlas_memory.ops.muon_steps import _power_of_two


def test_activations_are_kept() -> None:
    graph = make_fx(lambda x: torch.erf(x) * torch.exp(-x * x) + x.sigmoid() + x.sin())(torch.randn(3)).graph
    KeepActivations()(graph)
    kept = {str(node.target) for node in graph.nodes if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE}
    assert kept == {"aten.erf.default", "aten.exp.default", "aten.sigmoid.default"}


def test_a_model_of_ones_own_keeps_what_the_compiler_keeps() -> None:
    assert "joint_custom_pre_pass" not in compile_options("cpu")
    assert compile_options("cuda") == {}


def test_a_device_is_named_in_any_way() -> None:
    assert compile_options(torch.device("cpu")).keys() == compile_options("cpu:0").keys() == compile_options().keys()
    with pytest.raises(ValueError, match="device must be one such as cpu or cuda, got 'gpu'"):
        compile_options("gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_compiled(dtype: torch.dtype) -> None:
    size = torch.tensor([3e-30, 0.7, 1.0, 5e7, 3e30, 0.2, 9.0, 1e-3], dtype=dtype)
    factor = torch.compile(_power_of_two, options=compile_options())(size)
    assert torch.equal(factor, _power_of_two(size))
    assert torch.equal(factor.log2(), factor.log2().round())
    assert ((factor * size >= 0.5) & (factor * size <= 1)).all()
