"""What the forms require of a feature map, a bias, an inner optimiser and a retention that are not the library's own.
Each is tried on a few small numbers when the first rule is made with it, so that one that does not fit is refused by
its name, and does not fail somewhere deep in a form, or compute something else there.

The library's own are tried by a test (tests/memory/test_contracts.py), and not when they are imported, which would take
longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..bias import Bias
from ..features import Features
from ..retention import AnyRetention
from ..step import InnerOptimiser
from .bias import try_bias
from .columns import keeps_any_columns, takes_any_columns
from .features import try_features
from .optimiser import try_optimiser
from .retention import try_retention

__all__ = ["TRIED", "check_part", "keeps_any_columns", "takes_any_columns"]

TRIED: dict[str, tuple[type, Callable[[Any], None]]] = {
    "features": (Features, try_features),
    "bias": (Bias, try_bias),
    "optimiser": (InnerOptimiser, try_optimiser),
    "retention": (AnyRetention, try_retention),
}
"""The axes of a rule whose choices are tried: the class from which they derive, and the function that tries one."""


def check_part(axis: str, part: object) -> None:
    """Try the choice on an axis of ``TRIED``; an equal one that has been tried before is not tried again.

    Raises:
        ValueError: one that does not derive from the axis's class, cannot be hashed, lacks a method, fails, or gives
            what the forms cannot go on with.
    """
    base, try_it = TRIED[axis]
    name = type(part).__name__
    if not isinstance(part, base):
        raise ValueError(f"{axis} {name} must derive from {base.__name__}, or from a class that does")
    wanted = f"{axis} {name} must be a frozen dataclass of numbers, names and tuples"
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(f"{wanted}: {error}") from error
    for field in fields(part):  # type: ignore[arg-type]  # its instances derive from a dataclass
        if isinstance(value := getattr(part, field.name), Tensor | Module):
            raise ValueError(
                f"{wanted}, which a configuration can hold: {field.name} is a {type(value).__name__}. What is learned "
                "belongs to a layer; a number that varies from token to token is a gate"
            )
    try_it(part)
