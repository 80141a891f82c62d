"""Run folders and settings that somebody has damaged, on purpose or not: one line, or a run that is right."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_memory.cli import main
from atlas_memory.training.checkpoints import newest_checkpoint
from atlas_memory.training.logs import LOG, Log
from tests.training.small import overrides

QUIET = ("train.evaluate_every=0", "train.watch_every=0")


def resumed(run: Path, *more: str) -> int:
    return main(["train", "--resume", *overrides(run.parent, *QUIET, *more)])


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
    log = Log(finished / name)
    assert log.read() == [] and why in log.unreadable
    assert resumed(finished, "train.steps=7") == 1
    assert f"{name}' cannot be read ({why}" in said()
    if name == LOG:
        assert main(["report", str(finished)]) == 1
        assert f"{name}' cannot be read ({why}" in said()


def test_folders_that_are_no_checkpoints(finished: Path) -> None:
    for name in ("checkpoint-²", "checkpoint-٣", "checkpoint-", "checkpoint-9x", f"checkpoint-{'9' * 5000}"[:200]):
        (finished / name).mkdir()
    (finished / "checkpoint-9").touch()
    assert newest_checkpoint(finished) == finished / "checkpoint-6"
    assert resumed(finished, "train.steps=7") == 0
