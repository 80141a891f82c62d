"""A disk that is full: one line says so, what was written before is kept, and the run goes on from it."""

import resource

import torch
from safetensors.torch import load_file

from atlas_memory.cli import main
from tests import fresh
from tests.train.small import overrides


def limited(size: int, *arguments: str) -> int:
    """The command where no file can be larger than so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return main(arguments)


def test_a_checkpoint_that_does_not_fit(tmp_path) -> None:
    """A limit on the size of a file is, to who writes it, a disk that is full."""
    more = ("train.evaluate_every=0", "data.order=packed")
    found = fresh.run(limited, 60000, "train", *overrides(tmp_path, *more))
    said = found.err.strip().splitlines()
    folder = tmp_path / "run"
    assert found.code == 1 and "Traceback" not in found.err
    assert said[-1].startswith(f"atlas: {folder / 'checkpoint-3'} could not be written: ")
    assert said[-1].endswith(f"--resume output_dir={folder}")
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == []

    assert main(["train", "--resume", f"output_dir={folder}"]) == 0
    assert main(["train", *overrides(tmp_path, *more, f"output_dir={tmp_path / 'whole'}")]) == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_a_run_that_cannot_begin(tmp_path) -> None:
    """With room the same command begins the run."""
    more = ("train.evaluate_every=0", "train.steps=1")
    found = fresh.run(limited, 100, "train", *overrides(tmp_path, *more))
    said = found.err.strip().splitlines()[-1]
    assert found.code == 2 and "Traceback" not in found.err
    assert said == f"atlas: output_dir={str(tmp_path / 'run')!r} cannot be written to (File too large): choose another"
    assert main(["train", *overrides(tmp_path, *more)]) == 0
    assert not list((tmp_path / "run").glob("*.partial"))


def test_an_older_checkpoint_is_kept(tmp_path, capsys, monkeypatch) -> None:
    write = torch.save

    def full(value, path, *args, **kwargs) -> None:
        if "checkpoint-6" in str(path):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        write(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    assert main(["train", *overrides(tmp_path, "train.evaluate_every=0", "train.keep_checkpoints=1")]) == 1
    assert "checkpoint-6 could not be written: [enforce fail" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    monkeypatch.undo()
    assert main(["train", "--resume", f"output_dir={tmp_path / 'run'}"]) == 0


def test_a_report_that_does_not_fit_leaves_the_one_before(tmp_path, capsys, monkeypatch) -> None:
    assert main(["train", *overrides(tmp_path, "train.evaluate_every=0")]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    report = tmp_path / "run" / "report"
    before = {path.name: path.read_bytes() for path in report.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atlas_memory.viz.report.token_page", full)
    assert main(["report", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"atlas: {str(report)!r} could not be written: No space left on device; the one before is as it was"
    assert {path.name: path.read_bytes() for path in report.iterdir()} == before
    assert not list((tmp_path / "run").glob(".report*"))
