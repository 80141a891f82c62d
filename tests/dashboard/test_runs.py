"""The logs of runs, as they grow."""

import json
from pathlib import Path

import pytest

from atlas_memory.dashboard.runs import Runs, find_runs
from atlas_memory.training.logs import Log, cut_logs
from atlas_memory.training.settings import in_bytes
from benchmarks.dashboard import append, made_run


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    assert log.read() == []
    append(path, {"step": 1, "loss": 3.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # still being written
    assert [line["step"] for line in log.read()] == [1] and log.damaged == 0
    with path.open("a") as file:
        file.write('ss": 2.0}\n')
    assert [line["loss"] for line in log.read()] == [3.0, 2.0]
    append(path, {"step": 1, "loss": 4.0})  # done again
    assert [line["loss"] for line in log.read()] == [4.0, 2.0]
    cut_logs(tmp_path, 1)  # replaces the file
    assert [line["loss"] for line in log.read()] == [4.0]
    path.unlink()
    assert log.read() == []


@pytest.mark.parametrize(
    "damage", ["{", "[]", "3", '"x"', '{"loss": 1}', '{"step": null}', '{"step": "3"}', '{"step": 1.5}', "\x00\x01"]
)
def test_a_damaged_line_is_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps({'step': 1})}\n{damage}\n\n{json.dumps({'step': 2})}\n")
    log = Log(path)
    assert [line["step"] for line in log.read()] == [1, 2] and log.damaged == 1
    log.read()
    assert log.damaged == 1


def test_bytes_that_are_no_text_are_damage(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "x": "\xff"}\n')
    log = Log(tmp_path / "log.jsonl")
    assert len(log.read()) == 1 and log.damaged == 1


def test_runs_are_found_and_named(tmp_path: Path) -> None:
    for name in ("b/one", "a/one", "a/two"):
        made_run(tmp_path / name, steps=2)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: 7")  # a run that has no log yet, not whole
    places = Runs([tmp_path, tmp_path / "a", tmp_path / "begun"])
    runs = places.all()
    assert [run.name for run in runs] == ["a/one", "a/two", "b/one", "begun"]
    assert runs[0].goal == 2 and runs[0].bytes and runs[3].config == {} and runs[3].steps == []
    (tmp_path / "begun" / "run.yaml").write_text("train: {steps: 7}")
    runs[3].read()
    assert runs[3].goal == 7
    made_run(tmp_path / "c", steps=2)
    assert [run.name for run in places.all()] == ["a/one", "a/two", "b/one", "c", "begun"]
    assert places.all()[0] is runs[0]
    assert Runs([tmp_path / "a" / "one"]).all()[0].name == "one"


def test_places_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"holds a log\.jsonl"):
        find_runs([tmp_path])


def test_what_a_loss_is_in(tmp_path: Path) -> None:
    assert in_bytes({}) and in_bytes({"data.tokenizer": "bytes", "data.path": str(tmp_path)})
    assert not in_bytes({"data.tokenizer": "tokenizer"})
    (tmp_path / "prepared.json").write_text("{}")  # which has a tokenizer of its own
    assert not in_bytes({"data.tokenizer": "bytes", "data.path": str(tmp_path)})


def test_an_alarm_counts_once(tmp_path: Path) -> None:
    run = Runs([made_run(tmp_path / "run", steps=40, every=10, alarm=20)]).all()[0]
    assert run.alarms == [(20, "layer 0 writes nothing: lower train.gate_rate")]


def test_a_line_without_what_the_pages_need_is_damaged(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=4)
    append(folder / "log.jsonl", {"step": 5})
    append(folder / "memory.jsonl", {"step": 5})
    run = Runs([folder]).all()[0]
    assert len(run.steps) == 4 and run.looks == [] and run.damaged == 2
