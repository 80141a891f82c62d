"""Run folders and settings that somebody has damaged, on purpose or not: one line, or a run that is right."""

import json
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_memory.cli import main
from atlas_memory.console import LONGEST_LINE
from atlas_memory.monitor.logs import LOG, Log, StepRecord
from atlas_memory.train.callbacks import JsonLog
from atlas_memory.train.checkpoint import (
    DIGESTS,
    checkpoint_files,
    damage,
    digests,
    load_shards,
    newest_checkpoint,
    weight_shapes,
)
from atlas_memory.train.config import ConfigError, load_config, load_saved
from atlas_memory.train.trainer import train
from tests.train.small import overrides, settings

QUIET = ("train.evaluate_every=0", "train.probe_every=0")
SECONDS = 5  # of the processor


def resumed(run: Path, *more: str) -> int:
    return main(["train", "--resume", *overrides(run.parent, *QUIET, *more)])


def signed(checkpoint: Path) -> None:
    """Write the digests of a checkpoint's files as they are now, as whoever changed them would."""
    files = checkpoint_files(checkpoint)
    known = dict(zip((str(path.relative_to(checkpoint)) for path in files), digests(files), strict=True))
    (checkpoint / DIGESTS).write_text(json.dumps(known))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The line that a command ended with, of which it is the only one that names an error."""

    def last() -> str:
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("atlas: ") and not [line for line in lines[:-1] if "Traceback" in line]
        return lines[-1]

    return last


@pytest.mark.parametrize(("make", "why"), [(os.mkdir, "it is a folder"), (os.mkfifo, "it is no file, but a pipe")])
@pytest.mark.parametrize("name", ["log.jsonl", "memory.jsonl", "samples.jsonl"])
def test_a_log_that_is_no_file(finished: Path, said: Callable[[], str], name: str, make: Callable, why: str) -> None:
    (finished / name).unlink(missing_ok=True)
    make(finished / name)
    log = Log(finished / name, StepRecord)
    assert log.read() == [] and why in log.unreadable
    assert resumed(finished, "train.steps=7") == 1
    assert f"{name}' cannot be read ({why}" in said()
    if name == LOG:
        assert main(["report", str(finished)]) == 1
        assert f"{name}' cannot be read ({why}" in said()


@pytest.mark.parametrize("name", ["run.yaml", "data.json", "checkpoint-6/trainer_state.json"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(finished: Path, said: Callable, name: str, make: Callable) -> None:
    shutil.rmtree(finished / "checkpoint-3")
    (finished / name).unlink()
    make(finished / name)
    assert resumed(finished, "train.steps=7") in (0, 2)  # data.json alone can be had again from a checkpoint
    assert name != "run.yaml" or "holds no run.yaml" in said()


def test_folders_that_are_no_checkpoints(finished: Path) -> None:
    for name in ("checkpoint-²", "checkpoint-٣", "checkpoint-", "checkpoint-9x", f"checkpoint-{'9' * 5000}"[:200]):
        (finished / name).mkdir()
    (finished / "checkpoint-9").touch()
    assert newest_checkpoint(finished) == finished / "checkpoint-6"
    assert resumed(finished, "train.steps=7") == 0


def test_a_checkpoint_of_another_run(finished: Path, tmp_path: Path, caplog, said: Callable, capsys) -> None:
    train(settings(tmp_path, "train.seed=1", "train.steps=9", f"output_dir={tmp_path / 'other'}", *QUIET))
    shutil.copytree(tmp_path / "other" / "checkpoint-9", finished / "checkpoint-9")
    assert damage(tmp_path / "other" / "checkpoint-9") is None
    assert resumed(finished, "train.steps=7") == 0
    assert "checkpoint-9: it is of another run: its data.json" in caplog.text
    shutil.copytree(tmp_path / "other" / "checkpoint-9", finished / "checkpoint-9", dirs_exist_ok=True)
    for name in ("checkpoint-6", "checkpoint-7"):
        shutil.rmtree(finished / name)
    capsys.readouterr()
    assert resumed(finished, "train.steps=8") == 2
    assert "checkpoint-9: it is of another run" in said()


def test_a_run_without_its_data_json_takes_it_from_a_checkpoint(finished: Path) -> None:
    noted = (finished / "data.json").read_bytes()
    (finished / "data.json").unlink()
    assert resumed(finished, "train.steps=7") == 0
    assert (finished / "data.json").read_bytes() == noted


@pytest.mark.parametrize("names", [[], ["config.json"], ["config.json", "trainer_state.json", "optimizer.pt"]])
def test_digests_that_name_too_little(finished: Path, names: list[str]) -> None:
    path = finished / "checkpoint-6" / DIGESTS
    known = json.loads(path.read_text())
    path.write_text(json.dumps({name: known[name] for name in names}))
    assert "files.json does not name " in str(damage(path.parent))
    path.write_text(json.dumps(known | {"../../six": [1, "a"]}))
    assert damage(path.parent) == "../../six is missing"


class Spy:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def _moments(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def made(checkpoint: Path) -> None:
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        state = change(state) or state
        torch.save(state, checkpoint / "optimizer.pt")

    return made


def _set(name: str, change: Callable[[Any], Any], *place: Any) -> Callable[[Path], None]:
    def changed(state: dict[str, Any]) -> None:
        inner = state
        for key in place:
            inner = inner[key]
        inner[name] = change(inner[name])

    return _moments(changed)


OPTIMIZER = {
    "shape": _set("exp_avg", lambda t: t[..., :1].clone(), "state", 0),
    "longer": _set("exp_avg_sq", lambda t: torch.cat([t, t]), "state", 1),
    "empty": _set("exp_avg", lambda t: t.new_empty(0), "state", 2),
    "whole numbers": _set("exp_avg", lambda t: t.long(), "state", 0),
    "twice as exact": _set("exp_avg", lambda t: t.double(), "state", 0),
    "sparse": _set("exp_avg", lambda t: t.to_sparse(), "state", 0),
    "nan": _set("exp_avg", lambda t: t * float("nan"), "state", 0),
    "text": _set("exp_avg", lambda t: "text", "state", 0),
    "step": _set("step", lambda t: -t, "state", 0),
    "step of many": _set("step", lambda t: t + 1000, "state", 0),
    "step of another kind": _set("step", lambda t: 3, "state", 0),
    "no moments": _set("state", lambda s: {0: {}}),
    "another name": _set("state", lambda s: {0: {"momentum": s[0]["exp_avg"], "step": s[0]["step"]}}),
    "another number": _set("state", lambda s: {1000: s[0]}),
    "a name for a number": _set("state", lambda s: {"0": s[0]}),
    "groups": _set("param_groups", lambda g: g[:1]),
    "other groups": _set("param_groups", lambda g: g[::-1]),
    "decay": _set("weight_decay", lambda v: 1e9, "param_groups", 0),
    "betas": _set("betas", lambda v: (0.9, 2.0), "param_groups", 0),
    "rate": _set("initial_lr", lambda v: 1e9, "param_groups", 0),
    "parameters": _set("params", lambda v: v[::-1], "param_groups", 0),
    "a list": _moments(lambda s: [s]),
    "more": _moments(lambda s: s | {"steps": 3}),
    "bytes": lambda c: (c / "optimizer.pt").write_bytes(b"no pickle"),
    "code": lambda c: torch.save({"state": Spy(c / "code"), "param_groups": []}, c / "optimizer.pt"),
}


def _random(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def made(checkpoint: Path) -> None:
        path = checkpoint / "rng_state.pth"
        state = torch.load(path, weights_only=False)  # our own, of a moment ago
        torch.save(change(state) or state, path)

    return made


RANDOM = {
    "numpy stands nowhere": _random(lambda s: s | {"numpy": (*s["numpy"][:2], 10**6, *s["numpy"][3:])}),
    "numpy": _random(lambda s: s | {"numpy": 3}),
    "python": _random(lambda s: s | {"python": (3, (1, 2), None)}),
    "cpu": _random(lambda s: s | {"cpu": torch.zeros(3, dtype=torch.uint8)}),
    "nothing": _random(lambda s: {"cpu": s["cpu"]}),
    "code": lambda c: torch.save({"python": Spy(c / "code")}, c / "rng_state.pth"),
}


def _state(**changes: Any) -> Callable[[Path], None]:
    def made(checkpoint: Path) -> None:
        path = checkpoint / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return made


STATE = {
    "another step": _state(global_step=3),
    "half a step": _state(global_step=6.5),
    "true": _state(global_step=True),
    "a text": _state(epoch="six"),
    "unknown": _state(code="import os"),
    "lines": _state(log_history=[3]),
    "best": _state(best_model_checkpoint="/etc"),
    "callbacks": _state(stateful_callbacks=3),
    "flos": _state(total_flos=None),
    "nested": lambda c: (c / "trainer_state.json").write_text("[" * 20000 + "]" * 20000),
    "list": lambda c: (c / "trainer_state.json").write_text("[]"),
}


def _states(tensors: Callable[[dict], dict] = dict, **about: Any) -> Callable[[Path], None]:
    def made(checkpoint: Path) -> None:
        path = checkpoint / "memory-0.safetensors"
        with safe_open(path, framework="pt") as file:
            known = file.metadata()
        save_file(tensors(load_file(path)), path, metadata=known | {k: json.dumps(v) for k, v in about.items()})

    return made


def _first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], dict]:
    return lambda tensors: {n: change(t) if n == min(tensors) else t for n, t in tensors.items()}


STATES = {
    "rows of thousands of millions": _states(rows=[[0, 10**12]]),
    "rows below zero": _states(rows=[[-2, 2]]),
    "rows twice": _states(rows=[[0, 2], [0, 2]], seen=[1, 1]),
    "no rows": _states(rows=[]),
    "rows in words": _states(rows="all"),
    "read less than nothing": _states(seen=[-5]),
    "read a truth": _states(seen=[True]),
    "read for ever": _states(seen=[2**70]),
    "a group that is none": _states(group=7),
    "shape": _states(_first(lambda t: t[..., :1].clone())),
    "rows of tensors": _states(_first(lambda t: t[:1].clone())),
    "whole numbers": _states(_first(lambda t: t.long())),
    "missing": _states(lambda tensors: {n: t for n, t in tensors.items() if n != min(tensors)}),
    "bytes": lambda c: (c / "memory-0.safetensors").write_bytes(b"no tensors"),
}

DAMAGES = [
    pytest.param(file, damage, id=f"{file}: {name}")
    for file, damages in (
        ("optimizer.pt", OPTIMIZER),
        ("rng_state", RANDOM),
        ("trainer_state.json", STATE),
        ("memory-", STATES),
    )
    for name, damage in damages.items()
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_what_does_not_fit_is_named(finished: Path, said: Callable[[], str], file: str, damage: Callable) -> None:
    """A moment of another shape wrote over foreign memory, and the process ended with 134."""
    checkpoint = finished / "checkpoint-6"
    damage(checkpoint)
    signed(checkpoint)
    assert resumed(finished, "train.steps=7") in (1, 2)
    line = said()
    assert file in line and ("delete checkpoint-6" in line or "checkpoint-6'" in line)
    assert not (checkpoint / "code").exists() and not (finished / "checkpoint-7").exists()


@pytest.mark.parametrize("kind", ["muon", "m3"])
def test_other_optimisers_are_looked_at_too(tmp_path: Path, said: Callable[[], str], kind: str) -> None:
    more = (f"train.optimizer={kind}", *QUIET)
    train(settings(tmp_path, *more))
    checkpoint, name = tmp_path / "run" / "checkpoint-6", {"muon": "momentum_buffer", "m3": "slow"}[kind]
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    place = next(i for i, held in saved["state"].items() if name in held)
    _set(name, lambda t: t[:1].clone(), "state", place)(checkpoint)
    signed(checkpoint)
    assert resumed(tmp_path / "run", "train.steps=7", more[0]) == 2
    assert f"{name} of parameter {place}" in said()
    torch.save(saved, checkpoint / "optimizer.pt")
    signed(checkpoint)
    assert resumed(tmp_path / "run", "train.steps=7", more[0]) == 0


def test_sharded_checkpoints_call_nothing(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    shards = tmp_path / "checkpoint-1" / "shards"
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    assert weight_shapes(shards.parent) == {"weight": (2, 3), "bias": (2,)}
    (shards / ".metadata").write_bytes(pickle.dumps(Spy(tmp_path / "code")))
    with pytest.raises(ValueError, match=r"shards/.metadata is damaged \(UnpicklingError\)"):
        weight_shapes(shards.parent)
    with pytest.raises(ValueError, match=r"shards' does not fit this run"):
        load_shards({"model": model.state_dict()}, shards.parent, no_dist=True)
    torch.distributed.checkpoint.save({"rate": Spy(tmp_path / "code")}, checkpoint_id=shards, no_dist=True)
    with pytest.raises(ValueError, match="does not fit this run"):
        load_shards({"rate": 1.0}, shards.parent, no_dist=True)
    assert not (tmp_path / "code").exists()


def test_a_folder_that_is_removed_during_its_run(tmp_path: Path, said: Callable[[], str], monkeypatch) -> None:
    logged = JsonLog.on_log

    def removed(self: JsonLog, *arguments: Any, **more: Any) -> None:
        shutil.rmtree(tmp_path / "run")
        logged(self, *arguments, **more)

    monkeypatch.setattr(JsonLog, "on_log", removed)
    assert main(["train", *overrides(tmp_path, *QUIET)]) == 1
    assert "log.jsonl could not be written: its folder is gone; put a copy back" in said()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("1e5", 1e5),
        ("1e-5", 1e-5),
        ("true", True),
        ("~", None),
        ("'3'", "3"),
        ("{3: 4}", {3: 4}),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = load_config(None, [f"model.x={text}"]).model.overrides["x"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "override",
    [
        "train.fsdp=1e-400",
        "train.fsdp=0.0",
        "train.fsdp=1",
        "train.fsdp=no",
        "train.fsdp='true'",
        "train.fsdp=!!bool 1",
        "train.steps=!!timestamp x",
        "train.steps=!!python/object/apply:os.getcwd []",
        "train.steps=&a 3",
        "train.sample_tokens=1:30",
        "train.steps=3.0",
        "train.steps='3'",
        "train.steps=1_000_000_000_000",
        "train.steps=true",
        "train.batch_size=1000000000",
        "train.gradient_accumulation_steps=1000000000",
        "train.sample_tokens=1000000000",
        "train.warmup_steps=1" + 400 * "0",
        "train.steps=" + 5000 * "9",
        "train.save_minutes=1e300",
        "train.report_to=[" + 1000 * "a," + "a]",
        "train.learning_rate=.inf",
        "data.seq_len=1000000000",
        "data.interleave=1000000000",
        "data.reset_every=1000000000000",
        "data.max_documents=1" + 30 * "0",
        "data.seq_len_schedule={" + ", ".join(f"{i}: {i + 2}" for i in range(1000)) + "}",
        "data.path=[" + 2000 * "a," + "a]",
        'output_dir="a\\0b"',
        'output_dir="a\\ud800b"',
        "output_dir=" + 300 * "x",
        "train.prompt=caf\udce9",
        ".".join(1000 * ["model"]) + ".steps=3",
        "model=" + 3000 * "[",
        "model={a: " + 20_000 * "x" + "}x",
    ],
    ids=lambda text: text[:40].replace("\udce9", "?"),
)
def test_values_that_nobody_can_mean(tmp_path: Path, said: Callable[[], str], override: str) -> None:
    begun = time.process_time()
    assert main(["train", *overrides(tmp_path), override]) == 2
    line = said()
    assert override.partition("=")[0][:40] in line
    assert len(line) < LONGEST_LINE + 100 and time.process_time() - begun < SECONDS
    assert not (tmp_path / "run").exists()


def test_more_rows_than_fit(tmp_path: Path, said: Callable[[], str]) -> None:
    huge = ("train.batch_size=65536", "data.seq_len=1000000", "data.order=crops")
    (tmp_path / "long.txt").write_text("long " * 300_000)
    assert main(["train", *overrides(tmp_path, *huge, f"data.path={tmp_path / 'long.txt'}")]) == 2
    assert "GB for logits alone" in said() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x [1]\nb: " + 9 * "[*x, *x], ", "the alias x: write out"),
        ("a: !!python/object/apply:os.mkdir [code]", "the tag !!python/object/apply:os.mkdir: leave it out"),
        ("train: {steps: " + 3000 * "[", "it is nested too deeply"),
        ("a: " + 300_000 * "x", "are read"),
        ("a: \x07", "is not YAML"),
        ("\ud800", "is not UTF-8 text"),
    ],
)
def test_descriptions_that_are_bombs(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    begun = time.process_time()
    with pytest.raises(ConfigError, match=says):
        load_saved(tmp_path)
    assert time.process_time() - begun < SECONDS and not Path("code").exists()


def test_a_description_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    config = load_config(None, ["data.path=[" + ", ".join(f"{i}{'a' * 300}" for i in range(900)) + "]"])
    with pytest.raises(ConfigError, match="name a folder or a pattern"):
        config.save(tmp_path / "run.yaml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\rb", "a\nb", "\u202egnp.exe", "[red]x[/red]", "[/]", "x" * 200])
def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys, name: str) -> None:
    run = tmp_path / name
    given = overrides(tmp_path, *QUIET, "train.steps=1", f"output_dir={run}")
    shutil.copytree(tmp_path / "corpus", tmp_path / f"{name}.text")
    for arguments in (
        ["train", *given, f"data.path={tmp_path / f'{name}.text'}"],
        ["train", *given],
        ["train", "--resume", *given],
        ["evaluate", str(tmp_path / f"{name}.none")],
        ["train", f"model.rule={name}"],
        ["train", f"train.{name}=3"],
        ["rules", name],
        ["evaluate", name],
    ):
        main(arguments)
        shown = "".join(capsys.readouterr())
        assert not {"\x1b", "\r", "\u202e", "\x07"} & {*shown}
        assert "\nb" not in shown and ("[red]" in shown or "red" not in shown or "\\x1b" in shown)


# What follows is random, with fixed seeds.

VALUES = (
    *(
        "0",
        "-1",
        "1e9",
        "1e400",
        "-1e-400",
        ".nan",
        "-.inf",
        "010",
        "0o17",
        "0x1F",
        "1:30",
        "1_000",
        "3.0",
        "true",
        "no",
    ),
    *(
        "null",
        "~",
        "''",
        "' '",
        "[]",
        "{}",
        "[1, [2]]",
        "{a: {b: 1}}",
        "!!bool 1",
        "!!int 3",
        "!x y",
        "&a 1",
        "*a",
        "<<",
    ),
    *(
        "2026-13-45",
        "2001-01-01",
        "=",
        "@",
        "%",
        "[",
        "}",
        "'",
        "a: b: c",
        "9" * 30,
        "9" * 5000,
        "x" * 20_000,
        "\x1b[2J",
    ),
    *("\u202e", "\udce9", "a\nb", "[red]", "../..", "/dev/zero", "os.system", "bytes", "[nan]", "{1: 2}", "- a", "? a"),
)


def _keys() -> list[str]:
    from atlas_memory.models import AtlasConfig
    from atlas_memory.train.config import RunConfig, keys

    own = [f"model.{name}" for name in AtlasConfig.__annotations__]
    odd = ["", ".", "train", "train.", "model..x", "\x1b", "x" * 5000, "data.seq_len_schedule.3", "a b"]
    return [*keys(RunConfig), *own, *odd]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(4))
def test_random_settings(tmp_path: Path, capsys, monkeypatch, seed: int) -> None:
    """A hundred a seed. Nothing is there to be resumed, so that those that are right end with one line too."""
    draw, known = random.Random(seed), _keys()
    monkeypatch.chdir(tmp_path)
    for _ in range(100):
        given = [f"{draw.choice(known)}={draw.choice(VALUES)}" for _ in range(draw.choice([1, 1, 2]))]
        begun = time.process_time()
        code = main(["train", "--resume", "output_dir=nothing", *given])
        err = capsys.readouterr().err
        assert code == 2 and err.startswith("atlas: ") and err.count("\n") == 1, given
        assert len(err) < LONGEST_LINE + 100 and not {"\x1b", "\u202e", "\udce9"} & {*err}, given
        assert time.process_time() - begun < SECONDS, given
        assert not list(tmp_path.iterdir()), given


@pytest.fixture(scope="module")
def seventh(six_steps: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the run of six steps after its seventh."""
    folder = tmp_path_factory.mktemp("seventh")
    shutil.copytree(six_steps.parent, folder, dirs_exist_ok=True)
    assert resumed(folder / "run", "train.steps=7") == 0
    return (folder / "run" / "model.safetensors").read_bytes()


