"""The pages, in a real browser: what they show is read there."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES
from benchmarks.dashboard import append, browser, chromium, made_run, served

WAIT = 60_000  # milliseconds: this machine may be busy
expect.set_options(timeout=WAIT)
needs_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder of runs and the address where it is served."""
    folder = tmp_path_factory.mktemp("runs")
    only = made_run(folder / "only", steps=1)  # the command refuses a folder without one
    with served(folder) as address:
        shutil.rmtree(only)
        yield folder, address


@pytest.fixture
def shared(home: tuple[Path, str]) -> Iterator[tuple[Path, str]]:
    """The same folder for one test, empty before it and after it. Its runs have names that no other test's have."""
    yield home
    for run in home[0].iterdir():
        shutil.rmtree(run)


def open_page(opened: Any, address: str, heading: str, width: int = 1400) -> Any:
    page = opened.new_page(viewport={"width": width, "height": 2400})
    page.goto(address)
    page.get_by_role("heading", name=heading, exact=True).wait_for(timeout=WAIT)
    return page


@needs_browser
def test_runs_are_shown_and_followed(opened: Any, shared: tuple[Path, str]) -> None:
    folder, address = shared
    healthy = made_run(folder / "healthy", steps=300)
    ill = made_run(folder / "ill", steps=300, alarm=200, seed=1)
    with (ill / "log.jsonl").open("a") as file:
        file.write('{"step": 30')
        file.write('{"step": 31}\n{"step": 32, "loss": null, "elapsed": 4}\n')
    append(ill / "memory.jsonl", {"step": 301, "seconds": 0.1, "memories": [{"name": "m"}]})
    page = open_page(opened, address, "Runs")
    expect(page.get_by_text("ill, after step 200: layer 0 writes nothing: lower train.gate_lr_scale")).to_be_visible(
        timeout=WAIT
    )
    expect(page.get_by_text("ill: 3 damaged lines of its logs skipped")).to_be_visible()
    assert page.get_by_text("after step").count() == 1  # the healthy run raised none
    expect(page.get_by_role("row").filter(has_text="healthy").get_by_text("300 of 300")).to_be_visible()
    expect(page.locator("svg.marks")).to_have_count(4)
    page.get_by_text("learning rate and gradients").click()
    expect(page.locator("svg.marks")).to_have_count(6)
    append(healthy / "log.jsonl", {"step": 301, "loss": 1.0, "learning_rate": 0.0, "grad_norm": 1, "elapsed": 130})
    expect(page.get_by_role("row").filter(has_text="healthy").get_by_text("301 of 300")).to_be_visible()
    page.get_by_role("button", name="Clear all").click()
    expect(page.get_by_text("Choose a run on the left.")).to_be_visible()
    page.close()


@pytest.mark.extended
@needs_browser
def test_runs_appear_and_vanish_while_the_page_is_open(opened: Any, tmp_path: Path) -> None:
    for name in ("first", "second"):
        made_run(tmp_path / name, steps=4)
    with served(tmp_path, tmp_path / "second") as address:
        page = open_page(opened, address, "Runs")
        rows = page.get_by_role("row")
        expect(rows).to_have_count(3)
        (tmp_path / "third").mkdir()
        (tmp_path / "third" / "run.yaml").write_text("model: {preset: nano}")  # it has no log yet
        expect(rows.filter(has_text="third").get_by_text("gated-deltanet")).to_be_visible(timeout=WAIT)
        shutil.rmtree(tmp_path / "second")
        expect(page.get_by_text("second': the folder does not exist")).to_be_visible()
        expect(rows).to_have_count(3)
        page.get_by_role("link", name="Memories").click()
        page.get_by_role("combobox", name="run", exact=True).click()
        page.get_by_role("option", name="third").click()
        expect(page.get_by_text("Its memories have not been probed yet")).to_be_visible()
        shutil.copy(made_run(tmp_path.with_name("looked at"), steps=100) / "memory.jsonl", tmp_path / "third")
        expect(page.locator("svg.marks")).to_have_count(4)
        page.reload()
        expect(page.get_by_text("second': the folder does not exist")).to_be_visible()
        shutil.rmtree(tmp_path / "first")
        shutil.rmtree(tmp_path / "third")
        expect(page.get_by_text("There is no run to choose.")).to_be_visible()
        page.close()


@pytest.mark.extended
@needs_browser
def test_no_page_moves_sideways_on_a_phone(opened: Any, shared: tuple[Path, str]) -> None:
    folder, address = shared
    for seed in range(9):
        made_run(folder / f"the-run-with-the-seed-{seed}", steps=20, every=10, seed=seed)
    without = made_run(folder / "without", steps=20)
    (without / "run.yaml").write_text("model: {preset: nano, block: attention}")
    page = open_page(opened, address, "Runs", width=420)
    expect(page.locator("svg.marks")).to_have_count(4)
    for heading, shown in (
        ("Runs", "minutes"),
        ("Memories", "Frobenius norm of the memory's matrices M"),
        ("Settings", "train.seed"),
        ("Samples", "upon a time"),
        ("Reading", "tokens at most"),
    ):
        if heading != "Runs":
            page.goto(f"{address}/{heading.lower()}")
        expect(page.get_by_text(shown).first).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, heading
        tables = page.locator("div:has(> table)")
        assert all(table.evaluate("e => e.scrollWidth > e.clientWidth") for table in tables.all()[:1]), heading
    page.set_viewport_size({"width": 1400, "height": 2400})
    page.goto(f"{address}/settings")
    expect(page.get_by_text("train.seed").first).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    page.get_by_role("link", name="Memories").click()
    page.get_by_role("combobox", name="run", exact=True).click()
    page.get_by_role("option", name="without").click()
    expect(page.get_by_text("This model has no memory (model.block=attention).")).to_be_visible()
    page.close()


