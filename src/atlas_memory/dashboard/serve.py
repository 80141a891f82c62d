"""The server of the dashboard."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from atlas_memory.dashboard.runs import find_runs

PORT = 8501
PAGES = Path(__file__).with_name("pages.py")


def serve(runs: Sequence[str | Path], port: int = PORT, address: str = "localhost", browser: bool = True) -> int:
    """Show runs, or all runs in folders, on http://`address`:`port` until it is interrupted, and return the server's
    exit code.

    `browser`: open it there. ValueError if a folder has no run; ModuleNotFoundError without the extra `dashboard`.
    """
    found = find_runs(runs)
    importlib.import_module("streamlit")
    command = [sys.executable, "-m", "streamlit", "run", str(PAGES)]
    options = {
        "server.port": port,
        "server.address": address,
        "server.headless": str(not browser).lower(),
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "theme.base": "light",
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    try:
        return subprocess.call([*command, "--", *map(str, found)])
    except KeyboardInterrupt:  # the server had it too
        return 0
