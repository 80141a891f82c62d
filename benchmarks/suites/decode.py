"""One token after another, from a context that was read before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from atlas_memory import NeuralMemory
from atlas_memory.memory import resolve_rule
from benchmarks import cost
from benchmarks.operations import Attention, by_definition, in_both, inputs, seeded
from benchmarks.registry import Benchmark, Candidate, Operation, Row, Shape, Wrap, as_it_is, up_to
from benchmarks.suites.mixers import OMEGANET

TOKENS = 64
"""Tokens of one call: a whole chunk, so that every place in a chunk is met."""
RULE = resolve_rule(OMEGANET, chunk_size=64)


def _layer(shape: Shape, dtype: torch.dtype) -> NeuralMemory:
    return seeded(partial(NeuralMemory, shape.width, shape.heads, RULE), dtype, shape.device)


def _steps(layer: NeuralMemory, shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
    """Decoding from the state after the context, which was read in one call."""
    one: Callable[..., Any] = wrap(layer)
    with torch.inference_mode():
        before = inputs(shape, dtype, shape.context, seed=1)
        fresh = layer(before[:, :0])[1]
        state = layer(before)[1]

    def function(x: Tensor) -> Tensor:
        outputs, now = [], state
        with torch.inference_mode():
            for token in x.split(1, 1):
                y, now = one(token, now)
                outputs.append(y)
        return torch.cat(outputs, 1)

    sizes = {"state_bytes_fresh": float(fresh.nbytes), "state_bytes": float(state.nbytes)}
    return Operation(function, inputs(shape, dtype), facts=sizes)


def decode_memory(name: str, always: int | None = None, **options: Any) -> Candidate:
    """Our layer, a call a token; ``always``: after so many tokens, whatever the context of the others is."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        shape = shape if always is None else replace(shape, context=min(always, shape.context))
        return _steps(_layer(shape, dtype), shape, dtype, wrap)

    def oracle(shape: Shape, dtype: torch.dtype) -> Operation:
        return _steps(by_definition(_layer(shape, dtype)), shape, dtype, as_it_is)

    def reduce(shape: Shape) -> Shape:
        return replace(shape, time=min(shape.time, 70), context=min(shape.context, 100))

    return Candidate(name, build, oracle, reduce=reduce, backward=False, **options)


def decode_attention(name: str, **options: Any) -> Candidate:
    """Softmax attention over a cache of keys and values that has room for all from the start."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        mixer: Attention = seeded(partial(Attention, shape.width, shape.heads), dtype, shape.device)
        with torch.inference_mode():
            past = mixer.split(inputs(shape, dtype, shape.context, seed=1))[1:]
            cache = torch.cat([past, past.new_zeros(*past.shape[:3], shape.time, shape.dim)], 3)

        def one(token: Tensor, at: int) -> Tensor:
            q, k, v = mixer.split(token)
            cache[:, :, :, at : at + 1] = torch.stack([k, v])
            keys, values = cache[:, :, :, : at + 1]
            return mixer.join(F.scaled_dot_product_attention(q, keys, values))

        def function(x: Tensor) -> Tensor:
            with torch.inference_mode():
                return torch.cat([one(token, shape.context + i) for i, token in enumerate(x.split(1, 1))], 1)

        held = float(past.numel() * past.element_size())
        return Operation(function, inputs(shape, dtype), facts={"state_bytes_fresh": 0.0, "state_bytes": held})

    return Candidate(name, build, cost=cost.attention, backward=False, **options)


def decode_cache(name: str, **options: Any) -> Candidate:
    """Softmax attention over transformers' ``DynamicCache``, which a model from its hub decodes with by default: every
    token makes new tensors of all keys and values."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        mixer: Attention = seeded(partial(Attention, shape.width, shape.heads), dtype, shape.device)
        with torch.inference_mode():
            past = mixer.split(inputs(shape, dtype, shape.context, seed=1))[1:]

        def function(x: Tensor) -> Tensor:
            outputs, cache = [], DynamicCache()
            with torch.inference_mode():
                cache.update(past[0], past[1], 0)
                for token in x.split(1, 1):
                    q, k, v = mixer.split(token)
                    keys, values = cache.update(k, v, 0)
                    outputs.append(mixer.join(F.scaled_dot_product_attention(q, keys, values)))
            return torch.cat(outputs, 1)

        held = float(past.numel() * past.element_size())
        return Operation(function, inputs(shape, dtype), facts={"state_bytes_fresh": 0.0, "state_bytes": held})

    return Candidate(name, build, cost=cost.attention, backward=False, **options)


SHORT = 1024
STEADY = f"omeganet, chunk 64, compiled, after {SHORT:,}"


def remarks(rows: list[Row]) -> list[str]:
    """A token after a long context against one after a short one, timed in turns."""
    medians = {(row["candidate"], row["context"]): row["median"] for row in rows if "median" in row}
    ratios = [
        (context, medians["omeganet, chunk 64, compiled", context] / steady)
        for (name, context), steady in medians.items()
        if name == STEADY and context > SHORT and ("omeganet, chunk 64, compiled", context) in medians
    ]
    return [
        f"After {context:,} tokens a token takes {ratio:.2f} of its time after {SHORT:,}." for context, ratio in ratios
    ]


DECODE = Benchmark(
    name="decode",
    shows="What a token costs when they come one at a time, and what is carried between them, as the context grows.",
    shapes=tuple(Shape(batch=1, heads=4, dim=64, time=TOKENS, context=n) for n in (256, 1024, 4096, 16384, 100_000)),
    quick=tuple(Shape(batch=1, heads=2, dim=8, time=8, context=n) for n in (128, 256)),
    candidates=(
        decode_attention("softmax attention, cache", baseline=True, takes=up_to(20_000)),
        decode_cache("softmax attention, DynamicCache", takes=up_to(20_000)),
        *in_both(decode_memory, "omeganet, chunk 64"),
        decode_memory(STEADY, always=SHORT, compile=True),
    ),
    remarks=remarks,
    columns=(
        "context",
        "candidate",
        "tokens/s",
        "µs a token",
        "ms, 20 to 80 %",
        "times baseline",
        "state kB, fresh",
        "state kB",
        "compile s",
        "check",
    ),
)
