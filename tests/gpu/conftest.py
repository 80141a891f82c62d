"""What only a GPU can show. Where there is none, every test of this folder is skipped.

Run on a GPU with ``TRITON_INTERPRET=0 python -m pytest tests/gpu``: otherwise Triton interprets the kernels.
"""

from pathlib import Path

import pytest
import torch

from ..models.conftest import make  # noqa: F401

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
