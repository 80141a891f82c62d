"""Runs that end before their last step: by what are no numbers, by a signal, by the clock; and those made longer."""

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from atlas_memory.cli import main
from atlas_memory.monitor.logs import StepRecord, read_log
from atlas_memory.train import callbacks, trainer
from atlas_memory.train.callbacks import check_finite
from atlas_memory.train.checkpoint import newest_checkpoint
from atlas_memory.train.config import ConfigError
from atlas_memory.train.trainer import train
from tests.train.small import overrides, settings
from tests.train.test_orders import same, start

QUIET = ("train.evaluate_every=0", "train.probe_every=0")


def no_nan(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(entry, parse_constant=refuse) for entry in lines]


def test_a_gradient_that_is_not_finite_is_not_applied(tmp_path) -> None:
    """And the checkpoint before is there to begin another run with."""
    more = ("train.learning_rate=1e30", "train.save_every=1", "train.keep_checkpoints=1", *QUIET)
    says = r"is (nan|inf) at step 2: lower train.learning_rate in a run with another output_dir \(model.init_from="
    with pytest.raises(ValueError, match=says) as caught:
        train(settings(tmp_path, *more))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert f"model.init_from={checkpoint} starts from" in str(caught.value)
    assert newest_checkpoint(tmp_path / "run") == checkpoint
    assert [entry["step"] for entry in no_nan(tmp_path / "run")] == [1]


def test_before_any_step_the_learning_rate_is_not_blamed(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"the norm of the gradient is inf at step 1, before any weight has changed"):
        check_finite(1, tmp_path, 1.0, math.inf)


def test_weights_that_are_not_finite_are_not_saved(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"the weights are not finite numbers at step 1: lower train.learning_rate"):
        train(settings(tmp_path, "train.learning_rate=1e38", "train.steps=1", "train.warmup_steps=0", *QUIET))
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_sharded_run_stops_in_all_its_processes(tmp_path) -> None:
    more = ("train.fsdp=true", "model.rule=titans", "train.learning_rate=1e30", "train.save_every=1", *QUIET)
    parts = start(settings(tmp_path, *more))
    for process in parts:
        process.join(120)
    assert [process.exitcode for process in parts] == [1, 1]
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-1"


