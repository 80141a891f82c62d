"""What each part of a rule may be, by name; and what is no part of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from .bias import L2, Bias, DotProduct, Huber, Lp, RobustL2
from .features import Exponential, Features, Identity, Polynomial
from .networks import MLP, GatedMLP, Linear, NetworkBase
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon
from .retention import AnyRetention, Decay, ElasticNet, FDivergence, Keep, LqNorm, RowNorm, Sigmoid, Softmax
from .step import InnerOptimiser
from .window import Window

KINDS: dict[str, tuple[type, ...]] = {
    "features": (Identity, Polynomial, Exponential),
    "network": (Linear, MLP, GatedMLP),
    "bias": (L2, DotProduct, Lp, Huber, RobustL2),
    "retention": (Decay, Keep, LqNorm, Softmax, Sigmoid, ElasticNet, FDivergence, RowNorm),
    "optimiser": (GradientDescent, DeltaGradientDescent, Momentum, Muon),
    "window": (Window,),
}
"""What each part of a rule may be, by the name of its class in ``Rule.vary`` and in configurations; a class of your own
is added by ``KINDS["optimiser"] += (Mine,)``."""

BUILT_IN = dict(KINDS)
"""The library's own kinds."""

BASES: dict[str, type] = {
    "features": Features,
    "network": NetworkBase,
    "bias": Bias,
    "retention": AnyRetention,
    "optimiser": InnerOptimiser,
    "window": Window,
}


def kinds_of(axis: str) -> dict[str, type]:
    """The kinds of an axis by their names; ValueError where one of your own has the name of one of the library's, which
    a configuration could not tell apart."""
    kinds = {kind.__name__: kind for kind in KINDS[axis]}
    for kind in BUILT_IN[axis]:
        if kinds.get(kind.__name__, kind) is not kind:
            raise ValueError(f"KINDS[{axis!r}] has another {kind.__name__} than the library's: give it its own name")
    return kinds


def check_part(axis: str, part: Any) -> None:
    """Raise ValueError unless ``part`` is an instance of a frozen dataclass of this axis."""
    base = BASES[axis]
    if not isinstance(part, base) or not is_dataclass(part):
        raise ValueError(
            f"{axis} of a rule must be an instance of a dataclass that derives from {base.__name__}, such as "
            f"{BUILT_IN[axis][0]()!r}, got {part!r}"
        )
    try:
        hash(part)
    except TypeError as error:
        raise ValueError(f"{axis} {type(part).__name__} must be a frozen dataclass: {error}") from error


def made_of(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """A part of this kind, with its defaults; fields without one are those of ``options``."""
    needed = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    if missing := [field for field in needed if field not in options]:
        raise ValueError(f"{name} {kind.__name__} has no default for {', '.join(missing)}: give {missing[0]!r} a value")
    return kind(**{field: options[field] for field in needed})
