"""The pages, in a real browser: what they show is read there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from atlas_memory.training import train
from benchmarks.dashboard import append, browser, chromium, made_run, served
from tests.training.small import settings

WAIT = 60_000  # milliseconds: this machine may be busy
expect.set_options(timeout=WAIT)
needs_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as started:
        yield started


def open_page(opened: Any, address: str, heading: str) -> Any:
    page = opened.new_page(viewport={"width": 1400, "height": 2400})
    page.goto(address)
    page.get_by_role("heading", name=heading, exact=True).wait_for(timeout=WAIT)
    return page


@needs_browser
def test_runs_are_shown_and_followed(opened: Any, tmp_path: Path) -> None:
    healthy = made_run(tmp_path / "healthy", steps=300)
    ill = made_run(tmp_path / "ill", steps=300, alarm=200, seed=1)
    with (ill / "log.jsonl").open("a") as file:
        file.write('{"step": 30')
        file.write('{"step": 31}\n')
    with served(tmp_path) as address:
        page = open_page(opened, address, "Runs")
        expect(page.get_by_text("ill, after step 200: layer 0 writes nothing: lower train.gate_rate")).to_be_visible(
            timeout=WAIT
        )
        expect(page.get_by_text("ill: 1 damaged line of its logs left out")).to_be_visible()
        assert page.get_by_text("after step").count() == 1  # the healthy run raised none
        expect(page.get_by_role("row").filter(has_text="healthy").get_by_text("300 of 300")).to_be_visible()
        expect(page.locator("svg.marks")).to_have_count(4)
        page.get_by_text("learning rate and gradients").click()
        expect(page.locator("svg.marks")).to_have_count(6)
        append(healthy / "log.jsonl", {"step": 301, "loss": 1.0, "learning_rate": 0.0, "grad_norm": 1, "elapsed": 130})
        expect(page.get_by_role("row").filter(has_text="healthy").get_by_text("301 of 300")).to_be_visible()
        page.close()


@needs_browser
def test_memories_and_settings_are_shown(opened: Any, tmp_path: Path) -> None:
    for seed in (0, 1):
        made_run(tmp_path / f"run-{seed}", steps=300, seed=seed)
    with served(tmp_path) as address:
        page = open_page(opened, f"{address}/memories", "Memories")
        expect(page.get_by_text("Last look after step 300, in 0.50 s.")).to_be_visible()
        expect(page.locator("svg.marks")).to_have_count(4)
        page.get_by_role("button", name="distance from M_0").click()
        expect(page.locator("svg.marks")).to_have_count(5)
        page.get_by_role("link", name="Settings").click()
        expect(page.get_by_role("row").filter(has_text="train.seed").first.get_by_text("1")).to_be_visible()
        page.get_by_role("link", name="Samples").click()
        expect(page.get_by_text("once upon a time 300")).to_be_visible()
        page.close()


@needs_browser
def test_a_text_is_read(opened: Any, tmp_path: Path) -> None:
    train(settings(tmp_path))
    with served(tmp_path / "run") as address:
        page = open_page(opened, f"{address}/reading", "Reading")
        page.get_by_label("tokens of a passage to read again").fill("80")
        page.get_by_label("so many tokens later").fill("20")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        expect(page.get_by_text("what its memories wrote saved")).to_be_visible()
        frame = page.frame_locator("iframe")
        expect(frame.get_by_text("tokens are of passages that had been read before")).to_be_visible()
        assert frame.locator("i.again").count() >= 80  # the documents of this text have passages in common
        frame.locator("i").nth(100).hover()
        assert frame.locator("#said").inner_text().startswith("token 100: ")
        page.get_by_label("tokens of a passage to read again").fill("0")
        page.get_by_label("A text of yours").fill("hello, hello")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        expect(page.get_by_text("12 tokens of your text, read by run")).to_be_visible()
        page.get_by_label("A text of yours").fill("x")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="Read", exact=True).click()
        expect(page.get_by_text("it has less than two tokens")).to_be_visible()
        page.close()


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atlas_memory", "dashboard", "--no-browser", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1 and done.stderr.startswith("atlas: no run at") and done.stderr.count("\n") == 1
