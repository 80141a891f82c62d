"""Updates every so many steps: against a loop over the levels, bitwise where none is slow, through checkpoints."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atlas_memory import AtlasForCausalLM
from atlas_memory.layers.mlp import ContinuumMLP
from atlas_memory.monitor.logs import read_log
from atlas_memory.train import M3, MultiPeriod, split_by_period, trainer
from tests.train.small import settings

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    """A level of each period between two ordinary layers."""

    def __init__(self, periods: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.mlp = ContinuumMLP(8, 6, periods)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mlp(self.first(x)))


def losses(net: nn.Module, steps: int, start: int = 0) -> Iterator[Tensor]:
    for step in range(start, start + steps):
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        yield (net(x) - x[:, :3].sin()).square().mean()


def groups(net: nn.Module) -> list[dict[str, Any]]:
    return split_by_period(net, [{"params": list(net.parameters())}])


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for loss in losses(net, steps, start):
        optimizer.zero_grad(set_to_none=False)  # what has accumulated must not share memory with .grad
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("periods", [(1, 4, 16), (2, 3), (1, 1, 7), (5,)])
def test_it_is_a_loop_over_the_levels(name: str, periods: tuple[int, ...]) -> None:
    ours = Net(periods)
    train(ours, MultiPeriod(OPTIMISERS[name](groups(ours))), 33)

    net = Net(periods)
    rest = [*net.first.parameters(), *net.last.parameters()]
    parts = [(1, rest), *((c, list(level.parameters())) for c, level in zip(periods, net.mlp.levels, strict=True))]
    optimisers = [OPTIMISERS[name](parameters) for _, parameters in parts]
    sums = [[torch.zeros_like(p) for p in parameters] for _, parameters in parts]
    for step, loss in enumerate(losses(net, 33), 1):
        gradients = iter(torch.autograd.grad(loss, [p for _, parameters in parts for p in parameters]))
        for (period, parameters), optimiser, total in zip(parts, optimisers, sums, strict=True):
            for i, parameter in enumerate(parameters):
                total[i] = total[i] + next(gradients)
                parameter.grad = total[i]
            if step % period == 0:
                optimiser.step()
                total[:] = [torch.zeros_like(p) for p in parameters]
    for one, two in zip(ours.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_period_one_is_the_plain_optimiser_bitwise(name: str) -> None:
    ours, net = Net((1, 1)), Net((1, 1))
    train(ours, MultiPeriod(OPTIMISERS[name](groups(ours))), 9)
    train(net, OPTIMISERS[name](net.parameters()), 9)
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters(), net.parameters(), strict=True))


def test_a_level_rests_between_its_updates() -> None:
    net = Net((1, 3))
    optimizer = MultiPeriod(OPTIMISERS["adamw"](groups(net)))
    slow = list(net.mlp.levels[1].parameters())
    rest = [p for p in net.parameters() if all(p is not q for q in slow)]
    for step, loss in enumerate(losses(net, 9), 1):
        before, others = [p.clone() for p in slow], [p.clone() for p in rest]
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in net.parameters()]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(net.parameters(), gradients, strict=True))
        moved = [not torch.equal(p, b) for p, b in zip(slow, before, strict=True)]
        assert all(moved) if step % 3 == 0 else not any(moved)
        assert not any(torch.equal(p, b) for p, b in zip(rest, others, strict=True))
        assert len(optimizer.accumulated) == (0 if step % 3 == 0 else len(slow))


@pytest.mark.parametrize("name", ["adamw", "m3"])
@pytest.mark.parametrize("stop", [4, 5, 6])
def test_a_resumed_run_is_the_same_run(name: str, stop: int) -> None:
    def make(net: nn.Module) -> MultiPeriod:
        if name == "adamw":
            return MultiPeriod(OPTIMISERS["adamw"](groups(net)))
        both = [
            {"params": [p for p in net.parameters() if p.dim() == 2]},
            {"params": [p for p in net.parameters() if p.dim() == 1], "m3": False},
        ]
        return MultiPeriod(M3(split_by_period(net, both), lr=0.02, every=2))

    whole, half, rest = Net((1, 3, 5)), Net((1, 3, 5)), Net((1, 3, 5))
    train(whole, make(whole), 12)
    optimizer = make(half)
    train(half, optimizer, stop)
    rest.load_state_dict(half.state_dict())
    resumed = make(rest)
    resumed.load_state_dict(optimizer.state_dict())
    train(rest, resumed, 12 - stop, stop)
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), rest.parameters(), strict=True))


def test_schedules_closures_and_missing_gradients() -> None:
    net = Net((1, 2))
    optimizer = MultiPeriod(torch.optim.SGD(groups(net), lr=1.0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 if step == 1 else 0.0)
    p, other = net.mlp.levels[1].mlp.up.weight, net.mlp.levels[1].mlp.down.weight
    before, untouched = p.clone(), other.clone()
    for gradient in (2.0, 3.0):
        optimizer.zero_grad()
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(p, before - 0.5 * 5.0)  # the sum, at the rate of the second step
    assert torch.equal(other, untouched)
    assert optimizer.optimizer.param_groups is optimizer.param_groups

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = next(losses(net, 1))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.accumulated


def test_groups_keep_their_other_entries() -> None:
    net = Net((1, 4))
    slow = set(net.mlp.levels[1].parameters())
    split = split_by_period(
        net, [{"params": list(net.parameters()), "weight_decay": 0.5}, {"params": [nn.Parameter(torch.ones(2))]}]
    )
    assert [(g["period"], g.get("weight_decay")) for g in split] == [(1, 0.5), (4, 0.5), (1, None)]
    assert set(split[1]["params"]) == slow and not slow & set(split[0]["params"])


def test_bad_arguments() -> None:
    p = nn.Parameter(torch.ones(2))
    for period in (0, 1.5, True, "4"):
        with pytest.raises(ValueError, match="a group's period must be an integer >= 1, got"):
            MultiPeriod(torch.optim.SGD([{"params": [p], "period": period}], lr=0.1))
    plain = torch.optim.SGD([p], lr=0.1)
    optimizer = MultiPeriod(plain)
    with pytest.raises(ValueError, match="saved without MultiPeriod"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="period"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "period": -1})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "period": 2})
    assert len(plain.param_groups) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "m3"])
def test_training_runs_resume_in_the_middle_of_a_period(tmp_path, monkeypatch, optimizer: str) -> None:
    class WithContinuum(AtlasForCausalLM):
        def __init__(self, config) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = ContinuumMLP(config.hidden_size, 8, (1, 4))
            self.post_init()

    monkeypatch.setattr("atlas_memory.train.run_model.AtlasForCausalLM", WithContinuum)
    config = settings(tmp_path, f"train.optimizer={optimizer}")
    trainer.train(config)
    run = tmp_path / "run"
    saved = torch.load(run / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert saved["steps"] == 3 and saved["accumulated"]
    whole = read_log(run), (run / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoint-6")
    trainer.train(config, resume=True)
    again = read_log(run), (run / "model.safetensors").read_bytes()
    assert [(e.step, e.loss) for e in whole[0]] == [(e.step, e.loss) for e in again[0]]
    assert whole[1] == again[1]
