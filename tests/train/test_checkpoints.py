"""Checkpoints: there whole or not at all, verified before a run goes on from them; and the model after the last one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerState

from atlas_memory.monitor.logs import read_log
from atlas_memory.train import load_run
from atlas_memory.train.checkpoint import DIGESTS, SAVING, damage, newest_checkpoint
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.trainer import train
from tests.fresh import FRESH
from tests.train.small import settings

QUIET = ("train.evaluate_every=0", "train.probe_every=0")


def same(one: Path, two: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def whole(six_steps) -> Path:
    """A run of six steps, with checkpoints after the third and the sixth."""
    return six_steps


@pytest.fixture
def copy(finished) -> Path:
    """The same run in a folder that a test may damage, beside its text."""
    return finished


def resume(run: Path, *more: str) -> Any:
    return train(settings(run.parent, *QUIET, *more), resume=True)


def flip(path: Path) -> None:
    """64 bytes in the middle of a file are others."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(255 - byte for byte in data[middle : middle + 64])
    path.write_bytes(data)


def test_every_file_has_its_size_and_digest(whole) -> None:
    known = json.loads((whole / "checkpoint-6" / DIGESTS).read_text())
    assert known.keys() == {path.name for path in (whole / "checkpoint-6").iterdir()} - {DIGESTS}
    assert all(size == (whole / "checkpoint-6" / name).stat().st_size for name, (size, _) in known.items())
    assert not (whole / SAVING).exists()


@pytest.mark.parametrize("name", ["model.safetensors", "memory-0.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_file_with_other_bytes_is_named_and_the_checkpoint_before_taken(whole, copy, caplog, name: str) -> None:
    flip(copy / "checkpoint-6" / name)
    (copy / "model.safetensors").unlink()
    assert resume(copy).steps == 6
    assert f"checkpoint-6: {name} is damaged" in caplog.text
    assert same(copy, whole) and damage(copy / "checkpoint-6") is None


@pytest.mark.parametrize("name", ["memory-0.safetensors", "scheduler.pt"])
def test_a_file_that_is_missing_is_named_and_the_checkpoint_before_taken(whole, copy, caplog, name: str) -> None:
    (copy / "checkpoint-6" / name).unlink()
    assert resume(copy).steps == 6
    assert f"checkpoint-6: {name} is missing" in caplog.text
    assert same(copy, whole)


def test_damaged_digests_and_files_cut_short(copy) -> None:
    (copy / "checkpoint-3" / DIGESTS).write_text("{")
    assert damage(copy / "checkpoint-3") == "files.json is damaged"
    path = copy / "checkpoint-6" / "optimizer.pt"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100])
    assert damage(copy / "checkpoint-6") == f"optimizer.pt has 100 of {size:,} bytes"


def test_a_checkpoint_without_digests_is_not_gone_on_from(copy) -> None:
    """Nobody can say whether its files are whole."""
    (copy / "checkpoint-6" / DIGESTS).unlink()
    assert damage(copy / "checkpoint-6") == "files.json is missing"
    assert newest_checkpoint(copy) == copy / "checkpoint-3"


def test_weights_that_are_no_numbers_are_not_begun_with(copy, tmp_path) -> None:
    path = copy / "checkpoint-6" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, path, metadata={"format": "pt"})
    (copy / "checkpoint-6" / DIGESTS).unlink()
    says = r"model.init_from: the weight model.embed_tokens.weight in .*checkpoint-6' is not finite"
    with pytest.raises(ConfigError, match=says):
        train(settings(tmp_path, f"model.init_from={copy / 'checkpoint-6'}", f"output_dir={tmp_path / 'next'}"))
    assert not (tmp_path / "next").exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(copy) -> None:
    flip(copy / "checkpoint-3" / "optimizer.pt")
    (copy / "checkpoint-6" / "scheduler.pt").unlink()
    log = (copy / "log.jsonl").read_bytes()
    says = r"checkpoint-6: scheduler.pt is missing; checkpoint-3: optimizer.pt is damaged"
    with pytest.raises(ConfigError, match=says):
        resume(copy)
    assert (copy / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("left", ["all", "cut", "none"])
def test_a_kill_in_the_last_save_is_made_good(whole, copy, capsys, left: str) -> None:
    final = [path for path in copy.iterdir() if path.is_file() and (whole / "checkpoint-6" / path.name).is_file()]
    if left == "cut":
        (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:1000])
    for path in (*final, copy / "README.md"):
        if left == "none" or (left == "cut" and "tokenizer" in path.name):
            path.unlink()
    assert resume(copy).steps == 6
    assert "is finished (step 6), and its model is that of the checkpoint" in capsys.readouterr().err
    assert same(copy, whole)
    for path in whole.iterdir():
        if path.suffix == ".json" and path.name != "trainer_state.json":  # which has the seconds
            assert path.read_bytes() == (copy / path.name).read_bytes(), path.name
    assert load_run(copy).tokenizer.eos_token_id == 256 and (copy / "README.md").is_file()


def killed(config: RunConfig, again: bool, name: str) -> None:
    """Train, and be killed while the checkpoint after the sixth step is written, before its file `name` is there."""

    def at(write: Any) -> Any:
        def and_die(*args: Any, **kwargs: Any) -> Any:
            path = next(arg for arg in args if isinstance(arg, str | Path))
            if "checkpoint-6" in str(path) and Path(path).name == name:
                Path(path).write_bytes(b"{")
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args, **kwargs)

        return and_die

    torch.save, Path.write_text, Path.rename = at(torch.save), at(Path.write_text), at_name(Path.rename, name)
    TrainerState.save_to_json = at(TrainerState.save_to_json)
    train(config, again)


def at_name(rename: Any, name: str) -> Any:
    """Killed where the whole checkpoint would get its name."""

    def and_die(self: Path, target: Path) -> Path:
        if name == target.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    return and_die


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", DIGESTS, "checkpoint-6"])
def test_a_kill_while_a_checkpoint_is_written(whole, tmp_path, name: str) -> None:
    process = FRESH.Process(target=killed, args=(settings(tmp_path, *QUIET), False, name))
    process.start()
    process.join(120)
    run = tmp_path / "run"
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-3"]
    assert (run / SAVING / "checkpoint-6").is_dir()
    assert len(read_log(run)) == 6
    resume(run)
    assert same(run, whole) and not (run / SAVING).exists()
    assert damage(run / "checkpoint-6") is None


def test_the_newest_checkpoints_are_kept(copy) -> None:
    """A damaged one of a later step counts, and is the first to go."""
    flip(copy / "checkpoint-6" / "optimizer.pt")
    resume(copy, "train.save_every=1", "train.keep_checkpoints=2", "train.steps=5")
    assert sorted(path.name for path in copy.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
