"""The suites for GPUs, as far as they go without one: every item runs on tiny shapes in Triton's interpreter."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

from benchmarks import cli, gpu
from benchmarks.suites import BENCHMARKS, ON_GPU

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=given, cwd=ROOT)


@pytest.mark.extended
def test_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "new")])
    runpy.run_path(gpu.__file__, run_name="__main__")
    said, kernels = capsys.readouterr().out, 0
    for benchmark in ON_GPU:
        result = json.loads((tmp_path / "new" / f"{benchmark.name}.json").read_text())
        rows = {row["candidate"]: row for row in result["rows"]}
        assert len(rows) == len(result["rows"]) and result["quick"] and result["device"] == "cpu"
        for candidate in benchmark.candidates:
            row = rows.pop(candidate.name)
            assert f"| {candidate.name} |" in said
            if candidate.compile:  # takes long, and on a CPU a C++ compiler
                assert row["check"] == "not timed: not compiled: --compile-limit 0"
            elif candidate.oracle is None:
                assert "median" in row or "fla is not installed" in row["check"]
            else:
                assert row["median"] > 0 and row["check"].startswith("off by "), row
            if candidate.kernel:
                assert float(row["check"].split()[2].rstrip(",")) < 1e-4 and "allowed a kernel" in row["check"]
                kernels += 1
        assert not rows
    assert kernels == 4


@pytest.mark.extended
def test_a_dry_run_chooses_the_interpreter(tmp_path):
    done = python("benchmarks.gpu", "gpu-newton-schulz", "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-newton-schulz.json"]


def test_every_candidate_is_measured_once_at_every_shape():
    found = [(item.benchmark.name, item.shape, c.name) for item in gpu.ORDER for c in item.candidates()]
    expected = {(b.name, i, c.name) for b in ON_GPU for i in range(len(b.shapes)) for c in b.candidates}
    assert len(found) == len(set(found)) and set(found) == expected


def test_nothing_is_begun_when_the_minutes_are_over(tmp_path, capsys):
    gpu.main(tmp_path, minutes=0.0, quick=True)
    for benchmark in ON_GPU:
        rows = json.loads((tmp_path / f"{benchmark.name}.json").read_text())["rows"]
        assert {row["candidate"] for row in rows} == {c.name for c in benchmark.candidates}
        assert {row["check"] for row in rows} == {"not timed: 0 minutes were over"}
    assert "0 minutes were over" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(gpu.__file__, run_name="__main__")
    assert ended.value.code == 2 and "--dry-run" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_what_to_do_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for benchmark in ON_GPU:
        assert cli.main(["run", "oracle", benchmark.name]) == 1  # before anything is measured
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert f"no CUDA device, which is needed by {benchmark.name}" in err and "--quick, or --dry-run" in err


def test_without_names_the_command_runs_what_the_machine_can(monkeypatch):
    for here in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda here=here: here)
        names = [benchmark.name for benchmark in cli.measurable()]
        assert names == [name for name in BENCHMARKS if here or not name.startswith("gpu-")]


@pytest.mark.extended
def test_the_command_tries_a_suite_in_the_interpreter(tmp_path):
    done = python("benchmarks", "run", "gpu-newton-schulz", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu-newton-schulz.json").read_text())["rows"]
    assert len(rows) == 4 and all(row["median"] > 0 and row["ratio"] > 0 for row in rows)


def test_the_written_models_count_products_and_bytes():
    """Of a chunk of 64 tokens of one head of 64: the MLP has 256 hidden units."""
    shape = BENCHMARKS["gpu-chunk"].shapes[0]
    candidates = {c.name: c for c in BENCHMARKS["gpu-chunk"].candidates}
    chunks = shape.batch * shape.heads * shape.time // 64
    unit = 64**3  # 64 x 64 x 64; N H d is four of them
    for name, forward, backward, memory in (("MLP", 40, 112, 2 * 256 * 64), ("linear", 4, 10, 64 * 64)):
        candidate = candidates[f"{name}, eager, forward"]
        flops, moved = candidate.cost(shape)
        assert flops == 2 * forward * unit * chunks and moved == 4 * (4 * 64 * 64 + 3 * memory) * chunks
        flops, moved = candidate.backward_cost(shape)
        assert flops == 2 * backward * unit * chunks and moved == 4 * (8 * 64 * 64 + 7 * memory) * chunks
