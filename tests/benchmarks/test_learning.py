"""The studies of learning: their tasks, their command, and what no rule may fail at."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.cli import main
from benchmarks.learning import OF_TEXT, STUDIES, needle, reach, writes
from benchmarks.learning.recall import NOISE, Recall, Task
from benchmarks.learning.rewriting import Rewritten
from benchmarks.results import COLUMNS


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_well_formed(study) -> None:
    assert study.shows.endswith(".") and "\n" not in study.shows
    assert set(study.columns) <= set(COLUMNS)


def test_the_recall_task_can_be_answered_from_its_pairs_alone() -> None:
    task = Task(pairs=5, symbols=8, room=20)
    keys, values, answers = task.batch(3, 40, torch.Generator().manual_seed(0))
    for row in range(3):
        shown = {int(k): int(v) for k, v in zip(keys[row, :20], values[row, :20], strict=True) if k < 8}
        assert len(shown) == 5 and (keys[row, 20:35] >= 8).all()
        assert [shown[int(k)] for k in keys[row, 35:]] == answers[row].tolist()
        assert (values[row, 35:] == 8 + 16).all()  # the question does not tell
    assert Recall("titans", task, 4)(keys, values).shape == (3, 5, 8)


def test_a_rewritten_key_has_the_value_that_came_last() -> None:
    task = Rewritten(pairs=5, symbols=8, room=20)
    keys, values, answers = task.batch(3, 40, torch.Generator().manual_seed(0))
    for row in range(3):
        shown = [(int(k), int(v)) for k, v in zip(keys[row], values[row], strict=True) if k < 8 and v < 8]
        assert len(shown) == 15 and sorted(k for k, _ in shown) == sorted(3 * [*dict(shown)])
        assert [dict(shown)[int(k)] for k in keys[row, 35:]] == answers[row].tolist()  # dict: the last one counts


def test_needles_can_be_answered_from_the_first_segment_of_their_document() -> None:
    """By a memory that goes through the segments as they come, of any length of documents."""
    task = Task(pairs=8, symbols=16, room=120)
    stream = needle.Stream(task, torch.Generator().manual_seed(0))
    known: list[dict[int, int]] = [{} for _ in range(needle.ROWS)]
    asked_late = 0
    for _ in range(12):
        keys, values, answers, first, asks = stream.draw(6)
        for row in range(needle.ROWS):
            if first[row]:
                known[row] = {}
            for key, value in zip(keys[row].tolist(), values[row].tolist(), strict=True):
                if key < task.symbols and value < task.symbols:
                    assert first[row]  # no pairs later
                    known[row][key] = value
            assert len(known[row]) == task.pairs
            questions = values[row, -task.pairs :] == task.symbols + NOISE
            assert questions.all() if asks[row] else not questions.any()
            if asks[row]:
                assert [known[row][key] for key in keys[row, -task.pairs :].tolist()] == answers[row].tolist()
                asked_late += not first[row]
    assert asked_late > 50


@pytest.mark.extended
def test_a_quick_run(capsys, tmp_path: Path) -> None:
    """Of two rules, where they are quick."""
    alone = {"orders": "titans: crops"}
    alone |= dict.fromkeys(("recipe", "alarms"), "titans")
    (tmp_path / "text.txt").write_text("so it goes. " * 5000)
    for name in STUDIES:
        of_text = ["--text", str(tmp_path / "text.txt")] if STUDIES[name] in OF_TEXT else []
        arguments = [
            "learn",
            name,
            *of_text,
            "--quick",
            "--cases",
            alone.get(name, "titans,gated-deltanet"),
            "--widths",
            "4",
            "--workers",
            "1",
        ]
        assert main([*arguments, "--out", str(tmp_path)]) == 0
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        asked = [case for case in STUDIES[name].cases if case in alone.get(name, "titans,gated-deltanet").split(",")]
        assert [row["candidate"] for row in rows] == asked
        assert all(len(row["seeds"]) == 1 for row in rows)
    assert "| titans | 4 |" in capsys.readouterr().out


def test_rows_of_earlier_runs_stay_and_are_in_order(capsys, tmp_path: Path) -> None:
    run = ["learn", "writes", "--quick", "--widths", "4", "--workers", "1", "--out", str(tmp_path)]
    path = tmp_path / "writes.json"
    for case in ("titans", "atlas", "titans"):
        assert main([*run, "--cases", case]) == 0
    assert [row["candidate"] for row in json.loads(path.read_text())["rows"]] == ["atlas", "titans"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": " --steps 3"}))
    assert main([*run, "--cases", "titans"]) == 1
    assert "rows made with --steps 3, these are with none: give another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["learn", "recal"], "unknown study 'recal'; there are writes, reach, recall, needle, rewriting"),
        (["learn", "writes", "--steps", "3"], "study writes takes no --steps: leave it out"),
        (["learn", "recipe", "--cases", "titans", "--text", "no-such-file"], "'no-such-file' does not exist"),
        (["learn", "writes", "--cases", "titan"], "study writes has no case 'titan'"),
        (["learn", "writes", "--widths", "a"], "widths must be whole numbers with commas between, got 'a'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path: Path) -> None:
    assert main([*arguments, "--quick", "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["titans", "omeganet", "atlas", "hope", "deltanet", "gated-deltanet"])
def test_a_write_is_felt_and_eta_decides_how_much(name) -> None:
    found = writes.measure(name, 16, seed=0, quick=True)
    assert found["own"] < 0.5 and found["small eta"] < 0.05


@pytest.mark.extended
@pytest.mark.parametrize("name", writes.WRITES.cases)
def test_every_rule_writes_and_teaches(name) -> None:
    found = writes.measure(name, 16, seed=0, quick=True) | reach.measure(name, 16, seed=0, quick=True)
    assert found["own"] < 0.95 and found["small eta"] < 0.05 and found["reach"] > 0.05


def test_what_a_memory_saves_on_what_it_has_read(six_steps, monkeypatch) -> None:
    """Each distance once against an empty memory and once against another book's."""
    from atlas_memory.train.run_model import load_run
    from benchmarks.learning import reread

    for name, value in {"DISTANCES": (0, 64), "STOPS": 3, "AHEAD": 32, "PASSAGE": 16}.items():
        monkeypatch.setattr(reread, name, value)
    run, book = load_run(six_steps), " ".join(map(str, range(99)))
    rows = reread.measure(run, book, "another book")["rows"]
    assert [row["distance"] for row in rows] == [0, 64, None] * 2
    assert all(row["error"] > 0 for row in rows) and reread.chart(rows)["layer"]
    with pytest.raises(ValueError, match="are needed"):
        reread.measure(run, "short", "another book")
