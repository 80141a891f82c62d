"""The gates' own learning rate."""

import pytest
import torch

from atlas_memory import AtlasConfig, AtlasForCausalLM
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.train import load_run
from atlas_memory.train.optim import muon_groups, split_by_rate
from atlas_memory.train.trainer import train
from tests.train.small import settings


def gates(model) -> list[torch.nn.Parameter]:
    return [p for module in model.modules() if isinstance(module, GateProjection) for p in module.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "titans"},
        {"rule": "yaad", "gate_rank": 2},
        {"rule": "tnt", "hierarchy": {"global_chunk": 8, "local_chunks": [4], "shard": 8}},
        {"block": "hope", "rule": "hope"},
        {"block": "swa"},
    ],
)
def test_every_parameter_is_in_one_group(options) -> None:
    model = AtlasForCausalLM(AtlasConfig.preset("nano", **options))
    before = muon_groups(model)
    groups = split_by_rate(model, before, 1e-2, 0.1)
    assert sorted(map(id, (p for g in groups for p in g["params"]))) == sorted(map(id, model.parameters()))
    slow = {p for g in groups if g["lr"] == pytest.approx(1e-3) for p in g["params"]}
    assert slow == set(gates(model)) and bool(slow) == ("block" not in options)  # hope makes its own
    for kind in ("muon", "weight_decay"):
        was = {p: g[kind] for g in before for p in g["params"]}
        assert {p: g[kind] for g in groups for p in g["params"]} == was


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "m3"])
def test_gates_that_do_not_learn(tmp_path, optimizer: str) -> None:
    more = ("train.evaluate_every=0", f"train.optimizer={optimizer}", "model.rule=titans")
    ends = []
    for rate in (0, 1):
        train(settings(tmp_path, *more, f"train.gate_lr_scale={rate}", f"output_dir={tmp_path / str(rate)}"))
        ends.append(load_run(tmp_path / str(rate)).model)
    names = [name for name, _ in ends[0].named_parameters() if ".gates." in name]
    still, moved = (model.state_dict() for model in ends)
    assert names and all(not torch.equal(still[name], moved[name]) for name in names)
    first = at_the_beginning(tmp_path, *more)
    assert all(torch.equal(still[name], first[name]) for name in names)


def test_a_rate_of_gates_that_are_none(tmp_path) -> None:
    with pytest.raises(
        ValueError, match=r"train.gate_lr_scale=0.1 is the learning rate of gates, which block='hope' does not"
    ):
        train(settings(tmp_path, "model.block=hope", "model.rule=hope", "train.gate_lr_scale=0.1"))
    assert not (tmp_path / "run").exists()


def at_the_beginning(tmp_path, *more: str) -> dict[str, torch.Tensor]:
    slow = ("train.learning_rate=1e-30", "train.weight_decay=0", f"output_dir={tmp_path / 'first'}")
    train(settings(tmp_path, *more, *slow))
    return load_run(tmp_path / "first").model.state_dict()
