"""Every mixer over time that a block can have, small, for the contract that all keep."""

from typing import Any

import torch
from torch import Tensor, nn

from atlas_memory import RULES
from atlas_memory.layers.blocks import BLOCKS
from atlas_memory.memory import Exponential, resolve_rule

DIM, HEADS, WINDOW, CHUNK, ATTENTION_WINDOW = 12, 2, 3, 4, 5

# One global and two local memories, in shards that the tests' calls cut anywhere.
HIERARCHY: dict[str, Any] = {"global_chunk": 5, "local_chunks": [2, 3], "shard": 6}

# block, rule, persistent tokens
MIXERS: dict[str, tuple[str, str, int]] = {
    **{f"lmm-{rule}": ("lmm", rule, 0) for rule in RULES},
    "lmm-titans-persistent": ("lmm", "titans", 2),
    "mag": ("mag", "omeganet", 0),
    "mag-persistent": ("mag", "titans", 2),
    "mal": ("mal", "omeganet", 0),
    "mal-persistent": ("mal", "titans", 2),
    "mac": ("mac", "omeganet", 0),
    "mac-titans": ("mac", "titans", 0),
    "mac-persistent": ("mac", "omeganet", 2),
    "mac-atlas-persistent": ("mac", "atlas", 3),
    "mac-memora": ("mac", "memora", 0),
    "hope": ("hope", "hope", 0),
    "hope-persistent": ("hope", "hope", 2),
    "lmm-tnt-hierarchy": ("lmm", "tnt", 0),
    "lmm-atlas-hierarchy": ("lmm", "atlas", 0),
    "lmm-titans-hierarchy-by-chunk": ("lmm", "titans", 0),
    "lmm-omeganet-hierarchy-persistent": ("lmm", "omeganet", 2),
    "mag-hierarchy": ("mag", "tnt", 0),
    "mal-hierarchy-persistent": ("mal", "titans", 2),
    "swa": ("swa", "", 0),
    "attention": ("attention", "", 0),
}
# A block that no row names, such as one that a contributor registers, is tested as it is made.
OWN = {block: (block, "titans" if kind.memory else "", 0) for block, kind in BLOCKS.items()}
OWN = {name: row for name, row in OWN.items() if name not in {block for block, _, _ in MIXERS.values()}}
MIXERS |= OWN


def grows(name: str) -> bool:
    """Whether the state grows with the tokens read: full attention's, and the exact exponential kernel's."""
    _, rule, _ = MIXERS[name]
    if name in OWN and any(getattr(module, "grows", False) for module in build(name).modules()):
        return True
    return name == "attention" or (rule != "" and isinstance(RULES[rule].features, Exponential))


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The mixer of that name, no weight of it at a round value."""
    block, rule, persistent = MIXERS[name]
    kind = BLOCKS[block]
    options: dict[str, Any] = {"attention_window": ATTENTION_WINDOW} if kind.window else {}
    if kind.memory:
        window = None if RULES[rule].window.size == 1 else WINDOW
        options |= {"eps": 1e-6, "persistent_tokens": persistent}
        if "hierarchy" in name:
            by = "chunk" if "by-chunk" in name else "shard"
            options |= {"rule": rule, "window": window, "hierarchy": HIERARCHY | {"project": by}}
        else:
            options["rule"] = resolve_rule(rule, window, CHUNK)
    torch.manual_seed(0)
    mixer = kind.make(DIM, HEADS, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return mixer.to(dtype)


def tensors(state: Any) -> list[Tensor]:
    """All tensors of a state, in one order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    state.map(keep)
    return found
