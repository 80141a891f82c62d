"""The logs of runs, as they grow."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.models import AtlasConfig
from atlas_memory.monitor.logs import LOG, MEMORY, RECORDS, SAMPLES, Log, Record, Whole, cut_logs, read_log
from atlas_memory.train.config import TrainSection
from atlas_memory.train.run_folder import has_byte_tokens, write_yaml
from atlas_memory.viz.folders import find_runs
from atlas_memory.viz.watched_runs import WITHOUT_MEMORY, WatchedRun, WatchedRuns
from benchmarks.dashboard import append, made_run


class Line(Record):
    step: Whole
    loss: float = 0.0


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, Line)
    assert log.read() == []
    append(path, {"step": 1, "loss": 3.0, "elapsed": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # still being written
    assert [line.step for line in log.read()] == [1] and log.damaged == 0
    with path.open("a") as file:
        file.write('ss": 2.0}\n')
    assert [line.loss for line in log.read()] == [3.0, 2.0]
    append(path, {"step": 1, "loss": 4.0, "elapsed": 1})  # done again
    assert [line.loss for line in log.read()] == [4.0, 2.0]
    cut_logs(tmp_path, 1)  # replaces the file
    assert [line.loss for line in log.read()] == [4.0]
    path.unlink()
    assert log.read() == []


@pytest.mark.parametrize(
    "damage", ["{", "[]", "3", '"x"', '{"loss": 1}', '{"step": null}', '{"step": "3"}', '{"step": 1.5}', "\x00\x01"]
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps({'step': 1})}\n{damage}\n\n{json.dumps({'step': 2})}\n")
    log = Log(path, Line)
    assert [line.step for line in log.read()] == [1, 2] and log.damaged == 1
    log.read()
    assert log.damaged == 1


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "x": "\xff"}\n')
    log = Log(tmp_path / "log.jsonl", Line)
    assert len(log.read()) == 1 and log.damaged == 1


def test_runs_are_found_and_named(tmp_path: Path) -> None:
    for name in ("b/one", "a/one", "a/two"):
        made_run(tmp_path / name, steps=2)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: 7")  # a run that has no log yet, not whole
    places = WatchedRuns([tmp_path, tmp_path / "a", tmp_path / "begun"])
    runs = places.all()
    assert [run.name for run in runs] == ["a/one", "a/two", "b/one", "begun"]
    assert runs[0].last_step == 2 and runs[0].of_bytes and runs[3].config == {} and runs[3].steps == []
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: 7}")
    runs[3].read()
    assert runs[3].last_step == 7
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: 9}")  # a run that goes on
    runs[3].read()
    assert runs[3].last_step == 9
    made_run(tmp_path / "c", steps=2)
    assert [run.name for run in places.all()] == ["a/one", "a/two", "b/one", "begun", "c"]
    assert places.all()[0] is runs[0]
    (tmp_path / "c" / "log.jsonl").unlink()  # as of a run that has just begun
    assert "c" in [run.name for run in places.all()]
    assert WatchedRuns([tmp_path / "a" / "one"]).all()[0].name == "one"
    made_run(tmp_path / "a" / "one" / "then", steps=2)
    assert [run.folder.name for run in WatchedRuns([tmp_path / "a" / "one"]).all()] == ["one", "then"]
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: null}")
    runs[3].read()
    assert runs[3].last_step == TrainSection().last_step
    (tmp_path / "begun" / "run.yaml").write_text("train: {max_minutes: 3}")
    runs[3].read()
    assert runs[3].last_step is None


def test_places_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"holds a log\.jsonl or a run\.yaml"):
        find_runs([tmp_path])


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)  # to read it would be to wait for ever


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def _yaml(text: str) -> Callable[[Path], object]:
    return lambda run: (run / "run.yaml").write_text(text)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {  # how a run is spoilt, and what is said of it
    "log is a folder": (lambda run: _folder(run / LOG), "log.jsonl cannot be read: it is a folder"),
    "log is a pipe": (lambda run: _pipe(run / LOG), "log.jsonl cannot be read: it is no file"),
    "log is a link to itself": (lambda run: _link(run / LOG, LOG), "log.jsonl cannot be read: Too many levels"),
    "looks are a pipe": (lambda run: _pipe(run / MEMORY), "memory.jsonl cannot be read: it is no file"),
    "samples are a folder": (lambda run: _folder(run / SAMPLES), "samples.jsonl cannot be read: it is a folder"),
    "settings are a pipe": (lambda run: _pipe(run / "run.yaml"), "run.yaml cannot be read: it is no file"),
    "settings are a folder": (lambda run: _folder(run / "run.yaml"), "run.yaml cannot be read: Is a directory"),
    "settings are no YAML": (_yaml("a: [1\nb: {"), "run.yaml is not YAML (line 2"),
    "settings are deep": (_yaml("a: " + "[" * 1500), "run.yaml is not YAML (it is"),
    "settings are a list": (_yaml("- 1"), "run.yaml has no keys and values"),
    "settings are no text": (lambda run: (run / "run.yaml").write_bytes(b"a: \xff"), "run.yaml is not UTF-8 text"),
    "settings are huge": (_yaml("a: " + "x" * 2**20), "run.yaml cannot be read: it has"),
    "log is not there": (lambda run: _link(run / LOG, "nowhere"), ""),
    "what it reads is a pipe": (lambda run: _pipe(run / "data.json"), ""),
    "model is a pipe": (lambda run: _pipe(run / "config.json"), ""),
    "model is deep": (lambda run: (run / "config.json").write_text("[" * 10**5), ""),
    "model is of nobody": (_yaml('model: {init_from: "~nobody/\\0"}'), ""),
    "steps are odd": (_yaml("train: {steps: true, max_minutes: []}"), ""),
    "steps are many": (_yaml(f"train: {{steps: 0x{'f' * 9999}}}"), ""),
    "a checkpoint has an odd name": (lambda run: (run / "checkpoint-²").mkdir(), ""),
    "a link goes round": (lambda run: (run / "round").symlink_to(run.parent), ""),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_run_says_why_and_spoils_no_other(tmp_path: Path, how: str) -> None:
    spoil, says = SPOILT[how]
    for name in ("good", "spoilt"):
        made_run(tmp_path / name, steps=4, every=2)
    spoil(tmp_path / "spoilt")
    good, spoilt = WatchedRuns([tmp_path]).all()
    for run in (good, spoilt):
        run.read()
        assert run.written > 0 and isinstance(run.of_bytes, bool) and f"{run.rule} {run.last_step} {run.alarms}"
    assert [says in line for line in spoilt.unreadable] == [True] * bool(says)
    assert len(good.steps) == 4 and len(good.probes) == 2 and good.last_step == 4 and not good.unreadable


def test_a_spoilt_run_that_is_mended_is_shown_again(tmp_path: Path) -> None:
    run = WatchedRun(made_run(tmp_path / "run", steps=4), "run")
    whole = (tmp_path / "run" / LOG).read_text()
    _folder(tmp_path / "run" / LOG)
    run.read()
    assert run.unreadable and not run.steps
    (tmp_path / "run" / LOG).rmdir()
    (tmp_path / "run" / LOG).write_text(whole)
    run.read()
    assert not run.unreadable and len(run.steps) == 4


def test_a_closed_folder_is_named_and_the_rest_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, scandir = tmp_path / "closed", os.scandir
    made_run(closed / "run", steps=1)
    made_run(tmp_path / "open", steps=1)

    def refusing(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr("os.scandir", refusing)
    places = WatchedRuns([tmp_path])
    assert [run.name for run in places.all()] == ["open"]
    assert places.missing == [f"{str(closed)!r} cannot be read: Permission denied"]
    with pytest.raises(ValueError, match=r"no run at .*closed' cannot be read: Permission denied"):
        find_runs([closed])


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    for name in (b"\xe9", b"\x1b[31m", "\u202e".encode(), b"line\nline"):
        made_run(tmp_path / os.fsdecode(name), steps=1)
    names = [run.name for run in WatchedRuns([tmp_path]).all()]
    assert sorted(names) == ["\\u202e", "\\udce9", "\\x1b[31m", "line\nline"]


def test_what_a_loss_is_in(tmp_path: Path) -> None:
    assert not has_byte_tokens(tmp_path)
    for noted, known in (('{"bytes": true}', True), ('{"bytes": false}', False), ("{}", False), ("[", False)):
        (tmp_path / "data.json").write_text(noted)
        assert has_byte_tokens(tmp_path) is known


def test_an_alarm_counts_once(tmp_path: Path) -> None:
    run = WatchedRuns([made_run(tmp_path / "run", steps=40, every=10, alarm=20)]).all()[0]
    (alarm,) = run.alarms
    assert (alarm["step"], alarm["until"]) == (20, None) and "lower train.gate_lr_scale" in alarm["text"]


def test_a_line_without_what_the_pages_need_is_damaged(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=4)
    append(folder / "log.jsonl", {"step": 5})
    append(folder / "memory.jsonl", {"step": 5})
    run = WatchedRuns([folder]).all()[0]
    assert len(run.steps) == 4 and run.probes == [] and run.damaged == 2


GOOD = {
    LOG: {"step": 9, "loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1, "elapsed": 4, "held_out_bits_per_byte": 2.0},
    MEMORY: {"step": 9, "seconds": 0.1, "effective_remembrance": None, "recent": 128, "alarms": [], "memories": []},
    SAMPLES: {"step": 9, "prompt": "a", "text": "b"},
}
HELD = {
    "name": "m",
    "memory_contribution": 0.5,
    "branch_ratio": None,
    "recall_error": [[0.1], [None]],
    "half_life": None,
    "norm": [float("inf")],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_usable_line_is_taken(tmp_path: Path, name: str) -> None:
    append(tmp_path / name, GOOD[name])
    log = Log(tmp_path / name, RECORDS[name])
    (record,) = log.read()
    assert [record] == read_log(tmp_path, name) and log.damaged == 0
    assert {**dict(record), **GOOD[name]} == dict(record)
    again = RECORDS[name].model_validate_json(record.line())
    assert again == record


def test_a_look_may_lack_figures(tmp_path: Path) -> None:
    append(tmp_path / MEMORY, GOOD[MEMORY] | {"memories": [HELD, HELD | {"eta": {"mean": [1.0], "std": [0.0]}}]})
    assert len(read_log(tmp_path, MEMORY)[0].memories) == 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *[(LOG, {"loss": value}) for value in (None, "y", [1.0], True, 10**400)],
        *[(LOG, {"loss": value}) for value in (math.nan, math.inf, 1e308)],
        *[(LOG, {"elapsed": None}), (LOG, {"held_out_bits_per_byte": "2"}), (LOG, {"learning_rate": "1e-3"})],
        *[(MEMORY, {"memories": value}) for value in (None, {}, [None], [{"name": "m"}])],
        *[
            (MEMORY, {"memories": [HELD | {"memory_contribution": "0.5"}]}),
            (MEMORY, {"memories": [HELD | {"norm": 1.0}]}),
        ],
        *[(MEMORY, {"memories": [HELD | {"eta": value}]}) for value in (0.5, {"mean": [1.0]}, {"mean": 1, "std": 1})],
        *[(MEMORY, {"seconds": None}), (MEMORY, {"alarms": None}), (MEMORY, {"alarms": [{"kind": "broken"}]})],
        *[(SAMPLES, {"text": 3}), (SAMPLES, {"prompt": None}), (SAMPLES, {"step": 10**400})],
    ],
)
def test_a_line_with_an_unusable_value_is_damaged(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    append(tmp_path / name, GOOD[name] | change)
    log = Log(tmp_path / name, RECORDS[name])
    assert log.read() == [] and log.damaged == 1


def test_a_place_that_is_gone_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    one, two = made_run(tmp_path / "one", steps=2), made_run(tmp_path / "two", steps=2)
    places = WatchedRuns([one, two])
    assert len(places.all()) == 2 and places.missing == []
    shutil.rmtree(one)
    assert [run.name for run in places.all()] == ["two"]
    assert places.missing == [f"no run at {str(one)!r}: the folder does not exist"]
    shutil.rmtree(two)
    assert places.all() == [] and len(places.missing) == 2


def test_looking_for_runs_takes_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.5, 9.0, 10.5, 10.5])  # a look of half a second, one that comes too early, another
    made_run(tmp_path / "one", steps=2)
    monkeypatch.setattr("atlas_memory.viz.watched_runs.monotonic", lambda: next(clock))
    places = WatchedRuns([tmp_path])
    places.all()
    made_run(tmp_path / "two", steps=2)
    assert [len(places.all(due=True)) for _ in range(2)] == [1, 2]


def test_the_rule_is_the_one_that_the_model_has(tmp_path: Path) -> None:
    def run(name: str, model: dict[str, Any], saved: str = "") -> WatchedRun:
        (tmp_path / name).mkdir()
        write_yaml(tmp_path / name / "run.yaml", {"model": model})
        if saved:
            (tmp_path / name / "config.json").write_text(saved)
        return WatchedRun(tmp_path / name, name)

    assert run("preset", {"preset": "nano"}).rule == AtlasConfig.preset("nano").rule
    assert run("paper", {"preset": "340m"}).rule == AtlasConfig.preset("340m").rule
    assert run("given", {"preset": "nano", "rule": "titans"}).rule == "titans"
    assert run("hope", {"preset": "nano", "block": "hope"}).rule == AtlasConfig.preset("nano", block="hope").rule
    assert run("first", {"preset": "tiny"}, '{"rule": "omeganet", "block": "mag"}').rule == "omeganet"
    after = run("after", {"preset": "tiny", "init_from": str(tmp_path / "first")})
    assert after.rule == "omeganet" and after.block == "mag"
    assert run("hub", {"preset": "tiny", "init_from": "someone/model"}, "{").rule == ""
    without = run("without", {"preset": "nano", "block": "attention"})
    assert not without.has_memory and after.has_memory


def test_what_is_known_without_torch_is_what_the_models_say() -> None:
    assert {name for name, mixer in BLOCKS.items() if not mixer.memory} == {*WITHOUT_MEMORY}
