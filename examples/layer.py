"""Drop a memory into a model of your own: recall of pairs that were seen once, far apart, in a constant-size state.

    python examples/layer.py

A sequence shows 8 random key-value pairs, one token each, then asks for the keys in another order. Nothing but the
memory carries information between tokens, so accuracy above chance (1/16) is recall.
"""

import torch
from torch import nn

from atlas_memory import NeuralMemory

PAIRS, SYMBOLS, DIM = 8, 16, 64


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(SYMBOLS, DIM), nn.Embedding(SYMBOLS + 1, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.memory = NeuralMemory(DIM, heads=2, rule="omeganet", window=2, chunk_size=8)
        self.out = nn.Linear(DIM, SYMBOLS)

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.key(keys) + self.value(values))
        y, _state = self.memory(x)
        return self.out(x + y)


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [size, 2 * PAIRS], answers [size, PAIRS]. The second half asks: its values are blank."""
    keys = torch.rand(size, SYMBOLS, generator=generator).argsort(1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator)
    order = torch.rand(size, PAIRS, generator=generator).argsort(1)
    blank = torch.full_like(values, SYMBOLS)
    return torch.cat([keys, keys.gather(1, order)], 1), torch.cat([values, blank], 1), values.gather(1, order)


def main(steps: int = 400) -> float:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Recall()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        keys, values, answers = batch(64, generator)
        loss = nn.functional.cross_entropy(model(keys, values)[:, PAIRS:].flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    keys, values, answers = batch(512, generator)
    with torch.inference_mode():  # the memory learns here too
        accuracy = (model(keys, values)[:, PAIRS:].argmax(-1) == answers).float().mean().item()
    print(f"recalled {accuracy:.1%} of the pairs; chance is {1 / SYMBOLS:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