def test_held_out_text_that_cannot_be_read_is_said_before_a_sample_is_drawn(tmp_path, monkeypatch, capsys) -> None:
    def spoil(self: Any, *args: Any) -> None:
        torch.nn.init.constant_(self.model.lm_head.weight, torch.nan)
        look(self, *args)

    look = callbacks.Evaluation.after_step
    monkeypatch.setattr(callbacks.Evaluation, "after_step", spoil)
    assert main(["train", *overrides(tmp_path, "train.evaluate_every=1", "train.sample_tokens=5")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the loss of held-out text is not finite at step 1: lower train.learning_rate" in said
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_line_of_a_log_is_json() -> None:
    entry = {"step": 1, "loss": float("nan"), "lags": [float("inf"), 2.0], "text": "NaN"}
    assert json.loads(StepRecord.model_construct(**entry).line(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "learning_rate": 0.0,
        "grad_norm": 0.0,
        "lags": [None, 2.0],
        "text": "NaN",
    }


class Press(TrainerCallback):
    """SIGTERM while step 2 is read; what has been written when its checkpoint is there."""

    def __init__(self) -> None:
        self.then: list[str] = []

    def on_step_begin(self, args, state, control, **_) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_save(self, args, state, control, **_) -> None:
        self.then = sorted(path.name for path in Path(args.output_dir).iterdir() if path.suffix != ".lock")


def test_sigterm_saves_before_anything_is_read_or_drawn(tmp_path, monkeypatch) -> None:
    original, press = trainer._Trainer.__init__, Press()

    def pressed(self: Any, *args: Any, callbacks: list[TrainerCallback], **kwargs: Any) -> None:
        original(self, *args, callbacks=[press, *callbacks], **kwargs)

    more = ("train.evaluate_every=2", "train.probe_every=2", "train.sample_tokens=3")
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Trainer, "__init__", pressed)
        assert train(settings(tmp_path, *more)).interrupted
    assert "checkpoint-2" in press.then and "log.jsonl" in press.then
    assert not {"samples.jsonl", "memory.jsonl"} & set(press.then)
    run = tmp_path / "run"
    train(settings(tmp_path, *more), resume=True)
    train(settings(tmp_path, *more, f"output_dir={tmp_path / 'whole'}"))
    for name in ("log.jsonl", "memory.jsonl", "samples.jsonl"):
        one, two = (read_log(folder, name) for folder in (run, tmp_path / "whole"))
        assert [{**dict(entry), "elapsed": 0, "seconds": 0} for entry in one] == [
            {**dict(entry), "elapsed": 0, "seconds": 0} for entry in two
        ]
    assert same(run, tmp_path / "whole")


def test_minutes_between_checkpoints(tmp_path) -> None:
    train(settings(tmp_path, *QUIET, "train.save_every=1000", "train.save_minutes=1e-9", "train.keep_checkpoints=9"))
    found = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert found == [f"checkpoint-{step}" for step in range(1, 7)]


def test_a_run_that_is_made_longer_has_the_longer_ones_rate_at_once(finished, tmp_path) -> None:
    train(settings(tmp_path, *QUIET, "train.steps=9"), resume=True)
    train(settings(tmp_path, *QUIET, "train.steps=9", f"output_dir={tmp_path / 'nine'}"))
    rates = [[entry.learning_rate for entry in read_log(tmp_path / name)] for name in ("run", "nine")]
    assert rates[0][6:] == rates[1][6:] and rates[0][6] > 0


def test_a_text_that_was_moved_is_the_same_text(six_steps, finished, tmp_path) -> None:
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    train(settings(tmp_path, *QUIET, f"data.path={tmp_path / 'moved'}"), resume=True)
    assert same(tmp_path / "run", six_steps)
    assert f"path: {tmp_path / 'moved'}" in (tmp_path / "run" / "run.yaml").read_text()
    shutil.rmtree(tmp_path / "corpus")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1.txt").write_text("another text " * 100)
    with pytest.raises(ValueError, match="the text has changed since the run in"):
        train(settings(tmp_path, *QUIET, f"data.path={tmp_path / 'other'}", "train.steps=8"), resume=True)


def test_a_run_yaml_written_by_hand_is_not_overwritten(tmp_path) -> None:
    """It lies where the failed start of a run would be."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings(tmp_path).save(folder / "run.yaml")
    with pytest.raises(ConfigError, match="is not empty"):
        train(settings(tmp_path))
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_a_text_under_another_name_is_the_same(tmp_path) -> None:
    text = " ".join(str(n * n) for n in range(2000))
    (tmp_path / "squares.txt").write_text(text)
    train(settings(tmp_path, *QUIET, f"data.path={tmp_path / 'squares.txt'}"))
    (tmp_path / "squares.txt").rename(tmp_path / "numbers.txt")
    moved = settings(tmp_path, *QUIET, f"data.path={tmp_path / 'numbers.txt'}", "train.steps=8")
    assert train(moved, resume=True).steps == 8
    (tmp_path / "numbers.txt").write_text(text[:-1] + "!")  # held out is the end
    with pytest.raises(ConfigError, match="what differs: held_out"):
        train(settings(tmp_path, *QUIET, f"data.path={tmp_path / 'numbers.txt'}", "train.steps=9"), resume=True)


def test_a_run_yaml_that_was_changed_by_hand_is_refused(tmp_path, capsys) -> None:
    train(settings(tmp_path, *QUIET, "data.order=packed"))
    saved, folder = tmp_path / "run" / "run.yaml", tmp_path / "run"
    whole = saved.read_text()
    for old, new, message in (
        ("optimizer: adamw", "optimizer: muon", "train.optimizer is 'muon', but the run to resume has 'adamw'"),
        ("seed: 0", "seed: 7", "train.seed is 7, but the run to resume has 0"),
        ("order: packed", "order: crops", "data.order is 'crops', but the run to resume has 'packed'"),
        ("rule: deltanet", "rule: titans", "model.rule is 'titans', but the run to resume has 'deltanet'"),
    ):
        assert old in whole
        saved.write_text(whole.replace(old, new))
        assert main(["train", "--resume", f"output_dir={folder}", "train.steps=8"]) == 2
        assert message in capsys.readouterr().err
    saved.write_text(whole)
    assert main(["train", "--resume", f"output_dir={folder}", "train.steps=4"]) == 0  # nothing to do
    assert saved.read_text() == whole
    saved.write_text(whole.replace("steps: 6", "steps: 7"))  # as may be
    assert main(["train", "--resume", f"output_dir={folder}"]) == 0
    assert len(read_log(folder)) == 7


def test_weights_can_be_read_by_whoever_reads_the_run(six_steps) -> None:
    for folder in (six_steps, six_steps / "checkpoint-6"):
        modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
        assert len(modes) == 1


def test_minutes_that_a_damaged_log_does_not_know(tmp_path) -> None:
    """What the last whole line says has been used, and that it is not all is said."""
    small = ("train.steps=100", "train.max_minutes=10", "train.save_every=1")
    train(settings(tmp_path, "train.steps=3", "train.save_every=1"))
    log = tmp_path / "run" / "log.jsonl"
    lines = [json.loads(line) | {"elapsed": 1200.0} for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]) + '{"step":')
    outcome = train(settings(tmp_path, *small), resume=True)
    assert outcome.steps == 3 and outcome.seconds == 1200.0