def _damaged(draw: random.Random, run: Path) -> str:
    """Change one thing in a run's folder; what, in words."""
    checkpoint = run / "checkpoint-6"
    text_files = ["run.yaml", "data.json", "log.jsonl", "memory.jsonl", "config.json", "trainer_state.json"]
    texts = [run / name for name in text_files] + [checkpoint / name for name in ("config.json", "trainer_state.json")]
    files = [path for path in checkpoint.iterdir() if path.name != DIGESTS]
    kind = draw.choice(["bytes", "cut", "text", "text", "text", "swapped", "gone", "folder", "digests", "damage"])
    path = draw.choice(files + [path for path in texts if path.is_file()])
    if kind == "text":
        path = draw.choice([path for path in texts if path.is_file()])
        text = path.read_text()
        at = draw.randrange(len(text))
        put = draw.choice([*VALUES[:40], "\n", "  ", '"', ": ", "-", "[" * 5000, "", "&a *a", "\x00"])
        path.write_bytes((text[:at] + put + text[at + draw.choice([0, 1, 8]) :]).encode("utf-8", "surrogatepass"))
    elif kind == "bytes":
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 8, 64])):
            data[draw.randrange(min(len(data), draw.choice([64, len(data)])))] = draw.randrange(256)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif kind == "swapped":
        path.write_bytes(draw.choice(files).read_bytes())
    elif kind in ("gone", "folder"):
        path.unlink()
        if kind == "folder":
            draw.choice([os.mkdir, os.mkfifo])(path)
    elif kind == "digests":
        (checkpoint / DIGESTS).write_text(
            draw.choice(["{}", "[]", "null", "{", '{"a": [1, "b"]}', '{"a": 3}', "[" * 9999])
        )
    else:
        draw.choice([damage for param in DAMAGES for damage in param.values[1:]])(checkpoint)
    return f"{kind} of {path.relative_to(run)}"


