"""The checks that sizes pass."""

from typing import Any


def check_size(name: str, value: Any) -> None:
    """Raise ValueError unless ``value``, which the user calls ``name``, is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def check_heads(dim: Any, heads: Any) -> None:
    """Raise ValueError unless ``dim`` is divided evenly among ``heads``."""
    check_size("heads", heads)
    check_size("dim", dim)
    if dim % heads:
        raise ValueError(f"dim must be a positive multiple of heads, got dim={dim} and heads={heads}")


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless ``value``, which the user calls ``name``, is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
