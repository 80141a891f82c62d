"""The orders of the examples: what rows remember; neither a kill nor another cut of the batch changes a run."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from atlas_memory.cli import main
from atlas_memory.data import byte_tokenizer
from atlas_memory.monitor.logs import read_log
from atlas_memory.train import RunConfig, run_model, trainer
from atlas_memory.train.checkpoint import newest_checkpoint
from atlas_memory.train.config import ConfigError
from atlas_memory.train.distributed import destroy_process_group
from atlas_memory.train.tbptt import TBPTTStates
from atlas_memory.train.trainer import train
from tests.fresh import FRESH
from tests.train.small import overrides, settings

ORDERS = ("stream", "packed", "crops")
INTERLEAVE = "data.interleave=4"  # in runs of six steps: two groups are read twice, two once


def losses(folder: Path) -> list[float]:
    return [entry.loss for entry in read_log(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, two: Path) -> bool:
    a, b = weights(one), weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def near(one: Path, two: Path, tolerance: float) -> bool:
    a, b = weights(one), weights(two)
    return all((a[name] - b[name]).abs().max() <= tolerance * (1 + a[name].abs().max()) for name in a)


@pytest.fixture(scope="module")
def wholes(six_steps, tmp_path_factory) -> dict[str, Path]:
    """A run of six steps in each order."""
    found = {"stream": six_steps}
    for order in ORDERS[1:]:
        folder = tmp_path_factory.mktemp(order)
        train(settings(folder, f"data.order={order}"))
        found[order] = folder / "run"
    return found


def test_a_resumed_run_reads_the_same_rows_in_turn(tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(one, INTERLEAVE))
    train(settings(two, INTERLEAVE))
    shutil.rmtree(two / "run" / "checkpoint-6")
    train(settings(two, INTERLEAVE), resume=True)  # from step 3: the fourth lane has not been read
    assert losses(one / "run") == losses(two / "run") and same(one / "run", two / "run")


@pytest.mark.parametrize("order", ORDERS)
def test_a_resumed_run_is_bitwise_the_same(wholes, tmp_path, order: str, monkeypatch) -> None:
    with monkeypatch.context() as patch:  # killed while step 5 is read
        calls = iter(range(100))

        def stop(self, *args, **kwargs):
            if next(calls) == 4:
                raise KeyboardInterrupt
            return compute_loss(self, *args, **kwargs)

        compute_loss = trainer._Trainer.compute_loss
        patch.setattr(trainer._Trainer, "compute_loss", stop)
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path, f"data.order={order}"))
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-3"
    train(settings(tmp_path, f"data.order={order}"), resume=True)
    assert losses(tmp_path / "run") == losses(wholes[order])
    assert same(tmp_path / "run", wholes[order])


def test_the_orders_differ_and_rows_remember(wholes, tmp_path) -> None:
    assert len({tuple(losses(wholes[order])) for order in ORDERS}) == 3
    states = load_file(wholes["stream"] / "checkpoint-6" / "memory-0.safetensors")
    seen = states["0.0.memory.seen"]
    assert seen.shape == (2,) and (seen <= 6 * 16).all() and seen.max() > 16
    assert not list(wholes["packed"].glob("checkpoint-*/memory-*"))


def test_states_are_carried_as_one_long_reading(wholes, tmp_path, monkeypatch) -> None:
    """The memory of a row after some steps is what one call over its whole document leaves, at fixed weights."""
    read: list[torch.Tensor] = []
    kept: list[TBPTTStates] = []
    compute_loss = trainer._Trainer.compute_loss

    def keep(self, model, inputs, *args, **kwargs):
        read.append(inputs["input_ids"].clone())
        kept.append(self.states)
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer._Trainer, "compute_loss", keep)
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i} " * 500)
    train(settings(tmp_path, "train.learning_rate=1e-30", "train.weight_decay=0", "train.steps=3"))
    model = run_model.first_model(settings(tmp_path), run_model.saved_config(tmp_path / "run"))
    model.load_state_dict(weights(tmp_path / "run"), strict=False)
    model.tie_weights()
    cache = model.eval()(input_ids=torch.cat(read, 1), use_cache=True).past_key_values
    for block, held in zip(cache.blocks, kept[0].next_cache().blocks, strict=True):
        for one, two in zip(block.state.tensors(), held.state.tensors(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_accumulation_is_a_larger_batch(tmp_path, order: str) -> None:
    """8 x 1 and 1 x 8, with documents that end anywhere."""
    common = (f"data.order={order}", "train.steps=4", "train.learning_rate=0.001", "data.seq_len=32")
    one = tmp_path / "one"
    train(settings(one, *common, "train.batch_size=8"))
    two = tmp_path / "two"
    train(settings(two, *common, "train.batch_size=1", "train.gradient_accumulation_steps=8"))
    assert losses(one / "run") == pytest.approx(losses(two / "run"), rel=1e-6)
    assert near(one / "run", two / "run", 1e-5)


def part(rank: int, count: int, port: int, config: RunConfig, resume: bool) -> None:
    """One process of `count`, two on each machine."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE=str(min(count, 2)))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    train(config, resume)


