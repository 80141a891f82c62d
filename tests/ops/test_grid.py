"""How calls are cut into groups of chunks, and chunks cut short; and that the numbers stay the same, as test_forms.py
tries too."""

from dataclasses import replace

import pytest
import torch

from atlas_memory.memory import RULES, Gates, Params, chunkwise, initial_state, l2_normalise, recurrent
from atlas_memory.ops.chunk_layout import ChunkLayout, groups, place_of_all

CHUNK, HEADS, DIM, TIME = 12, 2, 4, 29


@pytest.mark.parametrize(
    "rule,options,before,time,slots",
    [
        ("titans", {}, 0, 3, 8),
        ("titans", {}, 0, 9, 12),
        ("titans", {}, 0, 12, 12),
        ("titans", {}, 0, 13, 12),
        ("titans", {}, 2, 3, 8),
        ("titans", {}, 9, 2, 3),
        ("titans", {}, 9, 3, 3),
        ("atlas", {"every": 1}, 0, 3, 3),
        ("atlas", {"every": 4}, 0, 3, 4),
        ("atlas", {"every": 4}, 4, 5, 8),
        ("atlas", {"every": None}, 0, 3, 12),
        ("deeptransformer", {}, 0, 3, 12),
    ],
)
def test_a_call_shorter_than_a_chunk_has_few_empty_slots(rule, options, before, time, slots) -> None:
    rule = RULES[rule].vary(window={"chunk": CHUNK}, optimiser=options)
    layout = ChunkLayout.of(rule, time, None, None, before)
    assert (layout.chunk, layout.count) == (slots, -(-time // slots))
    assert layout.filled(0) == (before + time >= CHUNK)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("place", [0, 5])
def test_groups_are_all_tokens_in_turn(place: int, whole: bool) -> None:
    for time in range(1, 70):
        sizes = groups(time, place, 2 * CHUNK, CHUNK, whole)
        assert sum(sizes) == time and min(sizes) > 0 and max(sizes) <= 2 * CHUNK
        ends = [place + sum(sizes[:n]) for n in range(1, len(sizes))]
        assert all(end % CHUNK == 0 for end in ends)
    assert groups(29, 0, 2 * CHUNK, CHUNK, whole) == [24, 5]
    assert groups(17, 0, 2 * CHUNK, CHUNK, whole) == ([17] if whole else [12, 5])
    assert groups(3, 5, 2 * CHUNK, CHUNK, whole) == [3]


def test_where_all_rows_stand() -> None:
    rule, lag = (RULES[name].vary(window={"chunk": CHUNK}) for name in ("titans", "memora"))
    state = initial_state(rule, rule.initial_weights(HEADS, DIM), torch.zeros(3, HEADS, 0, DIM))
    for seen, place in (([0, 0, 0], 0), ([5, 17, 29], 5), ([5, 17, 30], 0), ([12, 24, 36], 0)):
        at = replace(state, seen=torch.tensor(seen))
        assert place_of_all(rule, at) == place
        assert place_of_all(lag, at) == 0
    muon = rule.vary(optimiser={"kind": "Muon", "every": 3})
    for seen, place in ((5, 0), (6, 6)):
        assert place_of_all(muon, replace(state, seen=torch.full((3,), seen))) == place


@pytest.mark.parametrize("name", RULES)
def test_calls_that_begin_and_end_anywhere(name: str) -> None:
    rule = RULES[name].vary(window={"size": min(3, RULES[name].window.size), "chunk": CHUNK})
    if name == "atlas":
        rule = rule.vary(optimiser={"every": 3})
    params = Params(rule.initial_weights(HEADS, DIM)).map(torch.Tensor.double)
    q, k, v = torch.randn(3, 2, HEADS, TIME, DIM, dtype=torch.float64)
    eta, alpha, theta = torch.rand(3, 2, HEADS, TIME, dtype=torch.float64)
    given = {"eta": eta, "alpha": 0.8 + 0.2 * alpha, "theta": theta}
    given["gamma"] = torch.rand(2, HEADS, TIME, rule.window.size, dtype=torch.float64)
    if rule.bias.has_delta:
        given["delta"] = 1 + torch.rand(2, HEADS, TIME, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    k = l2_normalise(k)
    expected, last = recurrent(rule, params, q, k, v, Gates(**given))
    toward = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, toward, retain_graph=True)
    for edges in ((4, 7, 9, 13), (3, 6, 24, 25)):
        state, outputs = None, []
        for first, end in zip((0, *edges), (*edges, TIME), strict=True):
            part = [x[:, :, first:end] for x in (q, k, v)]
            y, state = chunkwise(rule, params, *part, Gates(**{n: x[:, :, first:end] for n, x in given.items()}), state)
            outputs.append(y)
        y = torch.cat(outputs, 2)
        assert torch.allclose(y, expected, atol=1e-8), edges
        for one, other in zip(state.weights, last.weights, strict=True):
            assert torch.allclose(one, other, atol=1e-8), edges
        found = torch.autograd.grad(y, leaves, toward, retain_graph=True)  # k is made of a leaf, for both
        for one, other in zip(found, gradients, strict=True):
            assert torch.allclose(one, other, atol=1e-8), edges
