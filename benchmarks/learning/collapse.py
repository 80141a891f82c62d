"""Collapse: what shuts a memory out of a hybrid of memory and attention, and what keeps it in."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atlas_memory import NeuralMemory, OmegaMemory
from atlas_memory.data import Corpus, RandomCrops, Tokens, byte_tokenizer
from atlas_memory.layers.attention import SlidingWindowAttention
from atlas_memory.layers.blocks import MemoryBlock
from atlas_memory.layers.gate_projection import GateProjection
from atlas_memory.memory import RULES
from atlas_memory.monitor.hooks import memory_writes

from .language import BATCH, LENGTH
from .study import Study

STEPS, WINDOW = 400, 16
LOOKS = {"gate at 1/4": 0.25, "gate at 1/2": 0.5, "gate at the end": 1.0}
TOO_LONG = 38.0
"""Times a bare step of a normalised key: as far as the steps of the public run that collapsed went."""
STABLE = RULES["omeganet"].vary(
    features={"kind": "Identity"}, network={"kind": "Linear"}, window={"size": 4, "chunk": 16}
)
BARE = STABLE.vary(optimiser={"kind": "Momentum", "normalised": False, "online": False}, retention={"kind": "RowNorm"})
CASES: dict[str, dict[str, Any]] = {
    "stable writes": {},
    "stable writes untaught": {"taught": False},
    "wild writes": {"rule": BARE},
    "wild writes untaught": {"rule": BARE, "taught": False},
    "both branches normed": {"rule": BARE, "taught": False, "normed": True},
    "memory first": {"rule": BARE, "taught": False, "first": 0.25},
    "entropy of the gate": {"rule": BARE, "taught": False, "entropy": 0.05},
    "stable writes with both branches normed": {"normed": True},
    "stable writes with memory first": {"first": 0.25},
}


class GatedHybrid(nn.Module):
    """``g * memory(x) + (1 - g) * attention(x)`` with a gate g for every channel of every token, which starts at 1/2.

    Attributes:
        share: the mean of g in the last call.
        entropy: of g as a coin's, its mean.
        alone: whether the attention is left out.
    """

    def __init__(self, dim: int, heads: int, rule: Any, normed: bool) -> None:
        super().__init__()
        self.memory = NeuralMemory(dim, heads, rule)
        for matrix in self.memory.memory.parameters():  # rows of length 1: what is kept at its length has one
            nn.init.normal_(matrix, std=matrix.shape[-1] ** -0.5)
        self.attention = SlidingWindowAttention(dim, heads, WINDOW)
        self.gate = nn.Linear(dim, dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.norms = nn.ModuleList([nn.RMSNorm(dim) if normed else nn.Identity() for _ in range(2)])
        self.share = self.entropy = torch.zeros(())
        self.alone = False

    def forward(self, x: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        memory, attention = self.norms[0](self.memory(x)[0]), self.norms[1](self.attention(x)[0])
        g = torch.sigmoid(self.gate(x))
        self.share, self.entropy = g.mean(), nn.functional.binary_cross_entropy(g, g)
        return (memory if self.alone else g * memory + (1 - g) * attention), state


class Hybrid(nn.Module):
    """A byte model of two blocks of such mixers."""

    def __init__(self, dim: int, heads: int, rule: Any, normed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, dim)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.mixers = [GatedHybrid(dim, heads, rule, normed) for _ in range(2)]
        self.blocks = nn.ModuleList([MemoryBlock(dim, mixer, 2 * dim) for mixer in self.mixers])
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 257, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Bits of every byte but the first, ``[batch, length - 1]``."""
        x = self.embed(ids)
        for block in self.blocks:
            x, _ = block(x)
        logits = self.head(self.norm(x))[:, :-1].transpose(1, 2)
        return nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none") / math.log(2)


@contextmanager
def _spoilt(taught: bool, wild: bool) -> Iterator[None]:
    """Inside, gates ask for steps that are too long, and nothing of what is written is ``taught`` by the loss."""

    def steps(module: nn.Module, _: Any, output: Any) -> Any:
        return replace(output, eta=TOO_LONG * output.eta) if wild and isinstance(module, GateProjection) else None

    def untaught(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if taught or not isinstance(module, OmegaMemory):
            return None
        q, k, v, gates, *others = args
        return (q, k.detach(), v.detach(), gates.map(Tensor.detach), *others)

    hooks = [
        nn.modules.module.register_module_forward_hook(steps),
        nn.modules.module.register_module_forward_pre_hook(untaught),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def collapse(
    case: str, dim: int, seed: int, quick: bool, text: str | None = None, steps: int = STEPS
) -> dict[str, float]:
    """See ``COLLAPSE``."""
    plain: dict[str, Any] = {"rule": STABLE, "taught": True, "normed": False, "first": 0.0, "entropy": 0.0}
    options = plain | CASES[case]
    steps = 2 if quick else steps
    corpus, tokenizer = Corpus.load(text), byte_tokenizer()
    tokens = Tokens.of(tokenizer, corpus.train).ids
    held_out = Tokens.of(tokenizer, corpus.held_out).ids
    torch.manual_seed(seed)
    net = Hybrid(4 * dim, 4, options["rule"], options["normed"])
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    crops, found, begun = RandomCrops(tokens, LENGTH, steps * BATCH, seed), [], time.perf_counter()
    result: dict[str, float] = {}
    with _spoilt(options["taught"], options["rule"] is BARE):
        for step in range(steps):
            for mixer in net.mixers:
                mixer.alone = step < options["first"] * steps
            ids = torch.stack([crops[step * BATCH + i]["input_ids"] for i in range(BATCH)])
            loss = net(ids).mean()
            found.append(float(loss.detach()))
            entropy = torch.stack([mixer.entropy for mixer in net.mixers]).mean()
            optimiser.zero_grad()
            (loss - options["entropy"] * entropy).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            for look, share in LOOKS.items():
                if step + 1 == max(1, int(share * steps)):
                    result[look] = statistics.fmean(float(mixer.share.detach()) for mixer in net.mixers)
        rows = RandomCrops(held_out, 512, 2 if quick else 64, 0)
        ids = torch.stack([rows[i]["input_ids"] for i in range(len(rows))])
        with torch.inference_mode():
            whole = float(net(ids).mean())
            with memory_writes(net, False):
                without = float(net(ids).mean())
    seconds = time.perf_counter() - begun
    trained = statistics.fmean(found[-50:])
    return result | {"training": trained, "held out": whole, "written": without - whole, "seconds": seconds}


COLLAPSE = Study(
    name="collapse",
    shows="A byte model of two blocks in which a gate g, 1/2 at first, mixes a memory and attention over 16 tokens, "
    "g * memory + (1 - g) * attention: the mean of g after a quarter, half and all of the steps (400 of 2,048 bytes); "
    "bits a byte of the last 50 steps and of 64 held-out stretches of 512; and how many more without what the memory "
    "writes. Wild writes: "
    f"bare steps {TOO_LONG:.0f} times as long, rows kept at their length; untaught: no gradient to keys, values and "
    "the memory's gates. The remedies in the rows after that are of wild writes untaught.",
    cases=tuple(CASES),
    widths=(16,),
    measure=collapse,
    columns=(
        "candidate", *LOOKS, "training", "held out", "writes save", "seconds", "seeds",
        "revision",
    ),
)  # fmt: skip