def _silently_other(what: str) -> bool:
    """Whether a change may give other numbers without a word: one that signs other values of the right kind."""
    return what.startswith("bytes of checkpoint-6/")


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(5))
def test_random_damage(six_steps: Path, seventh: bytes, tmp_path: Path, capsys, caplog, seed: int) -> None:
    """Twenty a seed, half of them with the digests that fit: one line, or the run that would have been without it."""
    draw, run = random.Random(seed), tmp_path / "run"
    for _ in range(20):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(six_steps.parent, tmp_path, dirs_exist_ok=True)
        shutil.rmtree(run / "checkpoint-3")
        what = _damaged(draw, run)
        if was_signed := draw.random() < 0.5 and "digests" not in what:
            signed(run / "checkpoint-6")
        begun = time.process_time()
        code = resumed(run, "train.steps=7")
        _, err = capsys.readouterr()
        assert code in (0, 1, 2) and "Traceback" not in err and time.process_time() - begun < SECONDS, what
        assert not (run / "checkpoint-6" / "code").exists(), what
        if code:
            assert err.splitlines()[-1].startswith("atlas: ") and len(err.splitlines()[-1]) < LONGEST_LINE + 100, what
        elif not (was_signed and _silently_other(what)):
            assert (run / "model.safetensors").read_bytes() == seventh, what
