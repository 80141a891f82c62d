"""Language models for transformers.

``AtlasConfig`` is registered with AutoConfig when it is imported, and the models with AutoModel and
AutoModelForCausalLM when they are, which is when the first ``AtlasConfig`` is made at the latest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .presets import PRESETS, Preset

if TYPE_CHECKING:
    from .cache import AtlasCache
    from .configuration import AtlasConfig
    from .modeling import AtlasForCausalLM, AtlasModel

__all__ = ["PRESETS", "AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel", "Preset"]

_LATER = {
    "AtlasCache": ".cache",
    "AtlasConfig": ".configuration",
    "AtlasForCausalLM": ".modeling",
    "AtlasModel": ".modeling",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
