"""PyTorch's Muon and AdamW as one optimiser."""

import pytest
import torch
from torch import nn

from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.train.optim import MultiPeriod, MuonAndAdamW, muon_groups, split_by_period
from atlas_memory.train.run_model import load_run
from atlas_memory.train.trainer import train

from .small import settings


def small_model(**options) -> AtlasForCausalLM:
    torch.manual_seed(0)
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, rule="titans", **options)
    return AtlasForCausalLM(config)


def read(model, optimizer, steps, start=0):
    """Losses of so many steps; the text of a step depends on its number."""
    found = []
    for step in range(start, start + steps):
        ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_each_parameter_moves_as_its_own_optimiser_moves_it():
    """Bitwise as PyTorch's two, given the same parameters apart."""
    model, other = small_model(), small_model()
    groups = muon_groups(model, weight_decay=0.3)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    names = {p: name for name, p in model.named_parameters()}
    linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)} - {model.get_input_embeddings().weight}
    linear -= {model.get_output_embeddings().weight}
    assert {p for g in groups if g["muon"] for p in g["params"]} == linear
    same = dict(other.named_parameters())
    kinds: dict[bool, list] = {True: [], False: []}
    for group in groups:
        kinds[group["muon"]].append(
            {"params": [same[names[p]] for p in group["params"]], "weight_decay": group["weight_decay"]}
        )
    muon = torch.optim.Muon(kinds[True], lr=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(kinds[False], lr=0.01, betas=(0.9, 0.95), fused=True)
    read(model, MuonAndAdamW(groups, lr=0.01), 3)

    class Both:
        def zero_grad(self):
            other.zero_grad()

        def step(self):
            muon.step()
            adamw.step()

    read(other, Both(), 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("periods", [None, (1, 2)])
def test_a_resumed_run_is_the_same_run(periods):
    def made():
        model = small_model(continuum_periods=periods)
        optimizer = MuonAndAdamW(split_by_period(model, muon_groups(model)), lr=0.01)
        return model, MultiPeriod(optimizer) if periods else optimizer

    whole = read(*made(), 6)
    model, optimizer = made()
    first = read(model, optimizer, 3)
    weights, state = model.state_dict(), optimizer.state_dict()
    again, resumed = made()
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert first + read(again, resumed, 3, start=3) == whole
    # A schedule's changes reach both.
    scheduler = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.0)
    before = [p.clone() for p in again.parameters()]
    read(again, resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
    assert scheduler.get_last_lr()[0] == 0


def test_a_run_trains_with_it_and_goes_on(tmp_path):
    whole = train(settings(tmp_path / "whole", "train.optimizer=muon"))
    assert whole.steps == 6
    half = settings(tmp_path / "half", "train.optimizer=muon")
    train(half)
    (tmp_path / "half" / "run" / "model.safetensors").unlink()
    for path in (tmp_path / "half" / "run" / "checkpoint-6").iterdir():
        path.unlink()
    assert train(half, resume=True).steps == 6
    a, b = (load_run(tmp_path / name / "run").model.state_dict() for name in ("whole", "half"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_both_kinds_are_needed():
    with pytest.raises(ValueError, match="needs groups with muon=True and groups with muon=False"):
        MuonAndAdamW([{"params": [nn.Parameter(torch.zeros(2, 2))], "muon": True}], lr=0.1)
    optimizer = MuonAndAdamW(muon_groups(small_model()), lr=0.1)
    with pytest.raises(ValueError, match="takes no more groups once it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
