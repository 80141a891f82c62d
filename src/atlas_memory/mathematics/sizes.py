"""The checks that sizes and other values pass."""

import math
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


def check_like(name: str, value: Any, present: Any) -> None:
    """Raise ValueError where a switch, a number or a word (``present``) is to be replaced by what is none; sizes are
    checked by the parts that have them."""
    if isinstance(present, bool) and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if isinstance(present, float) and not number:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if isinstance(present, str) and not isinstance(value, str):
        raise ValueError(f"{name} must be a word such as {present!r}, got {value!r}")
