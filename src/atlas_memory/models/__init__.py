"""Language models for transformers. Importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import AtlasCache
from .configuration import AtlasConfig
from .modeling import AtlasForCausalLM, AtlasModel
from .presets import PRESETS, Preset

__all__ = ["PRESETS", "AtlasCache", "AtlasConfig", "AtlasForCausalLM", "AtlasModel", "Preset"]

AutoConfig.register(AtlasConfig.model_type, AtlasConfig)
AutoModel.register(AtlasConfig, AtlasModel)
AutoModelForCausalLM.register(AtlasConfig, AtlasForCausalLM)
