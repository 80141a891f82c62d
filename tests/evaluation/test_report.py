"""The report."""

import json
import re
from pathlib import Path

import pytest

from atlas_memory.report.comparison import write_comparison
from atlas_memory.report.report import write_report
from atlas_memory.training import train
from tests.training.small import settings


def test_report(tmp_path: Path) -> None:
    train(settings(tmp_path, "train.watch_every=2"))
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    folder = tmp_path / "run" / "report"
    for name in ("loss.png", "training.png", "position.png", "gates.png", "contents.png", "geometry.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert name in (folder / "report.html").read_text()
    reading = (folder / "reading.html").read_text()
    assert reading.count("<i") - reading.count("<input") == 223 and "by what writing saved" in reading
    assert re.sub("<.*?>", "", reading[reading.index("<pre") : reading.index("</pre>")]).startswith("document ")
    saved = json.loads((folder / "report.json").read_text())
    assert saved["memory_on"]["bits_per_byte"] == numbers["memory_on"]["bits_per_byte"]
    assert saved["memory_on"]["by_position"][-1]["to"] == 223  # the whole held-out document
    assert saved["steps"] == 6
    assert saved["prompt"].startswith("document ") and saved["sample"]
    assert saved["rule"] == "deltanet" and saved["date"] and saved["machine"] and str(tmp_path) in saved["text"]
    assert [memory["name"] for memory in saved["gates"]["memories"]] == [
        "model.layers.0.mixer",
        "model.layers.1.mixer",
    ]
    assert saved["margin"]["bits_per_byte"] == pytest.approx(
        saved["writes_off"]["bits_per_byte"] - saved["memory_on"]["bits_per_byte"]
    )


def test_a_report_of_a_model_without_memory(tmp_path: Path) -> None:
    train(settings(tmp_path, "model.block=swa", "model.rule=atlas", "model.attention_window=4"))
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    assert numbers["gates"]["memories"] == []
    assert numbers["margin"] is None and numbers["writes_off"] is None and numbers["rule"] is None
    assert not (tmp_path / "run" / "report" / "gates.png").exists()
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "writes" not in page and "Gates" not in page
    assert "what writing saved" not in (tmp_path / "run" / "report" / "reading.html").read_text()


def test_a_report_on_another_text(tmp_path: Path) -> None:
    train(settings(tmp_path))
    (tmp_path / "run" / "run.yaml").unlink()
    (tmp_path / "poem.txt").write_text("the quick brown fox jumps over the lazy dog. " * 10)
    numbers = write_report(tmp_path / "run", tmp_path / "poem.txt", streams=2, sample_tokens=5)
    assert numbers["prompt"].startswith("the quick brown fox") and "poem.txt" in numbers["text"]
    assert (tmp_path / "run" / "report-poem" / "report.html").is_file()
    assert not (tmp_path / "run" / "report").exists()


def test_a_report_needs_a_run(tmp_path: Path) -> None:
    train(settings(tmp_path))
    (tmp_path / "run" / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"has no run.yaml"):
        write_report(tmp_path / "run")


def test_runs_are_compared(tmp_path: Path) -> None:
    train(settings(tmp_path, f"output_dir={tmp_path}/with"))
    train(
        settings(
            tmp_path,
            f"output_dir={tmp_path}/without",
            "model.block=swa",
            "model.rule=atlas",
            "model.attention_window=4",
        )
    )
    page = write_comparison([tmp_path / "with", tmp_path / "without"], streams=2, sample_tokens=5)
    assert page == tmp_path / "comparison" / "comparison.html"
    text = page.read_text()
    for link in re.findall('(?:href|src)="(.*?)"', text):
        assert (page.parent / link).is_file(), link
    rows = [[re.sub("<.*?>", "", cell) for cell in row.split("</td>")] for row in text.split("<tr>")]
    assert ["with", "deltanet"] in [[row[0], row[2]] for row in rows if len(row) > 3]
    assert any(row[0] == "model.block" and row[2] == "swa" for row in rows)
    with pytest.raises(ValueError, match="named twice"):
        write_comparison([tmp_path / "with", tmp_path / "without" / ".." / "with"])
