"""The small models of tests/models."""

from tests.models.conftest import make

__all__ = ["make"]
