"""The report."""

import html
import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from rich.console import Console

from atlas_memory.console import progress_lines
from atlas_memory.train import load_run, train
from atlas_memory.train.training_data import evaluation_text
from atlas_memory.viz.labels import amount, duration, headline, legible, memory_label
from atlas_memory.viz.report import write_comparison, write_report
from tests.train.small import copied, settings


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose memories were looked at three times, beside its text."""
    folder = tmp_path_factory.mktemp("watched")
    train(settings(folder, "train.probe_every=2"))
    return folder / "run"


def undrawn(path: Path, *rows: Any, width: int = 0) -> None:
    json.dumps(rows, allow_nan=False)
    path.touch()


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are specified and not drawn, which is what takes the time."""
    monkeypatch.setattr("atlas_memory.viz.charts.save", undrawn)


def test_report(watched: Path, tmp_path: Path) -> None:
    copied(watched, tmp_path)
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    folder = tmp_path / "run" / "report"
    for name in ("loss.png", "training.png", "position.png", "gates.png", "contents.png", "geometry.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert name in (folder / "report.html").read_text()
    reading = (folder / "reading.html").read_text()
    assert reading.count("<i") - reading.count("<input") == 223 and "saved by writing" in reading
    assert re.sub("<.*?>", "", reading[reading.index("<pre") : reading.index("</pre>")]).startswith("document ")
    saved = json.loads((folder / "report.json").read_text())
    assert saved["memory_on"]["bits_per_byte"] == numbers["memory_on"]["bits_per_byte"]
    assert saved["memory_on"]["by_position"][-1]["to"] == 223  # the whole held-out document
    assert saved["steps"] == 6
    assert saved["prompt"].startswith("document ") and saved["sample"]
    assert saved["rule"] == "deltanet" and saved["date"] and saved["machine"] and str(tmp_path) in saved["text"]
    assert [memory["name"] for memory in saved["memories"]] == [
        "model.layers.0.mixer",
        "model.layers.1.mixer",
    ]
    assert saved["margin"]["bits_per_byte"] == pytest.approx(
        saved["writes_off"]["bits_per_byte"] - saved["memory_on"]["bits_per_byte"]
    )


@pytest.mark.usefixtures("words_only")
def test_a_report_of_a_model_without_memory(tmp_path: Path) -> None:
    train(settings(tmp_path, "model.block=swa", "model.rule=null", "model.attention_window=4"))
    numbers = write_report(tmp_path / "run", streams=2, sample_tokens=5)
    assert numbers["memories"] == []
    assert numbers["margin"] is None and numbers["writes_off"] is None and numbers["rule"] is None
    assert not (tmp_path / "run" / "report" / "gates.png").exists()
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "writes" not in page and "Gates" not in page
    assert "saved by writing" not in (tmp_path / "run" / "report" / "reading.html").read_text()


@pytest.mark.usefixtures("finished", "words_only")
def test_a_report_on_another_text(tmp_path: Path) -> None:
    (tmp_path / "run" / "run.yaml").unlink()
    (tmp_path / "poem.txt").write_text("the quick brown fox jumps over the lazy dog. " * 10)
    numbers = write_report(tmp_path / "run", tmp_path / "poem.txt", streams=2, sample_tokens=5)
    assert numbers["prompt"].startswith("the quick brown fox") and "poem.txt" in numbers["text"]
    assert (tmp_path / "run" / "report-poem" / "report.html").is_file()
    assert not (tmp_path / "run" / "report").exists()


@pytest.mark.usefixtures("finished", "words_only")
def test_a_text_given_is_read_whole_as_one_document_a_file(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 6 + "The end."
    (tmp_path / "poem.txt").write_text(text)
    numbers = write_report(tmp_path / "run", tmp_path / "poem.txt", streams=2, sample_tokens=5)
    assert numbers["memory_on"]["streams"] == 1 and numbers["memory_on"]["bytes"] == len(text)
    assert numbers["read"] == f"all of its {len(text)} bytes, in 1 stream of at most {len(text)} tokens"
    reading = (tmp_path / "run" / "report-poem" / "reading.html").read_text()
    assert re.sub("<.*?>", "", reading[reading.index("<pre") : reading.index("</pre>")]) == text
    (tmp_path / "texts").mkdir()
    for name in "abc":
        (tmp_path / "texts" / f"{name}.txt").write_text(name + text)
    _, documents = evaluation_text(load_run(tmp_path / "run"), tmp_path / "texts")
    assert [document.text for document in documents] == [name + text for name in "abc"]


@pytest.mark.usefixtures("finished", "words_only")
def test_texts_that_cannot_be_read_are_refused_by_the_option(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(ValueError, match=r"one.txt: its longest document is a single token, .*: give a longer text"):
        write_report(tmp_path / "run", tmp_path / "one.txt")
    (tmp_path / "two.txt").write_text("ab")
    assert write_report(tmp_path / "run", tmp_path / "two.txt", sample_tokens=5)["memory_on"]["bytes"] == 2
    (tmp_path / "nothing").mkdir()
    for name, says in (("nowhere.txt", "does not exist"), ("nothing", "it has no non-empty UTF-8 text")):
        with pytest.raises(ValueError, match=f"--data='.*{name}'.*{says}") as error:
            write_report(tmp_path / "run", tmp_path / name)
        assert "data.path" not in str(error.value)
    shutil.rmtree(tmp_path / "corpus")
    with pytest.raises(
        ValueError, match=r"the text of .*run cannot be read \(.*does not exist.*\): give another by --data"
    ):
        write_report(tmp_path / "run")


@pytest.mark.usefixtures("finished", "words_only")
def test_what_one_stream_alone_reaches_has_no_standard_error(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for length in (70, 100, 300):
        (tmp_path / "texts" / f"{length}.txt").write_text("".join(chr(97 + i * length % 26) for i in range(length)))
    numbers = write_report(tmp_path / "run", tmp_path / "texts", sample_tokens=5)
    assert [bucket["streams"] for bucket in numbers["memory_on"]["by_position"]] == [3, 3, 1, 1]
    assert [saved["standard_error"] is None for saved in numbers["older_by_position"]] == [False, False, True, True]
    page = (tmp_path / "run" / "report-texts" / "report.html").read_text()
    assert page.count("in one stream") == 2 and "± 0.0000<" not in page[page.index("128–256") :]


@pytest.mark.usefixtures("words_only")
def test_alarms_stand_above_the_report(watched: Path, tmp_path: Path) -> None:
    run = copied(watched, tmp_path)
    log = run / "memory.jsonl"
    assert "A memory that learns while it reads" in _page(run)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    names = [memory["name"] for memory in lines[0]["memories"]]
    raised = [{"kind": "no writes", "memory": name, "text": f"{name} writes nothing: lower it"} for name in names]
    log.write_text("".join(json.dumps(line | {"alarms": raised if line["step"] > 2 else []}) + "\n" for line in lines))
    page = _page(run)
    assert "<h1>A model with 2 memories, 2 of no use</h1>" in page and "learns while it reads" not in page
    assert f"Alarm since step 4:</b> {names[0]} writes nothing: lower it" in page
    saved = json.loads((run / "report" / "report.json").read_text())["alarms"]
    assert [(alarm["memory"], alarm["step"], alarm["until"]) for alarm in saved] == [(name, 4, None) for name in names]
    log.write_text(
        "".join(json.dumps(line | {"alarms": raised[:1] if line["step"] < 6 else []}) + "\n" for line in lines)
    )
    page = _page(run)
    assert "A memory that learns while it reads" in page and "Alarm from step 2 to 4, not seen since" in page


ODD = {  # lines of memory.jsonl that a look of ours would not write
    "no memories": [{"step": 4, "seconds": 1, "memories": []}, {"step": 6, "seconds": 1, "memories": []}],
    "no figures": [{"memory_contribution": None, "branch_ratio": None, "recall_error": []}],
    "no numbers": [
        {
            "memory_contribution": math.nan,
            "branch_ratio": math.inf,
            "recall_error": [],
            "effective_rank": [math.nan, math.inf],
            "half_life": [-1],
        }
    ],
    "other heads": [
        {
            "memory_contribution": 1e308,
            "branch_ratio": 1,
            "recall_error": [],
            "effective_rank": [1.0],
            "readout_change": [None, None, None],
        }
    ],
    "another kind of alarm": [
        {"memory_contribution": 0.5, "branch_ratio": 1, "recall_error": [], "alarm": "of a kind that is not known"}
    ],
}


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize("odd", ODD)
def test_odd_looks_spoil_no_report(watched: Path, tmp_path: Path, odd: str) -> None:
    run = copied(watched, tmp_path)
    lines = ODD[odd]
    if odd != "no memories":
        name = "model.layers.{}.mixer"
        memories = [{"name": name.format(layer)} | line for line in lines for layer in (0, 1)]
        alarms = [{"kind": line["alarm"], "memory": "", "text": "<b>x"} for line in lines if "alarm" in line]
        lines = [{"step": step, "seconds": 1, "memories": memories, "alarms": alarms} for step in (5, 6)]
    with (run / "memory.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    page = _page(run)
    assert "By position" in page and "<b>x" not in page
    assert ("A model with 2 memories, 2 of no use" in page) == ("kind" in odd)


@pytest.mark.usefixtures("finished", "words_only")
def test_what_a_log_holds_spoils_no_report(tmp_path: Path) -> None:
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('no JSON\n{"step": 5, "loss": NaN, "elapsed": 1}\n{"step": 6, "loss": "2", "elapsed": 1}\n\0\n')
    assert "Training" in _page(tmp_path / "run")
    (tmp_path / "run" / "data.json").unlink()
    os.mkfifo(tmp_path / "run" / "data.json")
    (tmp_path / "run" / "log.jsonl").unlink()
    (tmp_path / "run" / "log.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"log.jsonl' cannot be read \(it is a folder\)"):
        write_report(tmp_path / "run")


@pytest.mark.usefixtures("finished", "words_only")
def test_a_report_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("SEGMENT", 64), ("WINDOWS", 4)):
        monkeypatch.setattr(f"atlas_memory.eval.perplexity.{name}", size)
    said: list[tuple[str, float]] = []
    write_report(tmp_path / "run", streams=2, sample_tokens=5, progress=lambda what, share: said.append((what, share)))
    for how in ("with the full context", "with the memory's writes off", "with the last 16 tokens only"):
        shares = [share for what, share in said if what == f"reading 2 streams {how}"]
        assert len(shares) > 1 and shares == sorted(shares) and shares[-1] == pytest.approx(1)
    assert said[-1][1] == pytest.approx(1) and any(what == "writing a sample" for what, _ in said)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_command_tells_how_far_it_is(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 101.0, 131.0, 132.0])
    monkeypatch.setattr("rich.console.Console", partial(Console, force_terminal=terminal))
    if not terminal:
        monkeypatch.setattr("atlas_memory.console.time.monotonic", lambda: next(clock))
    with progress_lines("report") as told:
        for what, share in (("[b]reading", 0.0), ("[b]reading", 0.2), ("[b]reading", 0.4), ("drawing", 0.0)):
            told(what, share)
    out, err = capsys.readouterr()
    assert out == ""
    if terminal:
        assert "drawing" in err and "report: " not in err
    else:
        assert err == "report: [b]reading\nreport: [b]reading 40%\nreport: drawing\n"


@pytest.mark.usefixtures("words_only")
def test_names_on_the_page_of_a_comparison_are_text(finished: Path, tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", '"_$x^2$ &amp; \x1b[31m\u202e', "javascript:alert(1)"]
    runs = [Path(shutil.copytree(finished, tmp_path / "runs" / name)) for name in names]
    described = runs[0] / "run.yaml"
    described.write_text(described.read_text().replace("prompt: null", "prompt: <script>alert(1)</script>"))
    page = write_comparison(runs, streams=2, sample_tokens=5)
    text = page.read_text()
    assert set(re.findall("<([a-z0-9]+)", text)) <= {
        *("html", "meta", "title", "style", "h1", "h2", "p", "div", "table", "tr", "th", "td", "a", "img", "b"),
    }
    assert "<img src=x" not in text and "<img src=x onerror=alert(1)>" in html.unescape(text)
    assert "<script>alert(1)</script>" in html.unescape(text) and "\\x1b[31m\\u202e" in text
    links = re.findall('(?:href|src)="(.*?)"', text)
    assert all((page.parent / unquote(link)).is_file() for link in links) and len(links) > 5


def test_what_cannot_be_shown_is_escaped() -> None:
    assert legible("a\0\x1b[31m\u202e\ud800\n\té") == "a\\x00\\x1b[31m\\u202e\\ud800\n\té"
    assert legible("x" * 9, 4) == "xxxx…" and legible(10**5000) == "a huge number" and legible(None) == "None"
    assert [
        memory_label(name) for name in ("model.layers.11.mixer:local 3", "a.²", f"layers.{'9' * 5000}", ":\x1b")
    ] == [*("layer 12 local 3", "layer 1", "layer 1", "layer 1 \\x1b")]


def test_the_headline_is_of_the_memories_that_raise_an_alarm() -> None:
    def of(*alarms: tuple[str, str], wrote: bool = True) -> str:
        found = [{"memory": memory, "kind": kind, "until": None} for memory, kind in alarms]
        memories = [{"name": "a", "wrote": wrote}, {"name": "b", "wrote": True}]
        return headline({"margin": {}, "memories": memories, "alarms": found})

    assert of() == "A memory that learns while it reads"
    assert of(("a", "unused")) == of(wrote=False) == "A model with 2 memories, 1 of no use"
    assert of(("a", "unused"), ("b", "no writes")) == of(("", "no retention")) == "A model with 2 memories, 2 of no use"


def test_errors_have_two_digits() -> None:
    def said(value: float, error: float | None) -> str:
        return amount({"bits_per_byte": value, "standard_error": error})

    assert said(0.00123, 0.00034) == "0.00123 ± 0.00034"
    assert said(1.2345, 0.12) == "1.23 ± 0.12"
    assert said(0.0, 0.0) == "0.0000 ± 0.0000"
    assert said(-1e-9, 0.0) == "0.0000 ± 0.0000"
    assert said(0.02244, None) == "0.0224 in one stream"
    assert duration(2.25) == "2.2 seconds" and duration(90) == "1.5 minutes"


@pytest.mark.usefixtures("finished", "words_only")
def test_a_model_is_named_by_what_it_is(tmp_path: Path) -> None:
    assert ": block lmm, rule deltanet, 2 layers of width 16 with 2 heads" in _page(tmp_path / "run")


@pytest.mark.usefixtures("finished", "words_only")
def test_a_damaged_model_is_refused_with_the_checkpoint_to_take(tmp_path: Path) -> None:
    weights = tmp_path / "run" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"safetensors.* cut short .*: move it away, and the newest"):
        write_report(tmp_path / "run")
    weights.rename(tmp_path / "damaged")
    assert write_report(tmp_path / "run", streams=2, sample_tokens=5)["steps"] == 6


@pytest.mark.usefixtures("words_only")
def test_a_run_that_was_killed_is_told_up_to_its_checkpoint(tmp_path: Path) -> None:
    train(settings(tmp_path, "train.save_every=4"))
    run = tmp_path / "run"
    (run / "model.safetensors").unlink()
    shutil.rmtree(run / "checkpoint-6")
    assert write_report(run, streams=2, sample_tokens=5)["steps"] == 4
    found = write_report(run / "checkpoint-4", streams=2, sample_tokens=5)
    assert found["training_length"] == 16 and found["training_length_is_known"]
    alone = shutil.copytree(run / "checkpoint-4", tmp_path / "alone")
    (tmp_path / "text.txt").write_text("a text of its own. " * 9)
    assert not write_report(alone, tmp_path / "text.txt", streams=2, sample_tokens=5)["training_length_is_known"]
    assert "the folder does not record the length" in (alone / "report-text" / "report.html").read_text()


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Not as mathematics, between dollar signs, nor as bytes that are not UTF-8."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a_$5^_to_$10.txt").write_text("a text of its own. " * 90)
    (tmp_path / "text" / os.fsdecode(b"20\xe9.txt")).write_text("another text. " * 9)
    train(settings(tmp_path, f"data.path={tmp_path / 'text'}", f"output_dir={tmp_path / '_run'}"))
    for name in ("a_$5^_to_$10.txt", os.fsdecode(b"20\xe9.txt")):
        write_report(tmp_path / "_run", tmp_path / "text" / name, streams=2, sample_tokens=5)
    (tmp_path / "text" / "a_$5^_to_$10.txt").unlink()
    assert write_report(tmp_path / "_run", tmp_path / "text", streams=2, sample_tokens=5)["document"] == "20?.txt"


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_read(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, *_, **__: False)
    monkeypatch.setattr("atlas_memory.viz.report.bits_per_byte", None)
    with pytest.raises(OSError, match="could not be written"):
        write_report(finished)


def _page(run: Path) -> str:
    return (Path(write_report(run, streams=2, sample_tokens=5)["folder"]) / "report.html").read_text()


@pytest.mark.usefixtures("finished")
def test_a_report_needs_a_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"has no run.yaml"):
        write_report(tmp_path / "run")


def test_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(settings(tmp_path, f"output_dir={tmp_path}/with", "train.probe_every=2"))
    described = tmp_path / "with" / "run.yaml"
    assert "  rule: deltanet\n" in described.read_text()
    described.write_text(described.read_text().replace("  rule: deltanet\n", ""))  # as if its preset had decided
    train(
        settings(
            tmp_path,
            f"output_dir={tmp_path}/without#2",
            "model.block=swa",
            "model.rule=null",
            "model.attention_window=4",
            "data.held_out=0.3",
        )
    )
    with pytest.raises(ValueError, match="the folder does not exist"):
        write_comparison([tmp_path / "with", tmp_path / "nowhere"])
    assert not (tmp_path / "with" / "report").exists()
    page = write_comparison([tmp_path / "with", tmp_path / "without#2"], streams=2, sample_tokens=5)
    assert page == tmp_path / "comparison" / "comparison.html"
    text = page.read_text()
    for link in re.findall('(?:href|src)="(.*?)"', text):
        assert (page.parent / unquote(link)).is_file(), link
    rows = [[re.sub("<.*?>", "", cell) for cell in row.split("</td>")] for row in text.split("<tr>")]
    assert ["with", "deltanet"] in [[row[0], row[2]] for row in rows if len(row) > 3]
    assert any(row[0] == "model.block" and row[2] == "swa" for row in rows)
    assert any(row[:2] == ["model.rule", "deltanet"] for row in rows)  # which its settings do not name
    assert "contribution.png" in text and "memory contribution" in text and "read on different texts" in text
    monkeypatch.setattr("atlas_memory.viz.charts.save", undrawn)  # as words_only, from here on
    (tmp_path / "book.txt").write_text("a text of its own. " * 9)
    other = write_comparison([tmp_path / "with", tmp_path / "without#2"], tmp_path / "book.txt", sample_tokens=5)
    assert other == tmp_path / "comparison-book" / "comparison.html" and page.read_text() == text
    assert "read on different texts" not in other.read_text()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "without#2", tmp_path / "elsewhere")
    monkeypatch.setattr("os.access", lambda path, *_, **__: path != tmp_path)
    apart = write_comparison([tmp_path / "elsewhere" / "without#2", tmp_path / "with"], streams=2, sample_tokens=5)
    assert apart == tmp_path / "elsewhere" / "comparison" / "comparison.html"
    with pytest.raises(ValueError, match="named twice"):
        write_comparison([tmp_path / "with", tmp_path / "elsewhere" / ".." / "with"])
