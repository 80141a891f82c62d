"""Copying: random tokens, then the same again. What a model makes of the second time is recall and nothing else."""

from __future__ import annotations

from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory import NeuralMemory
from atlas_memory.memory import RULES
from atlas_memory.models import AtlasForCausalLM

from .language import descend, model
from .study import ASKED_SEED, Study

SYMBOLS, LENGTHS, BATCH = 64, (32, 64), 16
LOOKS = (50, 100, 200, 300)
"""Steps after which it is counted what is right."""
APART = ": projections begin apart"


def copies(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``COPYING``."""
    torch.manual_seed(seed)
    net = model(case.removesuffix(APART), dim)
    if case.endswith(APART):
        _begin_apart(net)
    g = torch.Generator().manual_seed(seed)

    def loss(_: int) -> Tensor:
        logits, answers = _ask(net, g)
        return F.cross_entropy(logits.flatten(0, 1), answers.flatten())

    steps, found = descend(net, LOOKS[-1], loss), {}
    for first, last in pairwise((0, *(LOOKS[:1] if quick else LOOKS))):
        for _ in islice(steps, 2 if quick else last - first):
            pass
        found[f"copied {last}"] = _right(net)
    return found


def _ask(net: AtlasForCausalLM, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits ``[batch, length - 1, vocabulary]`` and what is right, for the second time that a batch is read."""
    length = int(torch.randint(LENGTHS[0], LENGTHS[1] + 1, (), generator=g))
    ids = torch.randint(SYMBOLS, (BATCH, length), generator=g).repeat(1, 2)
    return net(ids, use_cache=False).logits[:, length:-1], ids[:, length + 1 :]


@torch.no_grad()
def _right(net: AtlasForCausalLM) -> float:
    g = torch.Generator().manual_seed(ASKED_SEED)
    shares = []
    for _ in range(4):
        logits, answers = _ask(net, g)
        shares.append(float((logits.argmax(-1) == answers).float().mean()))
    return sum(shares) / len(shares)


@torch.no_grad()
def _begin_apart(net: AtlasForCausalLM) -> None:
    """Draw what begins together in a layer each for itself."""
    for layer in net.modules():
        if isinstance(layer, NeuralMemory):
            for projection in (layer.qkv, layer.out):
                nn.init.normal_(projection.weight, std=net.config.initializer_range)
            layer.convolution.reset_parameters()


COPYING = Study(
    name="copying",
    shows="32 to 64 random tokens of 64 kinds, then the same again, in one document: a model of preset tiny, AdamW at "
    "3e-3 and batches of 16; the share of tokens of the second reading that are predicted right after 50, 100, 200 and "
    "300 steps. Chance is 0.016. 'Projections begin apart': without `NeuralMemory.reset_parameters`.",
    cases=("attention", *RULES, *(f"{rule}{APART}" for rule in ("gated-deltanet", "deltanet", "titans", "omeganet"))),
    widths=(16,),
    measure=copies,
    columns=("candidate", "head", *(f"right, {step} steps" for step in LOOKS), "seeds", "revision"),
)
