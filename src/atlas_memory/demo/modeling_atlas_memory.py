"""For `from_pretrained(..., trust_remote_code=True)`: the model's code is the package atlas-memory."""

from atlas_memory import AtlasConfig, AtlasForCausalLM, AtlasModel

__all__ = ["AtlasConfig", "AtlasForCausalLM", "AtlasModel"]
