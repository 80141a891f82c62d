"""What each part of a rule may be, by name; and what is no part of a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from typing import Any

from .bias import L2, DotProduct, Huber, Lp, RobustL2
from .contracts import TRIED
from .features import Exponential, Identity, Polynomial
from .networks import MLP, GatedMLP, Linear
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon
from .retention import Decay, ElasticNet, FDivergence, Keep, LqNorm, RowNorm, Sigmoid, Softmax
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

OURS = dict(KINDS)
"""The library's own kinds. A choice of another kind on an axis of ``TRIED`` is tried when a rule is made with it
(contracts/)."""


def kinds_of(axis: str) -> dict[str, type]:
    """The kinds of an axis by their names. ValueError if what is registered there is no class, or has the name of
    another: a configuration names kinds, and would mean another model then. A class that was defined anew, as where a
    notebook's cell runs again, takes its own place."""
    registered: Any = KINDS[axis]
    if not isinstance(registered, tuple) or not all(isinstance(kind, type) for kind in registered):
        raise ValueError(
            f"KINDS[{axis!r}] must be a tuple of classes, got {registered!r}: register a class by "
            f"KINDS[{axis!r}] += (Mine,)"
        )
    kinds: dict[str, type] = {}
    for kind in registered:
        other = kinds.get(kind.__name__) or kind
        ours = other is not kind and other in OURS[axis]
        if ours or (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            whose = "a class of the library" if ours else f"{other.__module__}.{other.__qualname__}"
            raise ValueError(
                f"KINDS[{axis!r}] has {kind.__module__}.{kind.__qualname__} under the name of {whose}: give it a name "
                "of its own"
            )
        kinds[kind.__name__] = kind
    return kinds


def check_kind(axis: str, part: Any) -> None:
    """Refuse a name or a class in place of a part, one that holds more than its fields, and a part that is another
    axis's."""
    kind = type(part)
    if not is_dataclass(part) or isinstance(part, type):
        raise ValueError(
            f"{axis} of a rule must be an instance of a dataclass, such as {OURS[axis][0]()!r}, got {part!r}"
        )
    own = [name for name in getattr(part, "__dict__", {}) if not isinstance(getattr(kind, name, None), cached_property)]
    if unknown := [name for name in own if name not in {f.name for f in fields(part)}]:
        raise ValueError(
            f"{axis} {kind.__name__} holds {', '.join(unknown)} beside its fields, and two that differ there would be "
            "taken for one: declare them as fields, with @dataclass(frozen=True) above the class"
        )
    places = [place for place in KINDS if kind in kinds_of(place).values()]
    if places and axis not in places:
        derive = f"; {axis} {kind.__name__} must derive from {TRIED[axis][0].__name__}" if axis in TRIED else ""
        raise ValueError(f"{axis} of a rule cannot be {part!r}, which is its {places[0]}{derive}")


def made_of(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    """A part of this kind, with its defaults; fields without one are those of ``options``."""
    needed = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    if missing := [field for field in needed if field not in options]:
        raise ValueError(f"{name} {kind.__name__} has no default for {', '.join(missing)}: give {missing[0]!r} a value")
    return kind(**{field: options[field] for field in needed})
