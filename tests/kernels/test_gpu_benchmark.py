"""benchmarks/gpu.py, as far as it goes without a GPU: every item runs on tiny shapes in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton, which is not installed")

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "new")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    items = json.loads((tmp_path / "new" / "gpu.json").read_text())["items"]
    failed = {item["item"]: item["failed"] for item in items if "failed" in item}
    assert all("fla is not installed" in why for why in failed.values()), failed
    assert not any("skipped" in item for item in items)
    kernels = [item for item in items if " kernel" in item["item"]]
    assert len(kernels) == 4 and all(item["error"] < 1e-4 for item in kernels)
    assert all(item["item"] in done.stdout for item in items)


def test_without_a_gpu_it_says_what_to_do(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 2 and "--dry-run" in done.stderr
