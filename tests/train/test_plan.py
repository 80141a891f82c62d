"""What a plan says is what a run takes."""

import ctypes
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atlas_memory.cli import main
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.train import load_config, preflight
from atlas_memory.train.plan import available_memory, plan
from atlas_memory.train.run_model import load_run
from atlas_memory.train.trainer import train
from tests import fresh
from tests.train.small import overrides, settings


def took(rule: str, again: bool) -> None:
    """Say how many bytes more a step of four rows has at once than a small one, in a process of its own."""

    def peak() -> int:  # getrusage would begin with that of the process which started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    # Blocks go back to the system as they are freed: what the allocator keeps between them would be 10 to 70 % more,
    # another share on every machine.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    torch.set_num_threads(1)
    model = AtlasForCausalLM(AtlasConfig.preset("tiny", rule=rule)).train()
    if again:
        model.gradient_checkpointing_enable()
    ids = torch.randint(0, 256, (4, 256))
    model(input_ids=ids[:1, :32], labels=ids[:1, :32]).loss.backward()  # what a first call alone takes
    before = peak()
    model(input_ids=ids, labels=ids).loss.backward()
    print(peak() - before)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists() or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="peak memory is read from /proc, and the allocator is told what to keep as that of the GNU C library",
)
@pytest.mark.parametrize("rule,again,most", [("titans", False, 1.3), ("gated-deltanet", True, 1.45)])
def test_memory_is_what_a_step_takes(rule, again, most) -> None:
    given = ["model.preset=tiny", f"model.rule={rule}", "train.batch_size=4", "data.seq_len=256"]
    found = plan(load_config(None, [*given, f"train.gradient_checkpointing={again}"]))
    measured = int(fresh.run(took, rule, again).out)
    estimate = found.activations + found.logits
    assert 1 < estimate / measured < most  # what is above is left for what an allocator keeps


def test_counts_are_those_of_the_model_and_its_run(tmp_path) -> None:
    config = settings(tmp_path, "train.gradient_accumulation_steps=2")
    found, two = plan(config), plan(config, processes=2)
    train(config)
    model = load_run(tmp_path / "run").model
    assert isinstance(model, AtlasForCausalLM)
    assert found.parameters == model.num_parameters() and found.weights == 16 * found.parameters
    assert found.embeddings == model.get_input_embeddings().weight.numel()
    assert found.initial == sum(p.numel() for name, p in model.named_parameters() if "initial" in name)
    assert found.tokens == 6 * 4 * 16 and two.tokens == 2 * found.tokens
    assert two.weights == found.weights
    assert plan(settings(tmp_path, "train.fsdp=true"), processes=2).weights == found.weights // 2
    states = model(input_ids=torch.zeros(4, 16, dtype=torch.long), use_cache=True).past_key_values
    assert found.states == sum(t.numel() * t.element_size() for b in states.blocks for t in b.state.tensors())
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 16, dtype=torch.long), use_cache=False)
    assert found.flops_per_token == 3 * counter.get_total_flops() / 16
    assert plan(settings(tmp_path, "train.max_minutes=1", "train.steps=null")).tokens is None


def test_the_largest_preset_is_planned_without_its_weights() -> None:
    given = ["model.preset=1.3b", "model.rule=gated-deltanet", "model.vocab_size=32000", "data.seq_len=64"]
    assert plan(load_config(None, given)).parameters > 1.2e9


def test_the_command(tmp_path, capsys) -> None:
    given = overrides(tmp_path)
    assert main(["plan", *given, "--flops", "1e9", "--price", "3600"]) == 0
    shown = capsys.readouterr().out
    assert "memory of a process" in shown and "tokens" in shown and "at 3600 an hour" in shown
    assert main(["plan", *given, "--flops", "1e9", "--price", "3600", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"] == pytest.approx(found["flops"] / 1e9) and not (tmp_path / "run").exists()
    assert main(["plan", *given, "train.max_minutes=5", "train.steps=null"]) == 0
    assert "the clock ends the run" in capsys.readouterr().out
    timed = ["train.max_minutes=30", "train.steps=null", "--flops", "1e9", "--price", "2", "--processes", "2"]
    assert main(["plan", *given, *timed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device_hours"], found["cost"]) == (1.0, 2.0)
    assert found["tokens"] == int(3600e9 / found["flops_per_token"])
    both = ["train.max_minutes=30", "train.steps=1000000", "--flops", "1e9", "--processes", "2"]  # the clock is first
    assert main(["plan", *given, *both, "--json"]) == 0
    ended = json.loads(capsys.readouterr().out)
    assert (ended["device_hours"], ended["tokens"]) == (1.0, found["tokens"])
    for options, clock in ((both, True), (["train.max_minutes=30000", "--flops", "1e9"], False)):
        assert main(["plan", *given, *options]) == 0
        assert ("the clock ends the run" in " ".join(capsys.readouterr().out.split())) == clock
    for wrong, message in (
        (["model.preset=huge"], "preset 'huge' is unknown"),
        (["train.lr=1"], "unknown key train.lr"),
        (["--price", "2"], "--price needs --flops"),
    ):
        assert main(["plan", *given, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_run_that_will_not_fit_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(preflight, "LARGE", 1)
    monkeypatch.setattr(preflight, "available_memory", lambda config: 200_000)
    assert main(["train", *overrides(tmp_path)]) == 0
    assert "warning: about 0 GB are needed and there are 0: lower train.batch_size" in capsys.readouterr().err


def test_a_containers_limit_counts_as_memory(tmp_path, monkeypatch) -> None:
    config = load_config(None, ["train.device=cpu"])
    physical = available_memory(config)
    for text, expected in (("1000\n", 1000), ("max\n", physical), (f"{2 * physical}\n", physical)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(
            "atlas_memory.train.plan.CONTAINER_LIMITS", (tmp_path / "memory.max", tmp_path / "not there")
        )
        assert available_memory(config) == expected
