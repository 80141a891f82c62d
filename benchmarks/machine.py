"""Where and with what a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("torch", "numpy", "titans-pytorch", "triton", "flash-linear-attention")


def describe(device: str = "cpu") -> dict[str, Any]:
    """CPU model, cores that this process may use, vector instructions, memory; the GPU, if it is measured on one."""
    found = {"model name": platform.processor() or platform.machine(), "flags": ""}
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        if key.strip() in found:
            found[key.strip()] = value.strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return gpu | {
        "cpu": found["model name"],
        "cores": cores,
        "flags": [flag for flag in FLAGS if flag in found["flags"].split()],
        "pytorch_uses": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str | None]:
    """Of Python and of what is timed; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def revision() -> str:
    """The commit of the source tree, with a plus where files differ from it, or "unknown"."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def now() -> str:
    """Date and time of day in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
