"""The model that comes with the package."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atlas_memory.cli import main
from atlas_memory.train.run_model import DEMO, load_run

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_it_is_small_and_whole() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 8 * 2**20
    run, model = load_run("demo"), AutoModelForCausalLM.from_pretrained(DEMO)
    assert run.model.dtype == model.dtype == torch.float32  # its file has 16 bits
    ids = AutoTokenizer.from_pretrained(DEMO)("It was", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(run.model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, capsys) -> None:
    (tmp_path / "demo").mkdir()
    assert main(["generate", "demo"]) == 1 and "no run at 'demo'" in capsys.readouterr().err


def test_it_writes_and_reads(tmp_path: Path, capsys) -> None:
    assert main(["generate", "demo", "--prompt", "It was", "--max-new-tokens", "8", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("It was")
    (tmp_path / "book.txt").write_text("The pass key is 12345. Remember it. 12345 is the pass key.\n")
    assert main(["read", "demo", "book.txt", "--out", "book.memory"]) == 0
    assert main(["memory", "check", "book.memory", "--model", "demo"]) == 0


@pytest.mark.extended
def test_its_figures(capsys) -> None:
    """What its card says, roughly."""
    assert main(["evaluate", "demo", "--streams", "2", "--writes", "on"]) == 0
    bits = float(re.search(r"all\D+([\d.]+)", capsys.readouterr().out)[1])
    assert 1.0 < bits < 2.0
    assert main(["evaluate", "demo", "--suite", "passkey", "--lengths", "1024", "--count", "20"]) == 0
    score = float(re.search(r"match │ ([\d.]+)", capsys.readouterr().out)[1])
    assert score > 0.5
