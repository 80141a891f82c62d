"""Training a model on a synthetic task, and the share of right answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.layers.short_conv import ShortConvolution
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.monitor.hooks import eval_mode
from atlas_memory.rules.rule import RULES

from .task import IGNORED, Task

ROWS = 256  # sequences that are asked at once, at most
TOKENS = 2**16  # of these
STEPS_BETWEEN = 50  # steps after which a training that may stop early is asked


def task_model(
    name: str, vocabulary: int, width: int, head: int, layers: int = 2, window: int | None = None, **options: Any
) -> AtlasForCausalLM:
    """A small language model of a rule, a block, or a rule in a block, as `mag:titans`, with rules as the byte presets
    have them: a hidden layer of a memory is as wide as its head.

    Args:
        name: Of `RULES`, of `BLOCKS`, or of both with a colon between. With `+conv`, what a mixer reads goes through a
            convolution of four tokens first, as q, k and v do in memories: for attention, which has none. With
            `+4d`, a memory's hidden layer is four times as wide as its head, as in the papers; with `+degree-2`, keys
            and queries have polynomial features (ATLAS, Eq. 5).
        vocabulary: Tokens there are.
        width: Of the model.
        head: Width of a head.
        layers: Blocks, each of a mixer and an MLP.
        window: Tokens of sliding windows, in blocks that have them; None: 64.
        options: Of `AtlasConfig`.

    Raises:
        ValueError: an unknown name, `+4d` of a memory without a hidden layer, `+degree-2` of a block without a memory,
            or heads that do not divide the width.
    """
    name, *added = re.split(r"\+(?=(?:conv|4d|degree-2)(?:\+|$))", name)
    block, _, rule = name.rpartition(":")
    kind: dict[str, Any] = {"block": block, "rule": rule} if block else {"rule": name}
    changes: dict[str, Any] = {}
    if not block and name not in RULES and name in BLOCKS:
        kind = {"block": name}
    if (known := BLOCKS.get(kind.get("block", "lmm"))) and known.window:
        kind["attention_window"] = window
    if "4d" in added:
        changes["network"] = {"expansion": 4}
    if "degree-2" in added:
        changes["features"] = {"kind": "Polynomial", "degree": 2}
    if changes:
        kind["rule_options"] = changes
    if head < 1 or width < 1 or width % head:
        raise ValueError(f"heads of {head} do not divide a width of {width}")
    config = AtlasConfig.preset(
        "tiny",
        vocab_size=vocabulary,
        hidden_size=width,
        num_attention_heads=width // head,
        num_hidden_layers=layers,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=width**-0.5,  # 0.02 is that of 2,500 channels
        **kind,
        **options,
    )
    model = AtlasForCausalLM(config)
    if "conv" in added:
        for block in model.model.layers:
            block.mixer_norm = nn.Sequential(block.mixer_norm, _Convolution(width))
    return model


class _Convolution(nn.Module):
    """The memories' short convolution, of a whole sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = ShortConvolution(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x, None, None)[0]


class Autoencoder(nn.Module):
    """MAD's model for compression: the last hidden state of a language model, a position added, through an MLP.

    Args:
        model: The encoder.
        length: Tokens of a sequence.
    """

    def __init__(self, model: AtlasForCausalLM, length: int) -> None:
        super().__init__()
        width, vocabulary = model.config.hidden_size, model.config.vocab_size
        self.model = model
        self.register_buffer("positions", _sinusoids(length, width), persistent=False)
        self.decoder = nn.Sequential(
            *(nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()),
            *(nn.RMSNorm(width), nn.Linear(width, width), nn.GELU()),
            *(nn.RMSNorm(width), nn.Linear(width, vocabulary)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every token, `[rows, length, vocabulary]`, of tokens `[rows, length]`."""
        last = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1:]
        return self.decoder(last + self.positions)


def _sinusoids(length: int, width: int) -> Tensor:
    places = torch.arange(length)[:, None] / 10_000 ** (torch.arange(width // 2) / (width // 2 - 1))
    return torch.cat([places.sin(), places.cos()], 1)


def _asked_logits(model: Any, ids: Tensor, asked: Tensor) -> Tensor:
    """The logits at the places that are asked, `[places, vocabulary]`."""
    if isinstance(model, Autoencoder):
        return model(ids)[asked]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return model.get_output_embeddings()(hidden[asked])


def accuracy(model: Any, task: Task, count: int, seed: int) -> float:
    """The share of right answers to `count` fresh sequences."""
    right = [answer for row in _right(model, task, count, seed) for answer in row.tolist()]
    return sum(right) / max(1, len(right))


def share_of_rows(model: Any, task: Task, count: int, seed: int) -> float:
    """The share of `count` fresh sequences of which every answer is right: what a model that writes its likeliest token
    each time answers to the letter."""
    return sum(bool(row.all()) for row in _right(model, task, count, seed)) / count


@torch.inference_mode()
def _right(model: Any, task: Task, count: int, seed: int) -> Iterator[Tensor]:
    """Whether each answer to a sequence is right, bool `[answers]`."""
    device = next(model.parameters()).device
    ids, labels = (x.to(device) for x in task.rows(count, seed, asked=True))
    rows = max(1, min(ROWS, TOKENS // task.length))
    with eval_mode(model):
        for some, wanted in zip(ids.split(rows), labels.split(rows), strict=True):
            asked = wanted != IGNORED
            right = _asked_logits(model, some, asked).argmax(-1) == wanted[asked]
            yield from right.split(asked.sum(1).tolist())


def train_on(
    model: Any,
    tasks: Sequence[Task],
    steps: int,
    tokens: int,
    learning_rate: float,
    seed: int,
    solved: float = 1.0,
    progress: Callable[[float], None] | None = None,
) -> int:
    """Train with AdamW, betas 0.9 and 0.98, a warm-up of a twentieth and a cosine to zero, on one of the tasks a step,
    each in its turn; on a GPU if there is one, where the model stays.

    Args:
        model: A causal language model of transformers, or an `Autoencoder`.
        tokens: Of a step: as many sequences as have so many.
        solved: Stop where so large a share of the answers to the hardest task, the last, is right.
        progress: Called with the share of the steps.

    Returns:
        The steps taken.

    Raises:
        ValueError: there is no task, or the loss is nan or inf.
    """
    if not tasks:
        raise ValueError("there is no task to train on")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    draws = [_draw(task, max(1, tokens // task.length), seed) for task in tasks]
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    warm = max(1, steps // 20)
    for step in range(steps):
        rate = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))))
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * rate
        ids, labels = (x.to(device) for x in next(draws[step % len(draws)]))
        asked = labels != IGNORED
        loss = F.cross_entropy(_asked_logits(model, ids, asked), labels[asked])
        optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            raise ValueError(f"the loss or its gradient is nan or inf at step {step + 1}")
        optimiser.step()
        if progress is not None:
            progress((step + 1) / steps)
        if solved < 1.0 and (step + 1) % STEPS_BETWEEN == 0 and accuracy(model, tasks[-1], ROWS, seed + 1) >= solved:
            return step + 1
    return steps


def _draw(task: Task, rows: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches to train on, without end: of new sequences, or of the task's in a new order each time."""
    if task.sequences is None:
        part = 0
        while True:
            ids, labels = task.rows(64 * rows, seed * 100_003 + part, False)
            yield from zip(ids.split(rows), labels.split(rows), strict=True)
            part += 1
    ids, labels = task.rows(task.sequences, seed, False)
    g = torch.Generator().manual_seed(seed)
    while True:
        for some in torch.randperm(len(ids), generator=g).split(rows):
            yield ids[some], labels[some]
