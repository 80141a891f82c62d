"""Language: a byte model of preset ``tiny``, trained on short stretches of a text and read on past them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory import set_execution
from atlas_memory.data import Corpus, RandomCrops, Tokens, byte_tokenizer
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import RULES
from atlas_memory.models import AtlasConfig, AtlasForCausalLM

from .study import Study, heads

BATCH, LENGTH, HELD_OUT = 16, 128, 1024
PLACES = ((0, 128), (128, 512), (512, 1024))
STEPS = 2500
"""Of 16 x 128 bytes: 5.1 million."""
PARAMETERS = 513_000
"""Of every model: what preset ``tiny`` has with its own rule."""


def model(case: str, dim: int, **options: Any) -> AtlasForCausalLM:
    """Preset ``tiny`` with heads of ``dim``: the rule of that name, or the block, with "block " before a name that is
    also a rule's; ``options``: of ``AtlasConfig``."""
    kind = {"rule": case} if case in RULES else {"block": case.removeprefix("block ")}
    return AtlasForCausalLM(AtlasConfig.preset("tiny", num_attention_heads=heads(dim), **kind, **options))


def as_large(case: str, dim: int) -> AtlasForCausalLM:
    """``model`` with MLPs as wide as makes it nearest to ``PARAMETERS``, so that what a memory holds in M_0 is paid
    for."""
    with torch.device("meta"):
        narrow, wider = (model(case, dim, intermediate_size=width).num_parameters() for width in (8, 16))
    return model(case, dim, intermediate_size=8 + max(0, round(8 * (PARAMETERS - narrow) / (wider - narrow))))


def losses(net: AtlasForCausalLM, ids: Tensor) -> Tensor:
    """Bits of every byte but the first ``[batch, length - 1]``."""
    logits = net(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none") / math.log(2)


def descend(net: AtlasForCausalLM, steps: int, loss: Callable[[int], Tensor]) -> Iterator[float]:
    """``steps`` of AdamW at 3e-3 with a warm-up of 20 and a cosine to a tenth; the ``loss`` of each, after it."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        here = loss(step)
        optimiser.zero_grad()
        here.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        yield float(here.detach())


def train(net: AtlasForCausalLM, tokens: np.ndarray, seed: int, steps: int) -> float:
    """``descend`` on random crops; bits of the last 50."""
    crops = RandomCrops(tokens, LENGTH, steps * BATCH, seed)

    def loss(step: int) -> Tensor:
        return losses(net, torch.stack([crops[step * BATCH + i]["input_ids"] for i in range(BATCH)])).mean()

    return statistics.fmean(list(descend(net, steps, loss))[-50:])


@torch.no_grad()
def by_place(net: AtlasForCausalLM, tokens: np.ndarray, stretches: int) -> dict[str, float]:
    """Bits by place over stretches of 1,024 held-out bytes, spread evenly."""
    starts = np.linspace(0, len(tokens) - HELD_OUT, stretches).astype(int)
    ids = torch.from_numpy(np.stack([tokens[s : s + HELD_OUT] for s in starts]).astype(np.int64))
    bits = torch.cat([losses(net.eval(), part) for part in ids.split(8)])
    return {f"{first}-{last}": float(bits[:, max(first - 1, 0) : last - 1].mean()) for first, last in PLACES}


def bits(
    case: str,
    dim: int,
    seed: int,
    quick: bool,
    text: Path | None = None,
    steps: int = STEPS,
    compiled: bool = False,
) -> dict[str, float]:
    """See ``LANGUAGE``."""
    corpus, tokenizer = Corpus.load(text), byte_tokenizer()
    train_on, held_out = (Tokens.of(tokenizer, part).ids for part in (corpus.train, corpus.held_out))
    if len(held_out) < HELD_OUT:
        raise ValueError(
            f"--text {text}: {len(held_out)} bytes of it are held out, and {HELD_OUT} are read in one piece"
        )
    torch.manual_seed(seed)
    net = as_large(case, dim)
    if compiled and BLOCKS[net.config.block].memory:
        set_execution(net, compiled=True)
    started = time.process_time()
    training = train(net, train_on, seed, 2 if quick else steps)
    seconds = time.process_time() - started
    found = by_place(net, held_out, 8 if quick else 128)
    sizes = {"parameters": float(net.num_parameters()), "seconds": seconds}
    return {"training": training, **found, **sizes}


LANGUAGE = Study(
    name="language",
    shows="A byte model of preset tiny, its MLPs as wide as makes 513,000 parameters with every rule, trained by AdamW "
    "at 3e-3 on 16 random crops of 128 bytes a step, 2,500 steps unless `--steps` says otherwise, of the standard "
    "library's source or of `--text`: bits a byte of the last 50 steps, and of 128 stretches of 1,024 held-out bytes, "
    "each read in one piece, by place; and seconds of one core for training.",
    cases=("attention", "swa", *RULES, "block hope"),
    widths=(64,),
    measure=bits,
    columns=(
        "candidate",
        "head",
        "parameters",
        "training",
        "0-128",
        "128-512",
        "512-1,024",
        "seconds",
        "seeds",
        "revision",
    ),
)
