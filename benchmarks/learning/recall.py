"""Recall: pairs of symbols, noise, then the keys again, asked further and further away than in training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import RULES

from .study import ASKED_SEED, Study, laptop

HEADS, NOISE = 2, 16
READ = 4096
"""Tokens that are read at once when questions come late; the state is carried."""


@dataclass(frozen=True)
class Task:
    """``pairs`` of ``symbols`` keys and values, one token a pair, among tokens of noise; then the keys once more."""

    pairs: int
    symbols: int
    room: int
    """Tokens, from the first on, among which the pairs lie."""

    def batch(self, size: int, length: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values ``[size, length]`` and answers ``[size, pairs]``: what to say to the last ``pairs`` tokens."""
        noise = [torch.randint(self.symbols, self.symbols + NOISE, (size, length), generator=g) for _ in range(2)]
        at = torch.rand(size, self.room, generator=g).argsort(-1)[:, : self.pairs]
        keys = torch.rand(size, self.symbols, generator=g).argsort(-1)[:, : self.pairs]
        values = torch.randint(self.symbols, (size, self.pairs), generator=g)
        order = torch.rand(size, self.pairs, generator=g).argsort(-1)
        k, v = (old.scatter(1, at, new) for old, new in zip(noise, (keys, values), strict=True))
        k[:, -self.pairs :] = keys.gather(1, order)
        v[:, -self.pairs :] = self.symbols + NOISE
        return k, v, values.gather(1, order)


def mixer(case: str, dim: int) -> nn.Module:
    """The layer that a case stands for: two heads of ``dim``, ``[batch, time, 2 dim]`` in and out, and a state."""
    attention: tuple[str, dict[str, Any]] = ("attention", {})
    block, options = attention if case == "attention" else ("lmm", {"rule": laptop(case), "eps": 1e-6})
    return BLOCKS[block].make(dim * HEADS, HEADS, **options)


class Recall(nn.Module):
    """Two symbols a token, one mixer between two residual ends, a guess of the value."""

    def __init__(self, case: str, task: Task, dim: int) -> None:
        super().__init__()
        width = dim * HEADS
        kinds = task.symbols + NOISE
        self.pairs = task.pairs
        self.key, self.value = nn.Embedding(kinds, width), nn.Embedding(kinds + 1, width)
        self.norm = nn.RMSNorm(width)
        self.mixer = mixer(case, dim)
        self.out = nn.Linear(width, task.symbols)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits of the answers ``[batch, pairs, symbols]``."""
        return self.read(keys, values)[0]

    def read(self, keys: Tensor, values: Tensor, state: Any = None, starts: Tensor | None = None) -> tuple[Tensor, Any]:
        """The same for what goes on from a state, and the state; starts: as ``document_starts`` of a layer."""
        x = self.norm(self.key(keys) + self.value(values))
        y, state = self.mixer(x, state, document_starts=starts)
        return self.out((x + y)[:, -self.pairs :]), state


def learn(model: nn.Module, losses: Iterable[Tensor], steps: int) -> None:
    """A step of AdamW for each of so many losses, each computed when its turn has come: 1e-2, warm-up and cosine."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, loss in enumerate(losses):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def trained(case: str, task: Task, dim: int, seed: int, length: int, steps: int) -> Recall:
    """After ``steps`` on batches of 32."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    model = Recall(case, task, dim)

    def loss() -> Tensor:
        keys, values, answers = task.batch(32, length, g)
        return F.cross_entropy(model(keys, values).flatten(0, 1), answers.flatten())

    learn(model, (loss() for _ in range(steps)), steps)
    return model.eval()


@torch.no_grad()
def right(model: Recall, task: Task, length: int, sequences: int = 64) -> float:
    """Share of right answers over fresh sequences of so many tokens, the questions last."""
    g, found = torch.Generator().manual_seed(ASKED_SEED), []
    for _ in range(sequences // 16):
        keys, values, answers = task.batch(16, length, g)
        state = None
        for k, v in zip(keys.split(READ, 1), values.split(READ, 1), strict=True):
            logits, state = model.read(k, v, state)
        found.append(float((logits.argmax(-1) == answers).float().mean()))
    return sum(found) / len(found)


def through_noise(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``RECALL``."""
    task = Task(pairs=8, symbols=16, room=120)
    model = trained(case, task, dim, seed, 128, 2 if quick else 400)
    lengths = (128,) if quick else (128, 512, 1024, 4096)
    return {f"recall {length}": right(model, task, length) for length in lengths}


RECALL = Study(
    name="recall",
    shows="8 pairs of 16 symbols among 128 tokens, then their keys: one layer of two heads, 400 steps at this length; "
    "the share of right answers when the questions come after 128, 512, 1,024 and 4,096 tokens, all but the first 120 "
    "of them noise. Chance is 0.06.",
    cases=("attention", *RULES),
    widths=(16, 32, 64),
    measure=through_noise,
    columns=("candidate", "head", "recall 128", "recall 512", "recall 1,024", "recall 4,096", "seeds", "revision"),
)
