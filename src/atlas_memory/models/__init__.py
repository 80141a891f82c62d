"""Language models for transformers.

``AtlasConfig`` is registered with AutoConfig when it is imported, and the models with AutoModel and
AutoModelForCausalLM when they are, which is when the first ``AtlasConfig`` is made at the latest.
"""

from typing import TYPE_CHECKING

from atlas_memory.later import later

from .presets import PRESETS, Preset

if TYPE_CHECKING:
    from .cache import AtlasCache
    from .configuration import AtlasConfig
    from .modeling import AtlasForCausalLM, AtlasModel

__all__ = ["PRESETS", "AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel", "Preset"]

__getattr__ = later(
    __name__,
    {
        "AtlasCache": ".cache",
        "AtlasConfig": ".configuration",
        "AtlasForCausalLM": ".modeling",
        "AtlasModel": ".modeling",
    },
)
