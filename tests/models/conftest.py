"""A small model of each block, with weights far enough from zero that mistakes show."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import RULES
from atlas_memory.models import AtlasConfig, AtlasForCausalLM

_BUILT: dict[str, tuple[AtlasForCausalLM, torch.Tensor]] = {}  # each once a process: it takes longer than to copy it


@pytest.fixture
def make() -> Callable[..., AtlasForCausalLM]:
    def build(block: str = "lmm", rule: str | None = None, **changes: Any) -> AtlasForCausalLM:
        rule = rule or ("hope" if block == "hope" else "atlas")
        sizes: dict[str, Any] = {
            "vocab_size": 31,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "block": block,
            "attention_window": 5 if BLOCKS[block].window else None,
            "initializer_range": 0.3,
            "bos_token_id": 29,
            "eos_token_id": 29,
            "pad_token_id": 30,
        }
        if BLOCKS[block].memory:
            sizes |= {"rule": rule, "window": min(3, RULES[rule].window.size), "chunk_size": 4}
        sizes |= changes
        key = repr(sizes)
        if key not in _BUILT:
            torch.manual_seed(0)
            _BUILT[key] = AtlasForCausalLM(AtlasConfig(**sizes)).eval(), torch.get_rng_state()
        model, drawn = _BUILT[key]
        torch.set_rng_state(drawn)
        return copy.deepcopy(model)

    return build


# Every block, those with a memory also behind persistent tokens; the first two as fits "atlas".
MODELS: dict[str, dict[str, Any]] = {
    "lmm": {"block": "lmm", "rule_options": {"network": {"expansion": 1}}},
    "mag": {"block": "mag", "rule_options": {"network": {"expansion": 1}}},
    "lmm-persistent": {"block": "lmm", "rule": "titans", "window": 1, "persistent_tokens": 2},
    "mag-persistent": {"block": "mag", "rule": "omeganet", "persistent_tokens": 2},
    "mal": {"block": "mal", "rule": "omeganet"},
    "mal-persistent": {"block": "mal", "rule": "titans", "window": 1, "persistent_tokens": 2},
    "mac": {"block": "mac", "rule": "omeganet"},
    "mac-persistent": {"block": "mac", "rule": "titans", "window": 1, "persistent_tokens": 2},
    "hope": {"block": "hope", "continuum_periods": [1, 4]},
    "hope-persistent": {"block": "hope", "persistent_tokens": 2},
    "hope-attention": {"block": "attention", "continuum_periods": [1, 4]},
    "hierarchy": {
        "rule": "tnt",
        "chunk_size": None,
        "hierarchy": {"global_chunk": 4, "local_chunks": [2, 1], "shard": 6},
    },
    "swa": {"block": "swa"},
    "attention": {"block": "attention"},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, make: Callable[..., AtlasForCausalLM]) -> AtlasForCausalLM:
    return make(**MODELS[request.param])


EVERY = {f"lmm-{rule}": {"block": "lmm", "rule": rule} for rule in RULES}


@pytest.fixture(params=EVERY | MODELS)
def every_model(request: pytest.FixtureRequest, make: Callable[..., AtlasForCausalLM]) -> AtlasForCausalLM:
    """Every block, and every rule, for what must hold of all."""
    return make(**(EVERY | MODELS)[request.param])
