"""The server of the dashboard."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.viz.folders import find_runs

PAGES = Path(__file__).with_name("dashboard.py")
ANY = ("0.0.0.0", "::")  # all addresses of a machine


def serve(runs: Sequence[str | Path], port: int = 8501, address: str = "localhost", browser: bool = True) -> None:
    """Show runs, or all runs in folders, on http://`address`:`port` until it is interrupted; then the process ends.

    `browser`: open it there. ValueError if a folder has no run, or the port cannot be used; ModuleNotFoundError without
    the extra `dashboard`.
    """
    find_runs(runs)
    check_free(address, port)
    from streamlit.web.cli import main  # a process of its own would import from the current folder

    options = {
        "server.port": port,
        "server.address": address,
        "server.headless": str(not browser).lower(),
        "server.fileWatcherType": "none",
        "server.showEmailPrompt": "false",
        "browser.gatherUsageStats": "false",
        "global.developmentMode": "false",
        "client.toolbarMode": "minimal",
        "logger.hideWelcomeMessage": "true",
        "logger.level": "warning",
        "theme.base": "light",
    }
    command = ["run", str(PAGES), *(f"--{name}={value}" for name, value in options.items())]
    command += [f"--server.allowedHosts={host}" for host in hosts(address)]
    command += ["--", *(str(Path(place).resolve()) for place in runs)]
    os.chdir(PAGES.parent)  # Streamlit reads settings and secrets from .streamlit in the current folder
    print(f"dashboard: http://{shown(address)}:{port} (Ctrl-C ends it)", flush=True)
    main(command, prog_name="streamlit")


def shown(address: str) -> str:
    """The address as a part of a URL of this machine."""
    return "localhost" if address in ANY else f"[{address}]" if ":" in address else address


def check_free(address: str, port: int) -> None:
    """ValueError unless a server can be started there."""
    try:
        if not address:  # Streamlit takes it for all
            raise OSError(0, "it is empty")
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address, port))
    except (OSError, TypeError, UnicodeError) as error:
        raise ValueError(
            f"--address={address[:60]!r} with --port={port} cannot be served ({getattr(error, 'strerror', error)}): "
            "give localhost, an address of this machine or 0.0.0.0, and a port that is free"
        ) from error


def hosts(address: str) -> list[str]:
    """The host names that are answered: a machine's own, and `address`, or any IPv4 number where that stands for all.
    By another name a foreign page could read the dashboard through the browser that opened it (DNS rebinding)."""
    others = [f"*.{number}" for number in range(256)] if address in ANY else [address]
    return ["localhost", "127.0.0.1", "::1", *others]
