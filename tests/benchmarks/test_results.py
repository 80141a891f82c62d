"""JSON, tables, and the command with its mistakes."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import peak, results
from benchmarks.cli import main
from benchmarks.profile import kind
from benchmarks.registry import Candidate, Operation, Shape
from benchmarks.run import Settings
from benchmarks.suites import BENCHMARKS

PAGE = "# Page\n\nBefore.\n\n<!-- performance -->\nold\n<!-- end performance -->\n\nAfter.\n"


def result(**changes):
    row = {
        "candidate": "a | b",
        "median": 0.0123,
        "p20": 0.01,
        "p80": 0.5,
        "ratio": 2.5,
        "tokens": 10,
        "check": "off by 0",
    }
    row |= {"rates": {"sgemm": 5e10, "batched": 4e10, "copy": 1e10}, "cpu_share": 0.98, "rounds": 7}
    bare = {"candidate": "c", "check": "not timed: missing", "tokens": 10}
    at = {"cpu": "A CPU", "cores": 2, "flags": ["avx2"]}
    return {
        "benchmark": "oracle",
        "command": "python -m benchmarks run oracle",
        "quick": False,
        "threads": 1,
        "date": "2026-01-01 00:00 UTC",
        "revision": "abc",
        "machine": at,
        "versions": {"torch": "2.13"},
        "load_before": 0.1,
        "load_after": 0.2,
        "columns": ["candidate", "ms", "ms, 20 to 80 %", "times baseline", "µs a token", "peak MB", "check"],
        "rows": [row, bare],
        "remarks": ["A remark."],
    } | changes


def cells(markdown: str) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in markdown.splitlines() if line.startswith("| ")]


def test_table_has_what_the_file_has(tmp_path: Path) -> None:
    saved = results.load(results.save(result(), tmp_path))
    assert saved == result()
    head, _, row, bare = cells(results.table(saved))
    assert head == [
        "candidate",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "µs a token",
        "check",
    ]  # no peak was measured
    assert row == ["a / b", "12.3", "10 to 500", "2.5", "1,230", "off by 0"]
    assert bare == ["c", "–", "–", "–", "–", "not timed: missing"]
    text = results.table(saved)
    for said in (saved["command"], "A CPU, 2 cores (avx2), 1 thread", "2026-01-01", "abc", "load 0.1", "- A remark."):
        assert said in text
    assert "50 GFLOP/s" in text and "10 GB/s" in text and "rounds: 7" in text and "98 %" in text


def test_page_is_rewritten_between_its_marks_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    results.save(result(benchmark="mixers"), tmp_path)
    assert results.rewrite(page, tmp_path) == ["performance"]
    once = page.read_text()
    between = once.partition("<!-- performance -->")[2].partition("<!-- end performance -->")[0]
    assert cells(between)[2] == ["a / b", "12.3", "2.5"] and "`python -m benchmarks run oracle`; A CPU" in between
    assert once.startswith("# Page\n\nBefore.\n\n") and once.endswith("\n\nAfter.\n") and "old" not in once
    results.rewrite(page, tmp_path)
    assert page.read_text() == once


@pytest.mark.parametrize("name", ["index.md", "claims.md", "performance.md"])
def test_tables_in_the_docs_are_those_of_their_files(tmp_path: Path, name: str) -> None:
    page, copy = results.PAGES / name, tmp_path / name
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    assert results.rewrite(copy, results.FOLDER)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_no_quick_result_is_kept() -> None:
    assert not any(results.load(path)["quick"] for path in results.FOLDER.glob("*.json"))


def test_quick_results_stay_out_of_the_docs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quick results do not go into docs/results/"):
        results.save(result(quick=True), results.FOLDER)
    (tmp_path / "page.md").write_text(PAGE)
    results.save(result(benchmark="mixers", quick=True), tmp_path)
    with pytest.raises(ValueError, match="was made with --quick"):
        results.rewrite(tmp_path / "page.md", tmp_path)


def refused(capsys, *arguments: object) -> str:
    """The one line of a command that fails."""
    assert main([str(argument) for argument in arguments]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("benchmarks: ") and err.count("\n") == 1
    return err


def test_mistakes_are_one_line(capsys, tmp_path: Path) -> None:
    assert "unknown benchmark 'mixer'; there are mixers, muon" in refused(capsys, "run", "mixer")
    file = tmp_path / "file"
    file.write_text("")
    assert "give another --out" in refused(capsys, "run", "oracle", "--quick", "--out", file / "folder")
    assert "repeats must be at least 1" in refused(capsys, "run", "oracle", "--repeats", "0")
    assert "No such option" in refused(capsys, "run", "--what")
    (tmp_path / "page.md").write_text("# No marks\n")
    results.save(result(benchmark="mixers"), tmp_path)
    command = "table", "--from", tmp_path, "--page"
    assert "has no marks <!-- NAME -->" in refused(capsys, *command, tmp_path / "page.md")
    assert "no-page.md" in refused(capsys, *command, tmp_path / "no-page.md")
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "mixers.json").write_text("{}")
    assert "run the benchmark again" in refused(capsys, *command, tmp_path / "page.md")


def test_show(capsys, tmp_path: Path) -> None:
    assert main(["show", str(results.save(result(), tmp_path))]) == 0
    assert results.table(result()) in capsys.readouterr().out


def test_list(capsys) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(f"{benchmark.name}: {benchmark.shows}" in out for benchmark in BENCHMARKS.values())


@pytest.mark.extended
def test_a_quick_run(capsys, tmp_path: Path) -> None:
    assert main(["run", "oracle", "--quick", "--no-memory", "--out", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    found = json.loads((tmp_path / "oracle.json").read_text())
    assert found["quick"] and "--quick" in found["command"]
    assert [row["candidate"] for row in found["rows"]] == [c.name for c in BENCHMARKS["oracle"].candidates]
    assert found["rows"][1]["rounds"] == 1 and found["rows"][1]["ratio"] > 0
    assert {"cpu", "cores", "flags"} <= set(found["machine"]) and found["versions"]["torch"] and found["revision"]
    assert results.table(found) in out


@pytest.mark.extended
@pytest.mark.skipif(not peak.STATUS.exists(), reason="peak memory is measured on Linux")
def test_peak_memory_in_a_process_of_its_own() -> None:
    grown = peak.growth_apart("length", "softmax attention", 1, quick=True, limit=120.0)
    assert grown is not None and 0 < grown < 2**28


@pytest.mark.skipif(not peak.STATUS.exists(), reason="peak memory is measured on Linux")
def test_peak_memory_is_what_a_call_holds_at_once() -> None:
    def holds(megabytes: int) -> Candidate:
        def twice(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):  # one after the other: the first is given back
                torch.ones(megabytes * 2**18).sum()
            return x

        return Candidate("holds", lambda shape, dtype, wrap: Operation(twice, torch.zeros(1)), backward=False)

    shape = Shape(batch=1, heads=1, dim=1, time=1)
    peak.growth(holds(1), shape)  # code that is used for the first time is memory, too
    # PyTorch's allocator may put the second beside the first, which it gives back a little later, and pages of code
    # come and go; both only add.
    grown = min(peak.growth(holds(64), shape) for _ in range(5))
    assert 60 * 2**20 < grown < 80 * 2**20


def test_settings() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        Settings(threads=0)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("aten::baddbmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "matrix products"),
        ("aten::linalg_solve_triangular", "matrix products"),
        ("aten::cumprod", "reductions"),
        ("aten::native_layer_norm_backward", "reductions"),
        ("aten::_to_copy", "copies"),
        ("aten::zero_", "copies"),
        ("aten::as_strided", "bookkeeping"),
        ("aten::clamp_max", "element-wise"),
        ("aoti_torch_cpu_baddbmm_out", "matrix products"),
        ("aten::addcmul_", "element-wise"),
        ("autograd::engine::evaluate_function: MulBackward0", "overhead"),
        ("MulBackward0", "overhead"),
    ],
)
def test_kinds_of_operation(name: str, found: str) -> None:
    assert kind(name) == found
