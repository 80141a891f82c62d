"""Memories are probed during training, and alarms say what is of no use."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from atlas_memory.monitor import Alarm
from atlas_memory.monitor.logs import read_log
from atlas_memory.train import load_run, train
from atlas_memory.train.config import ConfigError
from benchmarks.learning.alarms import SPOILT, spoilt
from tests.train.small import settings


def said(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def test_a_line_for_every_look_and_the_same_weights(tmp_path: Path) -> None:
    for name, every in (("watched", 2), ("not", 0)):
        folder = tmp_path / name
        console = quiet()
        train(settings(folder, f"train.probe_every={every}"), console=console)
        assert "alarm" not in said(console)
    lines = read_log(tmp_path / "watched" / "run", "memory.jsonl")
    assert [line.step for line in lines] == [2, 4, 6]
    assert all(line.alarms == [] and len(line.memories) == 2 for line in lines)
    assert lines[0].memories[0].half_life is None  # deltanet has no alpha
    assert not (tmp_path / "not" / "run" / "memory.jsonl").exists()
    history = json.loads((tmp_path / "watched" / "run" / "trainer_state.json").read_text())["log_history"]
    told = {entry["step"]: entry for entry in history if "memory/model.layers.0.mixer/memory_contribution" in entry}
    assert list(told) == [2, 4, 6]  # what `train.report_to` draws
    assert told[6]["memory/model.layers.1.mixer/memory_contribution"] == lines[-1].memories[1].memory_contribution
    assert "held_out_bits_per_byte" in told[6]
    weights = [load_file(tmp_path / name / "run" / "model.safetensors") for name in ("watched", "not")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_resumed_run_goes_on_with_its_looks(tmp_path: Path) -> None:
    train(settings(tmp_path, "train.probe_every=1", "train.steps=4"))
    (tmp_path / "run" / "model.safetensors").unlink()
    train(settings(tmp_path, "train.probe_every=1", "train.steps=6"), resume=True)
    assert [line.step for line in read_log(tmp_path / "run", "memory.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_an_alarm_is_told_once(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    called: list[tuple[int, Alarm]] = []

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(told) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    console = quiet()
    with spoilt(SPOILT["eta at 0"]):
        hook = f"train.alarm_webhook=http://127.0.0.1:{server.server_port}/"
        train(
            settings(tmp_path, "train.probe_every=1", hook),
            console=console,
            on_alarm=lambda *alarm: called.append(alarm),
        )
    server.shutdown()
    assert said(console).count("memory alarm after step 2") == 2  # of two layers, after the second look
    assert said(console).count("memory alarm") == 2 and "writes nothing" in said(console)
    assert said(console).count("failed: HTTP Error 500") == 1
    assert [(t["step"], t["kind"], t["memory"]) for t in told] == [
        (2, "no writes", "model.layers.0.mixer"),
        (2, "no writes", "model.layers.1.mixer"),
    ]
    assert [(step, alarm.memory, alarm.text) for step, alarm in called] == [
        (2, t["memory"], t["text"]) for t in told[:2]
    ]
    lines = read_log(tmp_path / "run", "memory.jsonl")
    assert [len(line.alarms) for line in lines] == [0, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}/", "http://[bad", "http://127.0.0.1:{port}/\u00fc"])
def test_training_goes_on_where_nobody_listens(tmp_path: Path, address: str) -> None:
    console = quiet()
    with spoilt(SPOILT["eta at 0"]), socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # taken, so that nobody else listens there
        hook = f"train.alarm_webhook={address.format(port=deaf.getsockname()[1])}"
        train(settings(tmp_path, "train.probe_every=2", "train.steps=4", hook), console=console)
    assert f"{hook[: hook.index('=')]}=" in said(console) and "failed: " in said(console)
    assert load_run(tmp_path / "run").folder == tmp_path / "run"


@pytest.mark.parametrize("more", [("model.block=swa", "model.rule=null", "model.attention_window=4")])
def test_a_model_without_memories_is_not_looked_at(tmp_path: Path, more: tuple[str, ...]) -> None:
    train(settings(tmp_path, "train.probe_every=1", *more))
    assert not (tmp_path / "run" / "memory.jsonl").exists()


def test_an_address_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.alarm_webhook='example.org'"):
        settings(tmp_path, "train.alarm_webhook=example.org")