def start(config: RunConfig, count: int = 2, resume: bool = False, target: Callable[..., None] = part) -> list[Any]:
    """Processes that train together, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parts = [FRESH.Process(target=target, args=(rank, count, port, config, resume)) for rank in range(count)]
    for process in parts:
        process.start()
    return parts


def together(config: RunConfig, count: int = 2, resume: bool = False, target: Callable[..., None] = part) -> None:
    """Train with several processes to the end."""
    parts = start(config, count, resume, target)
    for process in parts:
        process.join(300)
    assert [process.exitcode for process in parts] == [0] * count


@pytest.mark.parametrize("order", ORDERS)
def test_two_processes_are_one_with_a_batch_twice_as_large(tmp_path, order: str) -> None:
    common = (f"data.order={order}", "train.steps=4", "train.learning_rate=0.001", "train.save_every=2")
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(one, *common, "train.batch_size=4"))
    together(settings(two, *common))
    assert losses(one / "run") == pytest.approx(losses(two / "run"), rel=1e-5)
    assert near(one / "run", two / "run", 1e-5)
    assert (two / "run" / "checkpoint-4" / "memory-1.safetensors").exists() == (order == "stream")


def test_one_process_goes_on_with_what_two_remember(tmp_path) -> None:
    common = (INTERLEAVE, "train.learning_rate=0.001", "train.save_every=4")
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(one, *common, "train.batch_size=4"))
    together(settings(two, *common))
    shutil.rmtree(two / "run" / "checkpoint-6")
    with pytest.raises(ConfigError, match="reads 4 rows a step, and this would read 2"):
        train(settings(two, *common), resume=True)
    train(settings(two, *common, "train.batch_size=4"), resume=True)
    assert losses(one / "run") == pytest.approx(losses(two / "run"), rel=1e-5)


def test_torchrun(tmp_path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*start, "-m", "atlas_memory", "train", *overrides(tmp_path, "train.steps=2")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": step 2, loss") == 1
    assert len(read_log(tmp_path / "run")) == 2


def test_the_command_leaves_the_other_processes_before_python_ends(tmp_path) -> None:
    """Who does not is aborted now and then ("terminate called without an active exception")."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert main(["train", *overrides(tmp_path, "train.steps=1")]) == 0
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are named in /proc on Linux only")
def test_no_thread_of_a_connection_is_left() -> None:
    """A thread that still holds a tensor when Python ends aborts the process. Other tests may have left some."""

    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()}

    before = threads()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.trainer = [model]  # as a trainer and its model refer to each other
    model(torch.ones(1, 2)).sum().backward()
    assert threads() - before
    del model
    destroy_process_group()
    assert not threads() - before


@pytest.mark.extended
def test_a_run_killed_again_and_again_ends_the_same(tmp_path) -> None:
    """SIGKILL at ten random moments, wherever it falls: in a step, in a checkpoint, at the end."""
    config = ("train.steps=60", "train.save_every=2")
    train(settings(tmp_path / "whole", *config))
    folder, chance = tmp_path / "killed", random.Random(0)
    run = folder / "run"
    for kill in range(11):
        process = FRESH.Process(target=train, args=(settings(folder, *config), kill > 0))
        process.start()
        if kill < 10:
            while process.is_alive() and not list(run.glob("checkpoint-*")):
                time.sleep(0.01)
            goal = len(read_log(run)) + chance.randint(1, 4)
            while process.is_alive() and len(read_log(run)) < goal:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
        process.join(120)
        assert process.exitcode in ((0,) if kill == 10 else (0, -signal.SIGKILL))
    assert losses(run) == losses(tmp_path / "whole" / "run")
    assert same(run, tmp_path / "whole" / "run")


def test_sigterm_saves_what_was_reached(tmp_path) -> None:
    process = FRESH.Process(target=train, args=(settings(tmp_path, "train.steps=100000", "train.save_every=100000"),))
    process.start()
    while process.is_alive() and len(read_log(tmp_path / "run")) < 3:
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    assert process.exitcode == 0
    assert newest_checkpoint(tmp_path / "run") is not None


def test_rows_that_nobody_remembers_are_named(wholes, tmp_path) -> None:
    checkpoint = wholes["stream"] / "checkpoint-6"
    model = run_model.first_model(settings(tmp_path), run_model.saved_config(wholes["stream"]))
    with pytest.raises(ValueError, match="row 2 is not among them"):
        TBPTTStates(model, 4).load(checkpoint)


def test_a_state_that_grows_is_not_kept(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data.order='stream' .* grows"):
        train(settings(tmp_path, "model.rule=dot"))
    assert not (tmp_path / "run").exists()


def test_a_text_that_changed_is_not_resumed(finished, tmp_path) -> None:
    with (tmp_path / "corpus" / "3.txt").open("a") as file:
        file.write("more")
    with pytest.raises(ConfigError, match="the text has changed since the run in") as caught:
        train(settings(tmp_path, "train.steps=8"), resume=True)
    assert str(caught.value).endswith("restore it, or train into another output_dir")


def test_a_run_that_was_killed_while_it_noted_its_text(finished, tmp_path) -> None:
    (finished / "data.json.partial").touch()
    (finished / "run.yaml.partial").touch()
    assert train(settings(tmp_path, "train.steps=8"), resume=True).steps == 8


def test_a_tokenizer_without_padding(tmp_path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    named = f"data.tokenizer={tmp_path / 'tokenizer'}"
    assert train(settings(tmp_path, named)).steps == 6
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-6"):  # as other tools ask for it
        saved = AutoTokenizer.from_pretrained(folder)
        assert saved.pad_token_id == saved.eos_token_id == 256 and len(saved) == len(tokenizer)
    assert (
        train(settings(tmp_path, f"data.tokenizer={tmp_path / 'tokenizer'}", "train.steps=7"), resume=True).steps == 7
    )
