"""Language models for transformers. Importing `AtlasConfig` registers it and the models with the Auto classes."""

from typing import TYPE_CHECKING

from atlas_memory.lazy_import import lazy_getattr

from .presets import PRESETS, Preset

if TYPE_CHECKING:
    from .cache import AtlasCache
    from .configuration import AtlasConfig
    from .modeling import AtlasForCausalLM, AtlasModel
    from .saved_memory import Memory

__all__ = ["PRESETS", "AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel", "Memory", "Preset"]

__getattr__ = lazy_getattr(
    __name__,
    {
        "AtlasCache": ".cache",
        "AtlasConfig": ".configuration",
        "AtlasForCausalLM": ".modeling",
        "AtlasModel": ".modeling",
        "Memory": ".saved_memory",
    },
)
