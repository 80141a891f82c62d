"""Peak memory of a candidate, on the CPU in a process of its own, so that nothing else is counted and nothing hides it.

What is reported is the growth of the peak resident set over the level before the first call, of an eager candidate, or
before the second, of a compiled one, whose first call is compilation. The level holds the interpreter, PyTorch, inputs
and parameters. The growth holds what the call allocates and the kernel has backed with pages: intermediate results,
gradients, outputs, workspaces of the matrix library, pages that the allocator keeps, code first used in the call (a few
MB; the resolution of the number). It is the kernel's VmHWM, the peak that ``ru_maxrss`` reports, but of this process
alone: over fork and exec, ``ru_maxrss`` keeps the peak of the parent. The peak is reset before the call.

On a GPU PyTorch itself counts what it gives out (``growth_on_gpu``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.measure import Call, step
from benchmarks.registry import Candidate, Shape

ROOT = Path(__file__).parents[1]
STATUS = Path("/proc/self/status")


def growth(candidate: Candidate, shape: Shape) -> int:
    """Bytes by which the peak of this process grows in a call; see above. On Linux.

    Raises:
        Missing: the candidate cannot be built here.
        OSError: not on Linux.
    """
    operation = candidate.operation(shape)
    call = step(operation, candidate.backward)
    if candidate.compile:
        call()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak to what is resident now
    level = _kilobytes("VmRSS")
    call()
    return 1024 * (_kilobytes("VmHWM") - level)


def growth_apart(benchmark: str, candidate: str, index: int, quick: bool, limit: float) -> int | None:
    """``growth`` of a candidate at a benchmark's shape number ``index``, in a fresh process; None where it failed, off
    Linux, or after ``limit`` seconds."""
    if not STATUS.exists():
        return None
    command = [sys.executable, "-m", "benchmarks", "peak", benchmark, candidate, str(index)]
    command += ["--quick"] if quick else []
    threads = str(torch.get_num_threads())
    paths = os.pathsep.join(path for path in (str(ROOT), *sys.path) if path)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment, timeout=limit
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout.split()[-1])


def growth_on_gpu(call: Call) -> int:
    """Bytes by which what PyTorch has given out on the GPU grows in a call that has been made before."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    level = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - level


def _kilobytes(name: str) -> int:
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{STATUS} has no {name}: peak memory is measured on Linux")
