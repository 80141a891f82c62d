"""Every rule and block of the family on one small recall task: 300 steps each, one table.

    python examples/family.py                  # all, about ten minutes on two cores
    python examples/family.py titans mac       # some

A sequence shows 8 random key-value pairs, one token each, then asks for the keys in another order: the loss begins at
ln 16 = 2.77, and only what was carried from the first half can lower it. One layer of width 32, chunks of 4.
"""

import sys
import time

import torch
from layer import PAIRS, SYMBOLS, batch
from torch import nn

from atlas_memory import RULES
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import Muon

DIM, HEADS, CHUNK = 32, 2, 4


def options(rule: str) -> dict:
    """The rule at a size for this task: a narrow memory, Muon once a chunk, windows of two tokens."""
    changes: dict = {"window": {"size": min(2, RULES[rule].window.size), "chunk": CHUNK}}
    if hasattr(RULES[rule].network, "expansion"):
        changes["network"] = {"expansion": 1}
    if isinstance(RULES[rule].optimiser, Muon):
        changes["optimiser"] = {"every": None}
    return {"rule": RULES[rule].vary(**changes), "eps": 1e-6}


CASES = {
    **{rule: ("lmm", options(rule)) for rule in RULES},
    "mag": ("mag", options("omeganet") | {"attention_window": 4}),
    "mal": ("mal", options("omeganet") | {"attention_window": 4}),
    "mac": ("mac", options("omeganet") | {"attention_window": 8, "persistent_tokens": 2}),
    "hope (the block)": ("hope", options("hope")),
    "tnt (a hierarchy)": (
        "lmm",
        {"rule": options("tnt")["rule"], "eps": 1e-6}
        | {"hierarchy": {"global_chunk": CHUNK, "local_chunks": [CHUNK], "shard": 4 * CHUNK}},
    ),
    "swa (sees 4 tokens)": ("swa", {"attention_window": 4}),
    "attention": ("attention", {}),
}
"""Name: block and the arguments of its mixer."""


class Recall(nn.Module):
    """Two symbols a token, a mixer, a guess of the value."""

    def __init__(self, block: str, arguments: dict) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(SYMBOLS, DIM), nn.Embedding(SYMBOLS + 1, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.mixer = BLOCKS[block].make(DIM, HEADS, **arguments)
        self.out = nn.Linear(DIM, SYMBOLS)

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.key(keys) + self.value(values))
        y, _state = self.mixer(x)
        return self.out(x + y)


def train(name: str, steps: int = 300) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Recall(*CASES[name])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        keys, values, answers = batch(32, generator)
        loss = nn.functional.cross_entropy(model(keys, values)[:, PAIRS:].flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}")
    print("| | first 20 steps | steps 280-300 | seconds |\n|---|---|---|---|")
    for name in names or CASES:
        start = time.perf_counter()
        losses = train(name)
        first, last = (sum(part) / 20 for part in (losses[:20], losses[-20:]))
        print(f"| {name} | {first:.2f} | {last:.2f} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