@needs_browser
def test_memories_and_settings_are_shown(opened: Any, shared: tuple[Path, str]) -> None:
    folder, address = shared
    for seed in (0, 1):
        made_run(folder / f"run-{seed}", steps=300, seed=seed)
    config = folder / "run-1" / "run.yaml"
    config.write_text(config.read_text().replace("rule: atlas", "preset: tiny"))
    page = open_page(opened, f"{address}/memories", "Memories")
    expect(page.get_by_text("Last probe after step 300, in 0.50 s.")).to_be_visible()
    expect(page.locator("svg.marks")).to_have_count(4)
    page.get_by_role("button", name="distance from M_0").click()
    expect(page.locator("svg.marks")).to_have_count(5)
    page.get_by_role("link", name="Settings").click()
    expect(page.get_by_role("row").filter(has_text="train.seed").first.get_by_text("1")).to_be_visible()
    rule = page.get_by_role("row").filter(has_text="model.rule").first
    expect(rule.get_by_text("gated-deltanet")).to_be_visible()  # the preset's: run.yaml names none
    page.get_by_role("link", name="Samples").click()
    expect(page.get_by_text("once upon a time 300")).to_be_visible()
    page.close()


@needs_browser
def test_what_stands_in_files_is_shown_as_text(opened: Any, shared: tuple[Path, str]) -> None:
    """It asks no other host, runs nothing, and takes down no page, whatever it is."""
    folder, address = shared
    evil = "![x](http://evil.example/x.png) <img src='http://evil.example/y.png' onerror='alert(1)'> $x^2$ :red[x]"
    odd = made_run(folder / "<img src=x onerror=alert(1)> **b** $x^2$", steps=4, every=2)
    values = f'{{rule: "{evil}", block: "{evil}", "{evil}": 0x{"f" * 9999}, long: "{"x" * 99999}", nothing: "\\0"}}'
    (odd / "run.yaml").write_text(f"model: {values}\ntrain: {{watch_every: '{evil.replace(chr(39), '')}'}}\n")
    (made_run(folder / "setting", steps=4) / LOG).unlink()
    (folder / "setting" / LOG).mkdir()
    made_run(folder / os.fsdecode(b"\xe9\x1b[31m"), steps=4)
    alarm = {"kind": evil, "memory": evil, "text": f"{evil} \x1b[31m \0 \ud800 {'long ' * 9999}"}
    heads = [1.0, math.inf, math.nan, None, 1e308]
    memory = {
        "name": f"a.²:{evil} \ud800",
        "memory_contribution": math.nan,
        "branch_ratio": math.inf,
        "recall_error": [heads, []],
        "norm": heads,
    }
    append(odd / MEMORY, {"step": 5, "seconds": 1, "memories": []})
    append(
        odd / MEMORY,
        {"step": 6, "seconds": 1, "effective_remembrance": math.nan, "memories": [memory], "alarms": [alarm]},
    )
    append(odd / SAMPLES, {"step": 5, "prompt": "<script>alert(1)</script>", "text": evil})
    append(odd / SAMPLES, {"step": 6, "prompt": f"{evil} \ud800\0\x1b[31m", "text": "x" * 2_000_000})
    page = opened.new_page(viewport={"width": 1400, "height": 2400})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(f"dialog: {dialog.message}") or dialog.dismiss())
    for path, shown in (
        ("", f"after step 6: {evil} \\x1b[31m \\x00 \\ud800 long"),
        ("", "setting: log.jsonl cannot be read: it is a folder"),
        ("settings", "setting"),
        ("settings", evil),
        ("memories", "norm"),
        ("samples", f"{evil} \\ud800\\x00\\x1b[31m"),
        ("reading", "tokens at most"),
    ):
        page.goto(f"{address}/{path}")
        expect(page.get_by_text(shown).first).to_be_visible()
        expect(page.get_by_test_id("stStatusWidget")).to_have_count(0)
        assert page.get_by_test_id("stException").count() == 0, page.get_by_test_id("stException").all_inner_texts()
    page.goto(f"{address}/memories")
    page.get_by_role("combobox", name="run", exact=True).click()
    page.get_by_role("option").last.click()
    expect(page.get_by_text("Its memories have not been probed yet")).to_be_visible()
    assert not [url for url in asked if not url.startswith((address, f"ws{address[4:]}", "data:", "blob:"))]
    page.close()


@needs_browser
def test_a_text_is_read(opened: Any, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "the other")
    with served(tmp_path / "run", tmp_path / "the other") as address:
        page = open_page(opened, f"{address}/reading", "Reading")
        page.get_by_label("Your text").fill(2 * " ".join(str(n * n) for n in range(40)))
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        expect(page.get_by_text("the memory's writes saved")).to_be_visible()
        frame = page.frame_locator("iframe")
        expect(frame.get_by_text("tokens in passages that had been read before")).to_be_visible()
        assert frame.locator("i.again").count() >= 100
        frame.locator("i").nth(100).hover()
        assert frame.locator("#said").inner_text().startswith("token 100: ")
        page.get_by_label("Your text").fill("hello, hello")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        expect(page.get_by_text("12 tokens of your text, read by run")).to_be_visible()
        page.get_by_label("Your text").fill("x")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        wrong = page.get_by_text("it has fewer than two tokens")
        expect(wrong).to_be_visible()
        page.get_by_role("combobox", name="run", exact=True).click()
        page.get_by_role("option", name="the other").click()
        expect(wrong).to_have_count(0)  # it was another run's
        page.close()


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atlas_memory", "dashboard", "--no-browser", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and done.stderr.startswith("atlas: no run at") and done.stderr.count("\n") == 1
