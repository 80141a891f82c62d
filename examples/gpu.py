"""How fast models train and decode on a GPU, as calls of PyTorch, recorded as CUDA graphs, and compiled besides.

    python examples/gpu.py                 # two layers 768 wide, 16 rows of 2,048 tokens; minutes
    python examples/gpu.py titans graphed  # one rule, one way
    python examples/gpu.py --tf32          # float32 products in TensorFloat32, PyTorch's own switch
    python examples/gpu.py --tiny          # to see that it works, also on a CPU

A row of the table is a way to compute; the numbers are the least of three.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from atlas_memory import AtlasConfig, AtlasForCausalLM, set_execution

TINY = "--tiny" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, TIME, TOKENS = (2, 128, 5) if TINY else (16, 2048, 30)
SIZES = {"vocab_size": 1000, "num_hidden_layers": 2}
SIZES |= (
    {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    if TINY
    else {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
)
PLAIN = {"window": 1, "chunk_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"block": "attention"},
    "gated-deltanet": {"rule": "gated-deltanet", **PLAIN},
    "omeganet": {"rule": "omeganet", "rule_options": {"features": {"kind": "Identity"}}, **PLAIN},
    "titans": {"rule": "titans", **PLAIN},
}
WAYS = {"as it is": {}, "graphed": {"graphed": True}, "compiled, graphed": {"graphed": True, "compiled": True}}


def seconds(call: Callable[[], object], before: int) -> float:
    """The least of three calls, after some that compile and record."""
    found = []
    for turn in range(before + 3):
        start = time.perf_counter()
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found += [time.perf_counter() - start] if turn >= before else []
    return min(found)


def measure(name: str, way: str) -> None:
    """A line of the table."""
    torch.manual_seed(0)
    model = AtlasForCausalLM(AtlasConfig(**SIZES, **MODELS[name])).to(DEVICE)
    if "rule" in MODELS[name]:
        set_execution(model, **WAYS[way])
    ids = torch.randint(SIZES["vocab_size"], (ROWS, TIME), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()  # not under autocast, which would round what the memory computes in float32
        model.zero_grad()

    def decode() -> None:
        cache = prompt
        for i in range(TOKENS):
            cache = model(ids[:1, i : i + 1], past_key_values=cache, use_cache=True).past_key_values

    trained = seconds(step, before=4)
    with torch.inference_mode():
        prompt = model(ids[:1, :64], use_cache=True).past_key_values
        decoded = seconds(decode, before=2)
    print(f"{name:15} {way:18} {1e3 * trained:8.1f} ms a step, {ROWS * TIME / trained:9,.0f} tokens/s", end="")
    print(f"   decoding {TOKENS / decoded:7,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    chosen = [name for name in MODELS if name in sys.argv] or list(MODELS)
    ways = [way for way in WAYS if way in sys.argv] or list(WAYS)
    if "--tf32" in sys.argv:
        torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else DEVICE}, torch {torch.__version__}")
    for name in chosen:
        for way in ways if "rule" in MODELS[name] else ["as it is"]:
            if not (TINY and DEVICE == "cpu" and "compiled" in way):
                measure(name, way)
