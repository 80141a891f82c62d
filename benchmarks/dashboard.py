"""How long the dashboard takes to show runs, in a headless browser."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atlas_memory.train.run_folder import write_yaml

HEADS, LAYERS = 8, 4
CHARTS = 4  # that a page of the dashboard has unasked


def made_run(folder: Path, steps: int = 2000, every: int = 100, seed: int = 0, alarm: int | None = None) -> Path:
    """Write the logs of a run that never was: a line a step, a look every so many steps, and an alarm from a step."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    settings = {"model": {"rule": "atlas"}, "data": {"tokenizer": "bytes"}, "train": {"steps": steps, "seed": seed}}
    write_yaml(folder / "run.yaml", settings)
    (folder / "data.json").write_text('{"bytes": true}')
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 2 + 3 * np.exp(-step / 400) + 0.1 * draw.normal(), "learning_rate": 1e-3}
        line |= {"grad_norm": 1.0, "elapsed": 0.4 * step}
        line |= {"held_out_bits_per_byte": 3.0 - step / steps} if step % every == 0 else {}
        append(folder / "log.jsonl", line)
        if step % every == 0:
            append(folder / "memory.jsonl", _look(step, draw, alarm is not None and step >= alarm))
            append(folder / "samples.jsonl", {"step": step, "prompt": "once ", "text": f"upon a time {step}"})
    return folder


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a log."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _look(step: int, draw: np.random.Generator, alarm: bool) -> dict[str, Any]:
    def heads() -> list[float]:
        return [float(value) for value in draw.uniform(size=HEADS)]

    gates = {name: {"mean": heads(), "std": heads()} for name in ("alpha", "eta", "theta", "gamma")}
    measured = ("half_life", "error_before_write", "readout_change", "norm", "distance_from_init", "momentum_norm")
    memories = [
        {"name": f"model.layers.{layer}.mixer", "memory_contribution": 0.5, "branch_ratio": 0.5, **gates}
        | {"recall_error": [heads(), heads()]}
        | {name: heads() for name in (*measured, "effective_rank")}
        for layer in range(LAYERS)
    ]
    text = "layer 0 writes nothing: lower train.gate_lr_scale"
    raised = [{"kind": "no writes", "memory": "model.layers.0.mixer", "text": text}] if alarm else []
    found = {
        "step": step,
        "seconds": 0.5,
        "effective_remembrance": 0.02,
        "recent": 128,
        "lags": [16, 256],
        "memories": memories,
    }
    return found | {"suspected": raised, "alarms": raised}


@contextmanager
def served(*runs: Path, address: str = "localhost", within: Path | None = None) -> Iterator[str]:
    """Where a dashboard of runs is, while it runs, started in the folder `within`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "atlas_memory", "dashboard", "--no-browser", "--port", str(port)]
    command += ["--address", address]
    with tempfile.TemporaryFile("w+") as said:  # a pipe that nobody reads holds 64 kB, and then the server
        server = subprocess.Popen([*command, *map(str, runs)], stdout=said, stderr=subprocess.STDOUT, cwd=within)
        try:
            url = f"http://localhost:{port}"
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"{url}/_stcore/health", timeout=1).close()
                    break
                except OSError:
                    if server.poll() is not None:
                        said.seek(0)
                        raise RuntimeError(f"the dashboard ended: {said.read()}") from None
                    time.sleep(0.1)
            yield url
        finally:
            server.terminate()
            server.wait()


def chromium() -> str | None:
    """The browser's program, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium; RuntimeError where there is none."""
    from playwright.sync_api import sync_playwright

    program = chromium()
    if program is None:
        raise RuntimeError("no Chromium was found: install it (Debian: apt-get install chromium)")
    quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync"]
    quiet += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=program, args=quiet)
        try:
            yield started
        finally:
            started.close()


def measure(rounds: int = 5) -> dict[str, list[float]]:
    """Seconds from asking for a page until its charts are drawn, of one run of 2,000 steps and of ten: in a new browser
    each time, with nothing in its cache, and once more in the same browser."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(10):
            made_run(Path(folder) / f"run-{seed}", seed=seed)
        for name, runs in (("one run", [Path(folder) / "run-0"]), ("ten runs", [Path(folder)])):
            with served(*runs) as address:
                for page in ("", "memories"):
                    for _ in range(rounds):
                        for visit, seconds in zip(("", " again"), _load(f"{address}/{page}"), strict=True):
                            found.setdefault(f"{name}, {page or 'runs'}{visit}", []).append(seconds)
    return found


def _load(address: str) -> list[float]:
    """The first visit and the second."""
    found = []
    with browser() as started, started.new_context(viewport={"width": 1400, "height": 2400}) as context:
        for _ in range(2):
            page = context.new_page()
            begun = time.perf_counter()
            page.goto(address)
            page.wait_for_function(f"document.querySelectorAll('svg.marks').length >= {CHARTS}", timeout=60_000)
            found.append(time.perf_counter() - begun)
            page.close()
    return found
