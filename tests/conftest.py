"""What holds for every test. The Triton kernels run in Triton's interpreter, chosen before anything imports
triton; memory that was asked for and not filled is not a number, so that whoever reads it is found; and a test draws
the same random numbers whatever ran before it, so that a failure is found again by running that test alone. One thread
a process: two that wait for each other over small tensors take thirty times as long once a core is busy."""

import gc
import os
import zlib
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # 0: for tests/gpu
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# The same examples every time; `make search` draws others.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "2000")))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

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


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of tests/train/small.py, beside its text: to be read. What a test may change is ``finished``."""
    from atlas_memory.train import train
    from tests.train.small import settings

    folder = tmp_path_factory.mktemp("six-steps")
    outcome = train(settings(folder))
    assert (outcome.steps, outcome.interrupted) == (6, False)
    return folder / "run"


@pytest.fixture
def finished(six_steps: Path, tmp_path: Path) -> Path:
    """The same run as if it had been trained in tmp_path / "run", on the text tmp_path / "corpus"."""
    from tests.train.small import copied

    return copied(six_steps, tmp_path)
