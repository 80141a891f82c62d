"""A kernel that nobody asked for is tried before it is taken."""

import warnings

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from atlas_memory.memory import RULES
from atlas_memory.ops.chunkwise import _delta_matches
from atlas_memory.ops.triton import conv_kernel as convolution
from atlas_memory.ops.triton import delta_rule as delta
from atlas_memory.ops.triton import kernel_check as proof
from atlas_memory.ops.triton.kernel_check import distance, matches_pytorch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(proof, "_found", {})


@pytest.mark.parametrize("name", ["deltanet", "gated-deltanet"])
def test_the_delta_rule_passes(name):
    rule = RULES[name].vary(window={"chunk": 16})
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("error")
        assert _delta_matches(rule, 16, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_convolution_passes(dtype):
    assert matches_pytorch("conv_kernel", dtype, 4, CPU)


def test_what_is_wrong_is_not_taken_and_says_so_once(monkeypatch):
    launch = delta._launch

    def wrong(kernel, grid, values, first, *tensors):
        launch(kernel, grid, values, first, *tensors)
        if kernel.__name__ == "write_back":
            tensors[-4].mul_(1.01)

    monkeypatch.setattr(delta, "_launch", wrong)
    rule = RULES["gated-deltanet"].vary(window={"chunk": 16})
    with pytest.warns(
        UserWarning, match=r"the Triton kernels delta_rule are not taken on this GPU: it was off by [19].*e.02 times"
    ):
        assert not _delta_matches(rule, 16, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _delta_matches(rule, 16, CPU)


def test_what_fails_is_not_taken(monkeypatch):
    def failing(*_):
        raise RuntimeError("out of resource: shared memory,\nRequired: 114688")

    monkeypatch.setattr(convolution, "_launch", failing)
    with pytest.warns(UserWarning, match="not taken on this GPU: RuntimeError: out of resource: shared memory, Req"):
        assert not matches_pytorch("conv_kernel", torch.float32, 4, CPU)


def test_what_cannot_be_imported_is_not_taken():
    with pytest.warns(UserWarning, match="kernels nowhere are not taken on this GPU: ModuleNotFoundError"):
        assert not matches_pytorch("nowhere")


def test_in_a_backward_pass_nothing_is_tried():
    """Its thread would wait for a check that waits for it."""
    found = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(matches_pytorch("conv_kernel", torch.float32, 4, CPU)))
    (2 * x).backward()
    assert found == [False] and not proof._found


def test_the_dtype_of_the_caller_does_not_matter():
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert matches_pytorch("conv_kernel", torch.float32, 2, CPU)
        assert _delta_matches(RULES["gated-deltanet"].vary(window={"chunk": 16}), 16, CPU)
    finally:
        torch.set_default_dtype(torch.float32)


def test_nor_does_whether_gradients_are_wanted():
    """The delta rule is tried in inference mode above."""
    with torch.no_grad():
        assert matches_pytorch("conv_kernel", torch.float32, 2, CPU)


def test_what_is_no_number_is_far():
    assert distance([torch.tensor([torch.nan])], [torch.ones(1)]) == float("inf")
    assert distance([torch.ones(3)], [torch.ones(3)]) == 0.0
