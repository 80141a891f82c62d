"""Sharded runs: the same runs as others, by processes that each hold a part; killed, resumed by more or fewer, read."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atlas_memory.monitor.logs import read_log
from atlas_memory.train import checkpoint, load_run, trainer
from atlas_memory.train.checkpoint import newest_checkpoint
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.trainer import train
from tests.train.small import copied, count_in_training, settings
from tests.train.test_orders import losses, near, part, same, start, together, weights

MORE = (
    "model.rule=titans",
    "data.interleave=2",
    "train.learning_rate=0.001",
    "train.evaluate_every=2",
    "train.sample_tokens=3",
)


def config(folder: Path, *more: str) -> RunConfig:
    """A sharded run of a rule with an M_0, in groups that are read three times."""
    return settings(folder, *MORE, "train.fsdp=true", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sharded run by two processes, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    together(config(folder, "train.probe_every=3"))
    return folder / "run"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """The same run in a folder that a test may change, beside its text."""
    return copied(whole, tmp_path)


def alike(one: Path, two: Path) -> None:
    """Whether two runs are the same but for the order of sums."""
    assert weights(one).keys() == weights(two).keys()
    assert near(one, two, 1e-5)
    for a, b in zip(read_log(one), read_log(two), strict=True):
        assert a.model_fields_set == b.model_fields_set
        for name in a.model_fields_set - {"elapsed"}:
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5)


def test_a_sharded_run_is_the_run(whole, tmp_path) -> None:
    train(settings(tmp_path, *MORE, "train.batch_size=4", "train.probe_every=3"))
    alike(whole, tmp_path / "run")
    looks = [read_log(folder, "memory.jsonl") for folder in (whole, tmp_path / "run")]
    assert [look.step for look in looks[0]] == [3, 6]
    for a, b in zip(*looks, strict=True):
        for one, two in zip(a.memories, b.memories, strict=True):
            assert one.memory_contribution == pytest.approx(two.memory_contribution, rel=1e-3)
            assert one.error_before_write == pytest.approx(two.error_before_write, rel=1e-3)
    for name in ("config.json", "generation_config.json"):
        assert (whole / name).read_text() == (tmp_path / "run" / name).read_text()


def recomputing(*given: Any) -> None:
    """One process of a run of two steps, which fails unless the MLPs of its two blocks are computed twice in each."""
    with pytest.MonkeyPatch.context() as patch:
        read = count_in_training(patch)
        part(*given)
    assert len(read) == 2 * 2 * 2, len(read)


def test_copies_on_two_machines_and_recomputation(tmp_path) -> None:
    """Four processes, two a machine; blocks that are computed anew in the backward pass."""
    one, four, more = tmp_path / "one", tmp_path / "four", ("train.steps=2", "train.evaluate_every=0")
    train(settings(one, *MORE, *more, "train.batch_size=4"))
    together(config(four, *more, "train.batch_size=1", "train.gradient_checkpointing=true"), 4, target=recomputing)
    alike(one / "run", four / "run")


def killed(*given: Any) -> None:
    """One process that is killed as it begins the sixth step."""
    compute_loss, calls = trainer._Trainer.compute_loss, iter(range(6))

    def and_die(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute_loss(self, *args, **kwargs)

    trainer._Trainer.compute_loss = and_die
    part(*given)


def test_a_killed_run_ends_bitwise_the_same(whole, tmp_path) -> None:
    parts = start(config(tmp_path), target=killed)
    for process in parts:
        process.join(120)
    assert -signal.SIGKILL in [process.exitcode for process in parts]
    assert len(read_log(tmp_path / "run")) == 5
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-3"
    together(config(tmp_path), resume=True)
    assert losses(tmp_path / "run") == losses(whole) and same(tmp_path / "run", whole)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(whole, copy, first: int, then: int) -> None:
    """Also over what the first ones left when they were killed in their last checkpoint."""

    def passes(count: int) -> str:
        return f"train.gradient_accumulation_steps={2 // count}"

    if first == 1:
        shutil.rmtree(copy)
        together(config(copy.parent, passes(1)), 1)
    (copy / "checkpoint-6" / "shards" / ".metadata").unlink()
    (copy / "checkpoint-6" / "trainer_state.json").unlink()
    (copy / "model.safetensors").unlink()
    together(config(copy.parent, passes(then)), then, resume=True)
    alike(whole, copy)
    assert newest_checkpoint(copy) == copy / "checkpoint-6"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("left", [None, 100])
def test_half_a_checkpoint_is_skipped(copy, caplog, name: str, left: int | None) -> None:
    path = copy / "checkpoint-6" / "shards" / name
    data = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(data[:left])
    assert newest_checkpoint(copy) == copy / "checkpoint-3"
    assert name in caplog.text and "checkpoint-6" in caplog.text


def test_a_run_that_was_not_finished_is_read(whole, copy, tmp_path) -> None:
    last = weights(copy)
    for path in copy.glob("*.json"):
        path.unlink()
    (copy / "model.safetensors").unlink()
    model = load_run(copy).model
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in last.items())
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == last.keys()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is type(model)

    after = (f"model.init_from={copy}", f"output_dir={tmp_path / 'next'}", "train.steps=1", "train.weight_decay=0")
    train(settings(tmp_path, *MORE, *after, "train.learning_rate=1e-30"))
    assert all(torch.equal(weight, last[name]) for name, weight in weights(tmp_path / "next").items())


def test_what_cannot_be_sharded_is_refused(tmp_path, monkeypatch) -> None:
    def refused(says: str, *more: str) -> None:
        with pytest.raises(ConfigError, match=says):
            train(config(tmp_path, *more))
        assert not (tmp_path / "run").exists()

    refused("this one was started alone: start it with torchrun --nproc-per-node N -m atlas_memory train")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused("train.optimizer='m3' needs whole matrices", "train.optimizer=m3")
    refused(r"model.continuum_periods=\[1, 4\] sums gradients over steps", "model.continuum_periods=[1,4]")


def test_a_sharded_run_stays_one(copy) -> None:
    with pytest.raises(ConfigError, match=r"train.fsdp is False, but the run to resume has True"):
        train(config(copy.parent, "train.fsdp=false"), resume=True)


def test_shapes_of_a_sharded_checkpoint(whole) -> None:
    found = checkpoint.weight_shapes(whole / "checkpoint-6")
    assert {name: found[name] for name in weights(whole)} == {n: tuple(w.shape) for n, w in weights(whole).items()}
