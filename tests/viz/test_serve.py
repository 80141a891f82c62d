"""Whom the dashboard answers, and that it takes nothing from the folder in which it is started."""

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from atlas_memory.viz.server import serve
from benchmarks.dashboard import made_run, served

SPY = "import pathlib; pathlib.Path(__file__).with_name('executed').touch(); raise SystemExit('executed')"


@pytest.fixture(scope="module", params=["localhost", "0.0.0.0"])
def dashboard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """By which address a dashboard answers, and its port. It was started in a folder that would take it over."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("streamlit", "typer", "torch"):
        (folder / f"{name}.py").write_text(SPY)
    (folder / ".streamlit").mkdir()
    (folder / ".streamlit" / "config.toml").write_text('[server]\nbaseUrlPath = "elsewhere"\nallowedHosts = ["*"]\n')
    with served(made_run(folder / "run", steps=2), address=request.param, within=folder) as url:
        assert not (folder / "executed").exists()
        with urllib.request.urlopen(f"{url}/_stcore/health") as answer:  # and not below /elsewhere
            assert answer.read() == b"ok"
        yield request.param, int(urlsplit(url).port or 0)


def handshake(port: int, host: str, origin: str) -> int:
    """The status with which the dashboard answers who wants to open a websocket."""
    lines = ["GET /_stcore/stream HTTP/1.1", f"Host: {host}", f"Origin: {origin}", "Upgrade: websocket"]
    lines += ["Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    with socket.create_connection(("localhost", port), timeout=60) as to:
        to.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return int(to.recv(64).split()[1])


def test_only_those_who_ask_by_its_own_name_are_answered(dashboard: tuple[str, int]) -> None:
    address, port = dashboard
    for host in ("localhost", "127.0.0.1"):
        assert handshake(port, f"{host}:{port}", f"http://{host}:{port}") == 101
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example"):
        assert handshake(port, host, f"http://{host}") == 403
        assert handshake(port, f"{host}:{port}", f"http://{host}:{port}") == 403
    number = f"192.0.2.7:{port}"
    assert handshake(port, number, f"http://{number}") == (101 if address == "0.0.0.0" else 403)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", steps=1)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for address in ("", "203.0.113.7", "localhost", "a..b"):
            with pytest.raises(ValueError, match=rf"--address='{address}' with --port={port} cannot be served"):
                serve([run], port, address)


def test_python_m_takes_no_module_from_the_folder_in_which_it_is_called(tmp_path: Path) -> None:
    for name in ("typer", "rich", "torch"):
        (tmp_path / f"{name}.py").write_text(SPY)
    done = subprocess.run([sys.executable, "-m", "atlas_memory", "--version"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 and not (tmp_path / "executed").exists()
