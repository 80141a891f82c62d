"""Gates and the report."""

import json
from pathlib import Path

import pytest
import torch

from atlas_memory.evaluation import watch_gates
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.report import write_report
from atlas_memory.training import train
from tests.training.small import settings


@pytest.mark.parametrize("block", ["lmm", "mag"])
def test_gates_are_watched_over_all_calls(block: str) -> None:
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, rule="omeganet", block=block, window=3)
    model = AtlasForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1, 20))
    with watch_gates(model) as log, torch.inference_mode():
        cache = model(input_ids=ids[:, :13], use_cache=True).past_key_values
        model(input_ids=ids[:, 13:], past_key_values=cache)
    with torch.inference_mode():
        model(input_ids=ids)  # no longer watched
    assert len(log.layers) == 2
    for layer in log.layers:
        assert layer["eta"].shape == (1, 2, 20)
        assert layer["gamma"].shape == (1, 2, 20, 3)
    summary = log.summary()[0]["eta"]
    assert summary["min"] <= summary["q05"] <= summary["q50"] <= summary["q95"] <= summary["max"]
    assert summary["mean"] == pytest.approx(float(log.layers[0]["eta"].mean()), rel=1e-5)


def test_report(tmp_path: Path) -> None:
    train(settings(tmp_path))
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    folder = tmp_path / "run" / "report"
    for name in ("loss.png", "position.png", "gates.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert name in (folder / "report.html").read_text()
    saved = json.loads((folder / "report.json").read_text())
    assert saved["memory_on"]["bits_per_byte"] == numbers["memory_on"]["bits_per_byte"]
    assert saved["memory_on"]["by_position"][-1]["to"] == 223  # the whole held-out document
    assert saved["steps"] == 6
    assert saved["sample"].startswith("def ")
    assert saved["margin"]["bits_per_byte"] == pytest.approx(
        saved["writes_off"]["bits_per_byte"] - saved["memory_on"]["bits_per_byte"]
    )


def test_a_report_of_a_model_without_memory(tmp_path: Path) -> None:
    train(settings(tmp_path, "model.block=swa", "model.rule=atlas", "model.attention_window=4"))
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    assert numbers["gates"]["layers"] == [] and numbers["margin"]["bits_per_byte"] == 0
    assert not (tmp_path / "run" / "report" / "gates.png").exists()


def test_channel_wise_gates_are_watched() -> None:
    config = AtlasConfig.preset("nano", hidden_size=16, num_attention_heads=2, rule="yaad", gate_rank=2)
    model = AtlasForCausalLM(config).eval()
    with watch_gates(model) as log, torch.inference_mode():
        model(input_ids=torch.randint(0, 256, (1, 20)))
    assert log.layers[0]["eta"].shape == (1, 16, 20) and log.layers[0]["delta"].shape == (1, 2, 20)


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    train(settings(tmp_path))
    (tmp_path / "run" / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"has no run.yaml"):
        write_report(tmp_path / "run")
