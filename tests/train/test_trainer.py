"""Runs: what they leave, that a resumed one is the same one, that nothing is destroyed."""

import itertools
import json
import os
import shutil
import signal
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from atlas_memory import AtlasConfig, AtlasForCausalLM, OmegaMemory
from atlas_memory.monitor.logs import read_log
from atlas_memory.ops.compiling import compiled_for_rule
from atlas_memory.train import callbacks, load_run, trainer
from atlas_memory.train.callbacks import Clock
from atlas_memory.train.checkpoint import newest_checkpoint
from atlas_memory.train.config import ConfigError
from atlas_memory.train.trainer import train
from tests.train.small import copied, count_in_training, settings


def losses(folder: Path) -> list[tuple[float, float, float]]:
    return [(entry.step, entry.loss, entry.learning_rate) for entry in read_log(folder)]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def whole(six_steps) -> Path:
    """A run of six steps in one go."""
    return six_steps


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """The same run in a folder that a test may damage."""
    return copied(whole, tmp_path / "copy")


def resume(run: Path, *more: str) -> trainer.Outcome:
    """Resume a copied run, whose corpus stands beside it."""
    return train(settings(run.parent, *more), resume=True)


def test_what_a_run_leaves(whole) -> None:
    assert AutoTokenizer.from_pretrained(whole).eos_token_id == 256
    saved = AutoModelForCausalLM.from_pretrained(whole).state_dict()
    last = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-6").state_dict()
    assert all(torch.equal(saved[name], last[name]) for name in saved)
    assert [entry.step for entry in read_log(whole)] == [1, 2, 3, 4, 5, 6]
    loaded = load_run(whole)
    assert loaded.config is not None
    assert loaded.config.train.steps == 6
    assert not loaded.model.training


def test_the_same_seed_gives_the_same_run(whole, tmp_path) -> None:
    train(settings(tmp_path))
    assert losses(tmp_path / "run") == losses(whole)
    train(settings(tmp_path, f"output_dir={tmp_path / 'other'}", "train.seed=1"))
    assert losses(tmp_path / "other") != losses(whole)


