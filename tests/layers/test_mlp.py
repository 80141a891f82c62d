"""The chain of the continuum memory system; its schedule is tested in tests/train/test_periods.py."""

import pytest
import torch
from torch import Tensor

from atlas_memory.layers.blocks import MemoryBlock
from atlas_memory.layers.mlp import ContinuumMLP


def by_hand(mlp: ContinuumMLP, x: Tensor) -> Tensor:
    """Eq. 70 with the parameters by name."""
    weights = dict(mlp.named_parameters())
    for i in range(len(mlp.periods)):
        u = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"levels.{i}.norm.weight"]
        gate, up = u @ weights[f"levels.{i}.mlp.gate.weight"].T, u @ weights[f"levels.{i}.mlp.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[f"levels.{i}.mlp.down.weight"].T
    return x


def test_it_is_the_chain_of_its_levels() -> None:
    torch.manual_seed(0)
    mlp = ContinuumMLP(8, 12, periods=(1, 2, 5)).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(mlp(x), by_hand(mlp, x), rtol=1e-12, atol=1e-12)
    assert mlp.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert mlp(x[:, :0].bfloat16()).shape == (2, 0, 8)


def test_every_parameter_has_the_period_of_its_level() -> None:
    mlp = ContinuumMLP(8, 12, periods=[1, 4, 4])
    periods = dict(mlp.parameter_periods())
    assert periods.keys() == set(mlp.parameters())
    assert all(periods[p] == (1, 4, 4)[int(name.split(".")[1])] for name, p in mlp.named_parameters())
    assert "periods=(1, 4, 4)" in repr(mlp)


def test_a_trained_mlp_becomes_a_level() -> None:
    block = MemoryBlock(8, torch.nn.Identity(), 12)
    level = ContinuumMLP(8, 12).levels[0]
    level.mlp.load_state_dict(block.mlp.state_dict())
    level.norm.load_state_dict(block.mlp_norm.state_dict())
    x = torch.randn(2, 3, 8)
    assert torch.equal(level(x), x + block.mlp(block.mlp_norm(x)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, -1), "hidden must be an integer >= 1, got -1"),
        ((8, 8, ()), r"periods must list a number of steps"),
        ((8, 8, (1, 0)), "every entry of periods must be an integer >= 1, got 0"),
        ((8, 8, (1, 2.0)), "every entry of periods must be an integer >= 1, got 2.0"),
        ((8, 8, (1, 16, 4)), r"periods=\[1, 16, 4\] must go from the fastest level to the slowest"),
    ],
)
def test_bad_arguments(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContinuumMLP(*arguments)
