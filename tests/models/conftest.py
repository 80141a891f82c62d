"""A small model of each block, with weights far enough from zero that mistakes show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atlas_memory.memory import RULES
from atlas_memory.models import AtlasConfig, AtlasForCausalLM


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make() -> Callable[..., AtlasForCausalLM]:
    def build(block: str = "lmm", rule: str = "atlas", **changes: Any) -> AtlasForCausalLM:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocab_size": 31,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "rule": rule,
            "block": block,
            "window": min(3, RULES[rule].window.size),
            "chunk_size": 4,
            "attention_window": 5 if block == "mag" else None,
            "initializer_range": 0.3,
            "bos_token_id": 29,
            "eos_token_id": 29,
            "pad_token_id": 30,
        }
        config = AtlasConfig(**(sizes | changes))
        return AtlasForCausalLM(config).eval()

    return build


@pytest.fixture(params=["lmm", "mag"])
def model(request: pytest.FixtureRequest, make: Callable[..., AtlasForCausalLM]) -> AtlasForCausalLM:
    return make(request.param)


@pytest.fixture(params=[("lmm", rule) for rule in RULES] + [("mag", "atlas"), ("mag", "titans")], ids="-".join)
def every_model(request: pytest.FixtureRequest, make: Callable[..., AtlasForCausalLM]) -> AtlasForCausalLM:
    """Every rule, and every block, for what must hold of all."""
    return make(*request.param)
