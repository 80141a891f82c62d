"""The file `mine.py` of CONTRIBUTING.md: a block of one's own with the command `atlas`, and under the contract."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from atlas_memory.layers.blocks import BLOCKS

from .test_docs import ROOT, blocks
from .train.small import overrides


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    parts = blocks(ROOT / "CONTRIBUTING.md")
    own = [part for part in parts if 'BLOCKS["mean"] = ' in part] + [
        part for part in parts if "sys.exit(main())" in part
    ]
    assert len(own) == 2
    (tmp_path / "mine.py").write_text("\n".join(own), encoding="utf-8")
    return tmp_path / "mine.py"


def run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_knows_what_a_file_registers(mine: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def command(*arguments: object) -> str:
        """What the file says, run in this process; it leaves nothing registered."""
        assert "mean" not in BLOCKS
        monkeypatch.setattr(sys, "argv", [*map(str, (mine, *arguments))])
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(mine), run_name="__main__")
        finally:
            BLOCKS.pop("mean", None)
        assert ended.value.code == 0
        return capsys.readouterr().out

    small = [option for option in overrides(tmp_path) if not option.startswith("model.rule")]
    assert "step 2" in command("train", *small, "train.steps=2", "model.block=mean", "data.order=stream")
    assert command("generate", tmp_path / "run", "--prompt", "doc", "--max-new-tokens", "4", "--greedy")


def test_the_contract_of_a_block_from_outside(mine: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(mine.parent), prepend=":")
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "mine",
        "-p",
        "no:cacheprovider",
        "tests/layers/test_mixers.py",
        "-k",
        "mean",
    ]
    monkeypatch.chdir(ROOT)
    assert run(*command).partition("[")[0].count(".") == 9