def test_gradient_checkpointing_changes_no_loss(whole, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        read = count_in_training(patch)
        train(settings(tmp_path, "train.gradient_checkpointing=true"))
    assert len(read) == 6 * 2 * 2, "in six steps the MLPs of two blocks were not computed a second time"
    for one, two in zip(losses(whole), losses(tmp_path / "run"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_compiled_chunks_change_no_loss(whole, tmp_path, monkeypatch) -> None:
    compiled, asked = torch.compile, []  # the compiler's own code takes ten times as long

    def compile(function, **_):
        asked.append(function)
        return compiled(function, backend="aot_eager", dynamic=False)

    monkeypatch.setattr(torch, "compile", compile)
    compiled_for_rule.cache_clear()
    said = StringIO()
    train(settings(tmp_path, "train.compile=true"), console=Console(file=said))
    compiled_for_rule.cache_clear()
    assert asked
    assert "the first step compiles the memories, which takes a minute" in said.getvalue()
    for one, two in zip(losses(whole), losses(tmp_path / "run"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize("what", ["compile=true compiles memories", "cuda_graphs=true records memories"])
def test_a_model_without_memories_has_nothing_to_compile_or_record(what, tmp_path) -> None:
    option = f"train.{what.split()[0]}"
    with pytest.raises(ConfigError, match=f"{what}, and .*: leave it out"):
        train(settings(tmp_path, option, "model.block=swa", "model.rule=null", "model.attention_window=4"))


def test_recording_does_not_go_with_checkpointing(tmp_path) -> None:
    with pytest.raises(ConfigError, match="drop one"):
        train(settings(tmp_path, "train.cuda_graphs=true", "train.gradient_checkpointing=true"))


@pytest.mark.parametrize(
    "options,there,graphed",
    [
        ([], False, False),
        (["train.device=auto"], True, True),
        (["train.device=auto", "train.cuda_graphs=false"], True, False),
        (["train.device=auto", "train.gradient_checkpointing=true"], True, False),
        ([], True, False),
        (["train.cuda_graphs=true"], False, True),
    ],
)
def test_memories_are_recorded_on_a_gpu(options, there, graphed, tmp_path, monkeypatch) -> None:
    model = AtlasForCausalLM(AtlasConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    trainer._set_execution(settings(tmp_path, *options), model)
    memories = [m for m in model.modules() if isinstance(m, OmegaMemory)]
    assert memories and all((m.graphs is not None) == graphed for m in memories)


def test_an_interrupted_run_resumes_to_the_same_end(whole, tmp_path, monkeypatch) -> None:
    class PressCtrlC(TrainerCallback):
        def on_step_begin(self, args, state, control, **_) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    original = trainer._Trainer.__init__

    def with_ctrl_c(self, *args, callbacks, **kwargs) -> None:
        original(self, *args, callbacks=[PressCtrlC(), *callbacks], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Trainer, "__init__", with_ctrl_c)
        outcome = train(settings(tmp_path))
    assert (outcome.steps, outcome.interrupted) == (4, True)
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoint-4"

    outcome = train(settings(tmp_path), resume=True)
    assert (outcome.steps, outcome.interrupted) == (6, False)
    assert losses(tmp_path / "run") == losses(whole)
    one, two = load_run(whole).model.state_dict(), load_run(tmp_path / "run").model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_cut_off_checkpoint_is_skipped(whole, copy, caplog, name: str) -> None:
    damaged = copy / "checkpoint-6" / name
    damaged.write_bytes(damaged.read_bytes()[:100])
    shutil.copy(damaged, copy / "damaged")
    assert newest_checkpoint(copy) == copy / "checkpoint-3"
    assert "checkpoint-6" in caplog.text
    assert damaged.read_bytes() == (copy / "damaged").read_bytes()
    assert resume(copy).steps == 6
    assert losses(copy) == losses(whole)


def test_a_run_without_checkpoints_starts_again(whole, copy) -> None:
    shutil.rmtree(copy / "checkpoint-3")
    (copy / "checkpoint-6" / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no intact checkpoint .*checkpoint-6: optimizer.pt is missing"):
        resume(copy)
    shutil.rmtree(copy / "checkpoint-6")
    with pytest.raises(
        ConfigError, match=r"a model and no checkpoint to resume from.* model.init_from=\S+ output_dir="
    ):
        resume(copy)
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    resume(copy)
    assert losses(copy) == losses(whole)


def test_a_finished_run_saves_its_model_again(copy) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.name != "README.md"}
    assert resume(copy).steps == 6
    assert {path.name for path, data in before.items() if path.read_bytes() != data} <= {"trainer_state.json"}
    assert resume(copy, "train.steps=8").steps == 8


def test_a_folder_in_use_is_refused(whole, tmp_path) -> None:
    before = snapshot(whole)
    with pytest.raises(ConfigError, match="is not empty: choose another, or continue the run in it with --resume"):
        train(settings(tmp_path, f"output_dir={whole}"))
    assert snapshot(whole) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be written to .Not a directory"):
        train(settings(tmp_path, f"output_dir={tmp_path / 'file'}"))
    with pytest.raises(ConfigError, match=r"nothing to resume: .* holds no run.yaml"):
        train(settings(tmp_path, f"output_dir={tmp_path / 'new'}"), resume=True)
    assert not (tmp_path / "new").exists()


def test_only_one_process_writes_a_run(copy) -> None:
    with FileLock(copy / ".lock"), pytest.raises(ConfigError, match="is in use by another process"):
        resume(copy, "train.steps=8")


def test_another_run_is_no_resumption(copy) -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len is 8, but the run to resume has 16"):
        resume(copy, "data.seq_len=8")
    with pytest.raises(ConfigError, match=r"model.window is 2, but the run to resume has None"):
        resume(copy, "model.window=2")
    with pytest.raises(ConfigError, match=r"model.vocab_size is 258, but the run to resume has None"):
        resume(copy, "model.vocab_size=258")
    with pytest.raises(ConfigError, match=r"train.learning_rate is 0.1, but the run to resume has None"):
        resume(copy, "train.learning_rate=0.1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.preset=huge", "preset 'huge' is unknown; choose one of nano"),
        ("model.rule=atlsa", "rule='atlsa' is unknown; did you mean atlas"),
        ("model.windw=3", r"unknown key model.windw \(=3\); did you mean model.window\?"),
        ("model.hidden_size=15", "hidden_size=15"),
        ("model.vocab_size=100", "model.vocab_size=100 is smaller than the tokenizer's 258"),
        ("data.seq_len=100000", "data.seq_len=100000 times 2 rows is more than the training text"),
        ("train.bf16=true", "train.bf16=True needs a CUDA device"),
        ("data.path=/nowhere", "data.path='/nowhere' does not exist"),
    ],
)
def test_mistakes_leave_no_folder(tmp_path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings(tmp_path, override))
    assert not (tmp_path / "run").exists()


def test_minutes_end_a_run_and_its_schedule(tmp_path, monkeypatch) -> None:
    """A twentieth of a second passes whenever the clock is looked at."""
    passed = itertools.count(0.0, 0.05)
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: next(passed)))
    outcome = train(settings(tmp_path, "train.steps=100000", "train.max_minutes=0.06"))
    assert 1 <= outcome.steps < 100000
    assert not outcome.interrupted
    rates = [rate for _, _, rate in losses(tmp_path / "run")]
    assert rates[-1] < 0.2 * max(rates)
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / f"checkpoint-{outcome.steps}"
    assert train(settings(tmp_path, "train.steps=100000", "train.max_minutes=0.06"), resume=True).steps == outcome.steps


def test_a_rate_that_stays_and_falls_at_the_end(tmp_path) -> None:
    train(settings(tmp_path, "train.schedule=wsd", "train.steps=20", "train.learning_rate=0.01"))
    rates = [rate for _, _, rate in losses(tmp_path / "run")]
    assert rates[1:17] == pytest.approx([0.01] * 16)
    assert rates[17:] == pytest.approx([0.0075, 0.005, 0.0025])


def test_programs_that_draw_curves(tmp_path) -> None:
    with pytest.raises(ConfigError, match="nonsense is not supported"):
        train(settings(tmp_path, "train.report_to=[nonsense]"))
    assert not (tmp_path / "run").exists()


def test_clock() -> None:
    assert Clock(10, None).progress(5) == 0.5
    assert Clock(10, 1.0, elapsed=45.0).progress(5) == 0.75
    assert Clock(10, 1.0, elapsed=600.0).progress(5) == 1.0


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step \d+: lower train.learning_rate"):
        train(settings(tmp_path, "train.learning_rate=1e38", "train.steps=50", "train.grad_clip=1e30"))


def test_loading_what_is_not_a_run(copy, tmp_path) -> None:
    with pytest.raises(ValueError, match="the folder does not exist"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("a text")
    with pytest.raises(ValueError, match=r"no run at '.*file.txt': it is a file"):
        load_run(tmp_path / "file.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor an intact checkpoint"):
        load_run(tmp_path / "empty")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(ValueError, match=r"do not fit its config.json: .* is \[.*16.*\] in them"):
        load_run(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json' is missing or damaged"):
        load_run(copy)
    (copy / "config.json").write_text(json.dumps(config))
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged or cut short"):
        load_run(copy)
    (copy / "model.safetensors").unlink()
    assert load_run(copy).folder == copy


def test_the_card_says_how_a_run_is_loaded(whole, monkeypatch) -> None:
    """By its name, wherever it lies."""
    card = (whole / "README.md").read_text()
    assert str(whole.parent) not in card
    monkeypatch.chdir(whole.parent)
    code = card.partition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code, names)
    assert names["model"].config.rule == "deltanet" and len(names["tokenizer"]) == 258
    assert "tags: [atlas-memory, lmm, deltanet]" in card and "6 steps" in card


def test_samples(tmp_path) -> None:
    train(settings(tmp_path, "train.evaluate_every=2", "train.sample_tokens=5"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["prompt"].startswith("document ") and 0 < len(line["text"]) <= 5 for line in lines)
    # They change nothing that is learned; and a resumed run writes those after its checkpoint anew.
    more = ("train.sample_tokens=0", "train.evaluate_every=0", f"output_dir={tmp_path / 'silent'}")
    train(settings(tmp_path, *more))
    one, two = (load_run(tmp_path / name).model.state_dict() for name in ("run", "silent"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not (tmp_path / "silent" / "samples.jsonl").exists()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    train(settings(tmp_path, "train.evaluate_every=2", "train.sample_tokens=5", "train.prompt=a"), True)
    again = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"] == "a") for line in again] == [(2, False), (4, True), (6, True)]
