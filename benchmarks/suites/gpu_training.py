"""Whole language models training on a GPU: forward, backward and AdamW, in bfloat16 where autocast allows it.

A model of ours is verified with one layer of two heads, over two chunks and a few tokens, against itself in float64
with every memory read and written by ``recurrent``: losses and all gradients. The definition, too, rounds as autocast
does; as elsewhere, a candidate may be three times as far from float64 as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory import AtlasConfig, AtlasForCausalLM, OmegaMemory, set_execution
from atlas_memory.models.presets import PRESETS
from benchmarks.operations import SEED, by_definition, seeded
from benchmarks.registry import Benchmark, Candidate, Missing, Operation, Shape, Wrap

SIZES = {PRESETS[name].config["hidden_size"]: PRESETS[name].config for name in ("170m", "340m")}
"""By width; the heads are those of a shape."""
SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "tie_word_embeddings": False}
"""At any other width."""
CHUNK = 64
GROUP = 8
"""Chunks whose intermediate results are computed anew together: all of 32K tokens' would fill any GPU."""
TOKENS = 32768
"""Of one step."""
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"block": "attention"},
    "gated-deltanet": {"rule": "gated-deltanet"},
    "titans": {"rule": "titans"},
}


def sizes(shape: Shape) -> dict[str, Any]:
    """Arguments of ``AtlasConfig``."""
    heads = {"hidden_size": shape.width, "num_attention_heads": shape.heads}
    return SIZES.get(shape.width, SMALL) | heads


def ours(name: str, graphed: bool = False, **options: Any) -> Candidate:
    """One of ``MODELS``; ``graphed``: with its memories recorded as CUDA graphs, each at its first call."""
    has_memory = "rule" in MODELS[name]
    given = MODELS[name] | ({"window": 1, "chunk_size": CHUNK} if has_memory else {})

    def make(shape: Shape, dtype: torch.dtype) -> nn.Module:
        return seeded(partial(AtlasForCausalLM, AtlasConfig(**sizes(shape), **given)), dtype, shape.device)

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        model = make(shape, dtype)
        if has_memory:
            set_execution(model, recompute=GROUP, graphed=graphed)
        for module in model.modules():
            if isinstance(module, OmegaMemory) and module.graphs is not None:
                module.graphs.calls = 0
        return training(model, shape)

    def oracle(shape: Shape, dtype: torch.dtype) -> Operation:
        return training(by_definition(make(shape, dtype)), shape)

    return Candidate(name + ", graphed" * graphed, build, oracle, reduce=reduced, **options)


def deltanet_of_fla() -> Candidate:
    """Gated DeltaNet of flash-linear-attention."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        try:
            from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
        except ImportError as error:
            raise Missing(f"fla is not installed: {error}; pip install flash-linear-attention") from error
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "tie_word_embeddings")
        config = GatedDeltaNetConfig(**{name: sizes(shape)[name] for name in names}, num_heads=shape.heads)
        return training(seeded(partial(GatedDeltaNetForCausalLM, config), dtype, shape.device), shape)

    return Candidate("gated-deltanet of fla", build, reduce=reduced)


def reduced(shape: Shape) -> Shape:
    """One row of one layer; see ``sizes``."""
    return replace(shape, batch=1, heads=min(shape.heads, 2), time=min(shape.time, 2 * CHUNK + 5))


def training(model: nn.Module, shape: Shape) -> Operation:
    """The losses ``[batch, time]`` of random tokens, and one step of AdamW on all parameters."""
    parameters = tuple(model.parameters())
    vocabulary = cast(int, cast(Any, model.config).vocab_size)
    draw = torch.Generator().manual_seed(SEED)
    # The last token is left out for the check of causality, which takes the next higher ones.
    tokens = torch.randint(vocabulary - 1, (shape.batch, shape.time + 1), generator=draw).to(shape.device)
    targets = tokens[:, 1:]
    optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def losses(x: Tensor) -> Tensor:
        with torch.autocast(shape.device, torch.bfloat16):  # leaves float64 as it is
            logits = model(x, use_cache=False).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def update(gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    facts = {"parameters": float(sum(p.numel() for p in parameters))}
    return Operation(losses, tokens[:, :-1], parameters, facts, update=update)


TRAINING = Benchmark(
    name="gpu-training",
    shows="How many tokens a second models of 170M (12 heads of 64) and 340M (16) train on, 32K tokens a step.",
    shapes=tuple(
        Shape(batch=TOKENS // time, heads=width // 64, dim=64, time=time)
        for width in SIZES
        for time in (2048, 8192, 32768)
    ),
    quick=(Shape(batch=1, heads=2, dim=16, time=2 * CHUNK + 5),),
    candidates=(
        ours("attention", baseline=True),
        ours("gated-deltanet"),
        ours("titans", graphed=True),
        deltanet_of_fla(),
        ours("gated-deltanet", graphed=True),
        ours("titans"),
    ),
    columns=(
        "shape",
        "candidate",
        "parameters",
        "tokens/s",
        "ms",
        "ms, 20 to 80 %",
        "times baseline",
        "peak MB",
        "check",
    ),
    device="cuda",
)
