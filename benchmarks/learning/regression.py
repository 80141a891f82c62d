"""Regression in context: examples of a linear map that is another one in every sequence, then inputs alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atlas_memory.memory import RULES

from .recall import HEADS, learn, mixer
from .study import ASKED_SEED, Study

COORDINATES, EXAMPLES, QUESTIONS = 8, 48, 16


class Regression(nn.Module):
    """One mixer between two residual ends. A token is x and y = W x, or x, zeros and a mark that asks for y."""

    def __init__(self, case: str, dim: int) -> None:
        super().__init__()
        width = dim * HEADS
        self.token, self.norm = nn.Linear(2 * COORDINATES + 1, width), nn.RMSNorm(width)
        self.mixer = mixer(case, dim)
        self.out = nn.Linear(width, COORDINATES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Answers to the last tokens, ``[batch, QUESTIONS, COORDINATES]``."""
        x = self.norm(self.token(tokens))
        return self.out(x + self.mixer(x, None)[0])[:, -QUESTIONS:]


def batch(size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens ``[size, EXAMPLES + QUESTIONS, 2 COORDINATES + 1]`` and what to answer. x is normally distributed, and W
    so that coordinates of y have the variance 1."""
    x = torch.randn(size, EXAMPLES + QUESTIONS, COORDINATES, generator=g)
    y = x @ torch.randn(size, COORDINATES, COORDINATES, generator=g) * COORDINATES**-0.5
    asks = (torch.arange(EXAMPLES + QUESTIONS) >= EXAMPLES).to(x)[:, None].expand(size, -1, 1)
    return torch.cat([x, y * (1 - asks), asks], -1), y[:, -QUESTIONS:]


def regress(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``REGRESSION``."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    model, steps = Regression(case, dim), 2 if quick else 800

    def loss() -> Tensor:
        tokens, answers = batch(32, g)
        return (model(tokens) - answers).square().mean()

    learn(model, (loss() for _ in range(steps)), steps)
    tokens, answers = batch(256, torch.Generator().manual_seed(ASKED_SEED))
    with torch.no_grad():
        return {"regression left": float((model.eval()(tokens) - answers).square().mean() / answers.square().mean())}


REGRESSION = Study(
    name="regression",
    shows="48 examples (x, W x) in 8 dimensions, W another one in every sequence, then 16 x alone: one layer of two "
    "heads, 800 steps of batches of 32; the share of the squared answers that is left as error.",
    cases=("attention", *RULES),
    widths=(16,),
    measure=regress,
    columns=("candidate", "head", "error left", "seeds", "revision"),
)
