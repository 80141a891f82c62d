"""What only training can show: no rule leaks its labels, none explodes, and all stay causal after learning."""

import math

import pytest
import torch

from atlas_memory import RULES, AtlasConfig, AtlasForCausalLM
from atlas_memory.memory import Linear, Muon

VOCAB, TIME, BATCH = 16, 16, 8
BLOCKS = ["lmm", "mag"]


def model(rule: str, block: str) -> AtlasForCausalLM:
    torch.manual_seed(0)
    options: dict[str, dict[str, object]] = (
        {"network": {"expansion": 1}} if hasattr(RULES[rule].network, "expansion") else {}
    )
    if isinstance(RULES[rule].optimiser, Muon):
        options["optimiser"] = {"precise": False}  # quicker, and no rounding to float32 hides a leak
    extra = {"attention_window": 6} if block == "mag" else {}
    config = AtlasConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        rule=rule,
        rule_options=options or None,
        block=block,
        window=min(3, RULES[rule].window.size),
        chunk_size=8,
        **extra,
    )
    return AtlasForCausalLM(config)


def train(net: AtlasForCausalLM, steps: int, batches, lr: float = 3e-3) -> list[float]:
    optimiser = torch.optim.AdamW(net.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        ids = batches()
        loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def assert_causal(net: AtlasForCausalLM) -> None:
    ids = torch.randint(VOCAB, (2, TIME))
    for training in (True, False):
        net.train(training)
        with torch.no_grad():
            logits = net(input_ids=ids, use_cache=False).logits
            for t in (1, 6, 7, 8, 9, 12, 15):
                changed = ids.clone()
                changed[0, t:] = (changed[0, t:] + 1) % VOCAB
                other = net(input_ids=changed, use_cache=False).logits
                assert torch.equal(other[0, :t], logits[0, :t]), f"token {t} reaches back"
                assert torch.equal(other[1], logits[1]), "one row reaches another"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rule", RULES)
def test_random_tokens_cannot_be_predicted(rule, block):
    """400 steps on fresh uniform tokens: a loss below ln V means that labels leak. Single batches scatter by about
    0.05 nats around ln V, so windows of 50 batches are held against the bound."""
    net = model(rule, block)
    generator = torch.Generator().manual_seed(1)
    losses = train(net, 400, lambda: torch.randint(VOCAB, (BATCH, TIME), generator=generator))
    means = [sum(losses[i : i + 50]) / 50 for i in range(0, 400, 50)]
    assert min(means) > math.log(VOCAB) - 0.01
    assert_causal(net)


@pytest.mark.parametrize("rule", RULES)
def test_default_recipe_survives_2000_steps(rule):
    """The rule's own window, chunk and step bounds, three chunks long, on a task it can learn: the second half of a
    sequence repeats the first. Muon steps once a chunk, on a narrower memory."""
    torch.manual_seed(0)
    muon = isinstance(RULES[rule].optimiser, Muon)
    narrow = {"network": {"expansion": 1}} if muon and not isinstance(RULES[rule].network, Linear) else {}
    config = AtlasConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        rule=rule,
        rule_options={"optimiser": {"every": 16, "precise": False}, **narrow} if muon else None,
    )
    net = AtlasForCausalLM(config)
    generator = torch.Generator().manual_seed(2)

    def batches():
        half = torch.randint(VOCAB, (4, 24), generator=generator)
        return torch.cat([half, half], 1)

    losses = train(net, 2000, batches)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-100:]) / 100 < sum(losses[:100]) / 100
    assert_causal(net)
