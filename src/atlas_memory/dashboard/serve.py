"""The server of the dashboard."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from atlas_memory.dashboard.runs import find_runs

PAGES = Path(__file__).with_name("pages.py")


def serve(runs: Sequence[str | Path], port: int = 8501, address: str = "localhost", browser: bool = True) -> NoReturn:
    """Show runs, or all runs in folders, on http://`address`:`port` until it is interrupted. The process becomes the
    server, and does not come back.

    `browser`: open it there. ValueError if a folder has no run; ModuleNotFoundError without the extra `dashboard`.
    """
    find_runs(runs)
    importlib.import_module("streamlit")
    command = [sys.executable, "-m", "streamlit", "run", str(PAGES)]
    options = {
        "server.port": port,
        "server.address": address,
        "server.headless": str(not browser).lower(),
        "server.fileWatcherType": "none",
        "server.showEmailPrompt": "false",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "theme.base": "light",
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    os.execv(sys.executable, [*command, "--", *(str(Path(place).resolve()) for place in runs)])
