"""vLLM's entry point `vllm.general_plugins`: each of its processes calls `register`, some several times."""


def register() -> None:
    """Make `AtlasForCausalLM` known to vLLM, which imports the class itself where it needs it."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

    import atlas_memory.models.configuration  # noqa: F401 - registers it with AutoConfig

    ModelRegistry.register_model("AtlasForCausalLM", "atlas_memory.serve.vllm_model:AtlasForCausalLM")
    # Sets cache_config.mamba_block_size, which MambaBase asks for.
    MODELS_CONFIG_MAP.setdefault("AtlasForCausalLM", MambaModelConfig)
