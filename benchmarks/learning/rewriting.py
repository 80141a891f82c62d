"""Rewriting: keys that are given a value again and again; what counts is the last one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_memory.memory import RULES

from .recall import NOISE, Task, right, trained
from .study import Study

TIMES = 3
"""How often every key is given a value."""


@dataclass(frozen=True)
class Rewritten(Task):
    """As ``Task``, but each of the ``pairs`` keys comes ``TIMES`` times, in any order, with a value of its own."""

    def batch(self, size: int, length: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values ``[size, length]`` and answers ``[size, pairs]``, the values that came last."""
        noise = [torch.randint(self.symbols, self.symbols + NOISE, (size, length), generator=g) for _ in range(2)]
        count = self.pairs * TIMES
        at = torch.rand(size, self.room, generator=g).argsort(-1)[:, :count].sort(-1).values
        keys = torch.rand(size, self.symbols, generator=g).argsort(-1)[:, : self.pairs]
        which = torch.rand(size, count, generator=g).argsort(-1) % self.pairs
        values = torch.randint(self.symbols, (size, count), generator=g)
        last = torch.zeros(size, self.pairs, dtype=torch.long)
        for j in range(count):
            last.scatter_(1, which[:, j : j + 1], values[:, j : j + 1])
        order = torch.rand(size, self.pairs, generator=g).argsort(-1)
        k, v = (old.scatter(1, at, new) for old, new in zip(noise, (keys.gather(1, which), values), strict=True))
        k[:, -self.pairs :] = keys.gather(1, order)
        v[:, -self.pairs :] = self.symbols + NOISE
        return k, v, last.gather(1, order)


def rewritten(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``REWRITING``."""
    task = Rewritten(pairs=8, symbols=16, room=104)
    model = trained(case, task, dim, seed, 128, 2 if quick else 400)
    return {f"recall {length}": right(model, task, length) for length in ((128,) if quick else (128, 512, 1024))}


REWRITING = Study(
    name="rewriting",
    shows="as recall, but each of 8 keys comes three times, each time with another value, and the last one is asked "
    "for. Chance is 0.06.",
    cases=("attention", *RULES),
    widths=(16,),
    measure=rewritten,
    columns=("candidate", "head", "recall 128", "recall 512", "recall 1,024", "seeds", "revision"),
)
