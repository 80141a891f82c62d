"""What holds for every test. The Triton kernels run in Triton's interpreter, chosen before anything imports
triton; memory that was asked for and not filled is not a number, so that whoever reads it is found; and a test draws
the same random numbers whatever ran before it, so that a failure is found again by running that test alone. One thread
a process: two that wait for each other over small tensors take thirty times as long once a core is busy."""

import gc
import os
import zlib

os.environ.setdefault("TRITON_INTERPRET", "1")  # 0: for tests/gpu
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

gc.disable()  # until all is collected
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays to the end: the garbage collector need not look at it again (3 % of
    the time), nor as often."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
