"""Recall in a narrow language model: pairs of two tokens each among noise, then their keys, after noise far longer than
in training. In ``recall`` a layer reads a pair as one token; here it must store a token under the one before it."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atlas_memory import NeuralMemory
from atlas_memory.memory import RULES
from atlas_memory.models import AtlasConfig, AtlasForCausalLM

from .language import descend
from .study import ASKED_SEED, Study

KEYS, VALUES, NOISE, PAIRS = 40, 24, 30, 8
BATCH, STEPS = 12, 300
TRAINED, ASKED = 50, (50, 200, 800, 2000)
"""Tokens of noise between pairs and questions, in training and after it."""
SHORT = ": values begin short"
"""What is behind the name of a rule in the cases that show how models began before."""


def batch(size: int, noise: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids ``[size, time]``: pairs, a token of noise after each; noise; a mark; the pairs again in another order. And
    the values that are asked for ``[size, PAIRS]``, each of which stands after its key in the last ``2 PAIRS`` ids."""
    first_noise, mark = KEYS + VALUES, KEYS + VALUES + NOISE
    keys = torch.rand(size, KEYS, generator=g).argsort(-1)[:, :PAIRS]
    values = KEYS + torch.randint(VALUES, (size, PAIRS), generator=g)
    beside, between = (torch.randint(first_noise, mark, (size, n), generator=g) for n in (PAIRS, noise))
    order = torch.rand(size, PAIRS, generator=g).argsort(-1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1)
    shown = torch.stack([keys, values, beside], -1)
    ids = torch.cat([shown.flatten(1), between, torch.full((size, 1), mark), asked.flatten(1)], 1)
    return ids, asked[..., 1]


def answers(net: AtlasForCausalLM, ids: Tensor) -> Tensor:
    """Logits of the values that are asked for, ``[batch, PAIRS, vocabulary]``."""
    return net(ids, use_cache=False).logits[:, -2 * PAIRS :: 2]


def narrow(case: str, dim: int, seed: int, quick: bool) -> dict[str, float]:
    """See ``NARROW``."""
    torch.manual_seed(seed)
    name = case.removesuffix(SHORT)
    rule, _, block = name.rpartition(" in ")
    kind = {"rule": name} if name in RULES else {"block": block.removeprefix("block ")}
    kind |= {"rule": rule} if rule else {}
    sizes = {"hidden_size": 2 * dim, "num_attention_heads": 2, "num_hidden_layers": 2}
    vocabulary = KEYS + VALUES + NOISE + 1
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    net = AtlasForCausalLM(AtlasConfig.preset("nano", vocab_size=vocabulary, **sizes, **kind, **special))
    for layer in net.modules() if case.endswith(SHORT) else ():
        if isinstance(layer, NeuralMemory):
            nn.init.normal_(layer.qkv.weight[2 * layer.dim :], std=net.config.initializer_range)
    g = torch.Generator().manual_seed(seed)

    def loss(_: int) -> Tensor:
        ids, wanted = batch(BATCH, TRAINED, g)
        return F.cross_entropy(answers(net, ids).flatten(0, 1), wanted.flatten())

    for _ in islice(descend(net, STEPS, loss), 2 if quick else STEPS):
        pass
    return {f"noise {noise}": _right(net.eval(), noise) for noise in (ASKED[:1] if quick else ASKED)}


@torch.no_grad()
def _right(net: AtlasForCausalLM, noise: int) -> float:
    g = torch.Generator().manual_seed(ASKED_SEED)
    shares = []
    for _ in range(4):
        ids, wanted = batch(BATCH, noise, g)
        shares.append(float((answers(net, ids).argmax(-1) == wanted).float().mean()))
    return sum(shares) / len(shares)


NARROW = Study(
    name="narrow",
    shows="8 pairs of a key and a value token, 50 tokens of noise, then the keys: a language model of two layers with "
    "two heads and memories as in the byte presets, 300 steps of AdamW at 3e-3 on batches of 12; the share of right "
    "answers after 50, 200, 800 and 2,000 tokens of noise. Chance is 0.04. 'Values begin short': W_v begins at 0.02, "
    "as all weights of a model do, and not at `START_VALUE`.",
    cases=(
        "attention",
        *RULES,
        "block hope",
        *(f"titans in {block}" for block in ("mag", "mal", "mac")),
        *(f"{rule}{SHORT}" for rule in ("titans", "omeganet", "atlas", "tnt")),
    ),
    widths=(16,),
    measure=narrow,
    columns=("candidate", "head", *(f"noise {noise:,}" for noise in ASKED), "seeds", "revision"),
)
