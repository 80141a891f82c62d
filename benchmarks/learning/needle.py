"""Needles: the pairs of study recall, learned in segments of 128 tokens whose memory is carried, and asked through
noise far longer than any segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from atlas_memory.layers.stateful import Stateful
from atlas_memory.memory import RULES

from .recall import NOISE, Recall, Task, learn, right
from .study import Study

ROWS, SEGMENT, STEPS, LONGEST = 32, 128, 1600, 128
"""Rows read in a step, tokens of a segment, steps of training, segments of the longest document."""


@dataclass
class Stream:
    """Rows of documents, a segment at a time: the first holds the pairs, and in every one, noise for the rest, its last
    tokens ask for all of them again (half of the time; in a document's last segment always).

    Documents of half of the rows are a segment long. Those of the others are up to as many as `draw` is told, even in
    logarithm: a memory learns to hold on to pairs only where they are asked for late."""

    task: Task
    g: torch.Generator
    left: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.long))
    pairs: tuple[Tensor, Tensor] | None = None

    def draw(self, longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The next segment of every row: keys and values `[rows, 128]`, answers `[rows, pairs]`, which rows begin a
        document and which ask `[rows]`."""
        task, g = self.task, self.g
        first = self.left == 0
        most = torch.where(torch.arange(ROWS) % 2 == 0, 1, longest)
        new = torch.exp(torch.rand(ROWS, generator=g) * (most + 0.999).log()).long().clamp(min=1).minimum(most)
        self.left = torch.where(first, new, self.left) - 1
        asks = (self.left == 0) | (torch.rand(ROWS, generator=g) < 0.5)
        keys, values, answers = task.batch(ROWS, SEGMENT, g)
        noise = [torch.randint(task.symbols, task.symbols + NOISE, keys.shape, generator=g) for _ in range(2)]
        asked = keys[:, -task.pairs :]
        if self.pairs is not None:  # of documents that go on
            order = torch.rand(ROWS, task.pairs, generator=g).argsort(-1)
            asked, answers = (
                torch.where(first[:, None], now, old.gather(1, order))
                for now, old in zip((asked, answers), self.pairs, strict=True)
            )
        self.pairs = asked, answers
        keys, values = (torch.where(first[:, None], *both) for both in zip((keys, values), noise, strict=True))
        question = torch.arange(SEGMENT) >= SEGMENT - task.pairs
        keys = torch.where(question, F.pad(asked, (SEGMENT - task.pairs, 0)), keys)
        values = torch.where(question, task.symbols + NOISE, values)
        quiet = question & ~asks[:, None]
        keys, values = (torch.where(quiet, other, own) for own, other in zip((keys, values), noise, strict=True))
        return keys, values, answers, first, asks


def losses(model: Recall, stream: Stream, steps: int) -> Iterator[Tensor]:
    """Of every step: each row's next segment, read from what it remembers. Documents are of one segment in the first
    quarter, and grow over the next half, evenly in logarithm, to ``LONGEST``."""
    layer, state = cast(Stateful, model.mixer), None
    for step in range(steps):
        longest = round(LONGEST ** min(1.0, max(0.0, 2 * step / steps - 0.5)))
        keys, values, answers, first, asks = stream.draw(longest)
        starts = F.pad(first[:, None], (0, SEGMENT - 1))
        if state is not None:
            state = state.detach().straight_through(layer.initial_state())
        logits, state = model.read(keys, values, state, starts)
        yield F.cross_entropy(logits[asks].flatten(0, 1), answers[asks].flatten())


def trained(case: str, task: Task, dim: int, seed: int, steps: int) -> Recall:
    """After ``steps`` on rows whose memory is carried."""
    torch.manual_seed(seed)
    model = Recall(case, task, dim)
    learn(model, losses(model, Stream(task, torch.Generator().manual_seed(seed)), steps), steps)
    return model.eval()


def carried(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``NEEDLE``."""
    task = Task(pairs=8, symbols=16, room=120)
    model = trained(case, task, dim, seed, 2 if quick else STEPS)
    lengths = (128,) if quick else (128, 2048, 4096, 16384)
    return {f"recall {length}": right(model, task, length, 16 if quick else 64) for length in lengths}


NEEDLE = Study(
    name="needle",
    shows="The pairs and the layer of study recall, trained for 1,600 steps on segments of 128 tokens whose state is "
    "carried, documents of up to 128 segments: the share of right answers when the questions come after 128 to 16,384 "
    "tokens, all but the first 120 of them noise. Chance is 0.06.",
    cases=tuple(RULES),
    widths=(16, 32, 64),
    measure=carried,
    columns=("candidate", "head", "recall 128", "recall 2,048", "recall 4,096", "recall 16,384", "seeds", "revision"),
)
