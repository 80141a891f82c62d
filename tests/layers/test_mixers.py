"""The contract of every mixer: causal, isolated, the same in every mode, at any split, under any padding."""

import inspect

import pytest
import torch

from atlas_memory.layers.blocks import BLOCKS, MemoryBlock

from .mixers import DIM, HEADS, MIXERS, OWN, build, grows, tensors

NEAR = {"rtol": 0.0, "atol": 1e-8}


@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in OWN])
def test_arguments_stand_in_one_order(block):
    """So that one mixer can take another's place."""
    order = list(inspect.signature(BLOCKS[block].make(DIM, HEADS).forward).parameters)
    assert order[:4] == ["x", "state", "mask", "document_starts"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in OWN])
@pytest.mark.filterwarnings("error:Mismatch dtype between input and weight")
def test_autocast_makes_every_output_narrow(block, dtype):
    """Also of what an autocast layer before this one gave; and PyTorch has a fused norm for all of it."""
    x = torch.randn(2, 9, DIM, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert BLOCKS[block].make(DIM, HEADS)(x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", MIXERS)
def test_causal_bitwise_and_rows_apart(name):
    """Each row but the first and last is changed from a token on; before it nothing moves, nor in those two."""
    mixer, starts = build(name), (0, 14, 8, 6, 5, 3)
    x = torch.randn(2 + len(starts), 15, DIM)
    changed = x.clone()
    for row, t in enumerate(starts, 1):
        changed[row, t:] += torch.randn(15 - t, DIM)
    y, y2 = mixer(x)[0], mixer(changed)[0]
    for row, t in enumerate(starts, 1):
        assert torch.equal(y2[row, :t], y[row, :t]) and not torch.equal(y2[row, t], y[row, t])
    assert torch.equal(y2[[0, -1]], y[[0, -1]])


WAYS = {
    "one call": ([15], {}),
    "calls": ([4, 1, 3, 7], {}),
    "padding": ([15], {"mask": torch.tensor([[0] * 2 + [1] * 6 + [0, 1] * 3 + [1]] * 6)}),
    "documents": ([15], {"document_starts": torch.tensor([[0] * 7 + [1] + [0] * 7] * 6)}),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_nonfinite_token_does_not_reach_back(name, way):
    """Outputs before it are bitwise those without it, and so are other rows and the next document; and the gradients
    of all these are the same at their inputs, and within a call finite at all weights. Outputs at padding stay zero."""
    if name in OWN:
        pytest.skip("a mixer from outside need not")
    mixer, (pieces, options) = build(name), WAYS[way]
    x = torch.randn(6, 15, DIM)
    broken, kept = x.clone(), torch.ones(6, 15, dtype=torch.bool)
    for row, (t, bad) in enumerate(((5, torch.nan), (3, torch.inf), (2, -torch.inf), (5, 3e38), (14, torch.nan)), 1):
        broken[row, t, :: 2 if row == 4 else 1] = bad
        kept[row, t : 7 if way == "documents" and t < 7 else 15] = False
    wanted, weight = read(mixer, x, pieces, options), torch.randn(6, 15, DIM)
    found = read(mixer, broken, pieces, options)
    assert torch.equal(found[0][kept], wanted[0][kept])
    assert all(found[0][row, t].isnan().all() for row, t in ((1, 5), (2, 3), (3, 2), (5, 14)))
    assert way != "padding" or not found[0][options["mask"] == 0].any()
    weights = [] if way == "calls" else list(mixer.parameters())
    (one, *of_weights), (other, *_) = (
        torch.autograd.grad((y * weight)[kept].sum(), [x, *weights], allow_unused=True) for y, x in (found, wanted)
    )
    torch.testing.assert_close(one[kept], other[kept], rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    assert all(g.isfinite().all() for g in of_weights if g is not None)


def read(mixer, x, pieces, options):
    """What a mixer answers in several calls, and a leaf of its graph: the x that it read."""
    x, state, out = x.clone().requires_grad_(), None, []
    for part in x.split(pieces, 1):
        y, state = mixer(part, state, **options)
        out.append(y)
    return torch.cat(out, 1), x


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in MIXERS if name not in OWN])
def test_nonfinite_tokens_at_any_split_into_calls(name):
    """Also from states that hold it, token by token. A sliding window forgets it, a memory does not."""
    mixer, x = build(name), torch.randn(3, 15, DIM)
    x[0, 2] = x[1, 6] = torch.nan
    whole = mixer(x)[0]
    lost = whole.isnan().all(-1)
    assert torch.equal(lost, whole.isnan().any(-1)) and not lost[2].any()
    assert lost[0].sum() == (5 if name == "swa" else 13) and lost[1].sum() == (5 if name == "swa" else 9)
    with torch.no_grad():
        for pieces in ([1] * 15, [4, 5, 6], [1, 1, 9, 4]):
            torch.testing.assert_close(read(mixer, x, pieces, {})[0], whole, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(read(mixer, x, [4, 5, 6], {})[0], whole, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in MIXERS if name not in OWN])
def test_nonfinite_padding_is_padding(name):
    """Of a block: also norms and MLP, and the gradients of all weights."""
    block = MemoryBlock(DIM, build(name), 16)
    x, mask = torch.randn(3, 13, DIM), torch.rand(3, 13) > 0.4
    results = []
    for padding in (0.0, torch.nan, torch.inf):
        held = x.masked_fill(~mask[..., None], padding).requires_grad_()
        y, state = block(held, None, mask)
        gradients = torch.autograd.grad((y * x).sum(), [held, *block.parameters()], allow_unused=True)
        results.append([y, *tensors(state), *(g for g in gradients if g is not None)])
    assert all(torch.equal(one, other) for found in results[1:] for one, other in zip(found, results[0], strict=True))


@pytest.mark.parametrize("name", MIXERS)
def test_modes_agree(name):
    mixer = build(name)
    x = torch.randn(2, 15, DIM)
    y, state = mixer.train()(x)
    y_eval, _ = mixer.eval()(x)
    with torch.inference_mode():
        y_inference, state_inference = mixer(x)
        y_next, _ = mixer(x[:, :1], state_inference)
    assert torch.equal(y, y_eval) and torch.equal(y, y_inference)
    assert torch.equal(y_next, mixer(x[:, :1], state)[0])


@pytest.mark.parametrize("name", MIXERS)
def test_any_split_into_calls(name):
    """Outputs, the state at the end, and what gradients flow through the states between. Calls end with a chunk (4 and
    12), a window (5) and a shard (6 and 12), within them, and with no token."""
    mixer = build(name, torch.float64)
    x = torch.randn(2, 13, DIM, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    inputs = [x, *mixer.parameters()]

    def read(pieces):
        state, out = None, []
        for piece in x.split(pieces, 1):
            y, state = mixer(piece, state)
            out.append(y)
        y = torch.cat(out, 1)
        return y, tensors(state), torch.autograd.grad((y * weight).sum(), inputs)

    y, end, gradients = read([13])
    for pieces in ([1] * 13, [4, 9], [5, 1, 7], [0, 12, 1]):
        torch.testing.assert_close(read(pieces), (y, end, gradients), **NEAR)


@pytest.mark.parametrize("name", MIXERS)
def test_padding_of_any_pattern_changes_nothing(name):
    """Nor in any later call, when the rows are at different places of their chunks and segments."""
    mixer = build(name, torch.float64)
    x = torch.randn(5, 13, DIM, dtype=torch.float64)
    mask = torch.ones(5, 13, dtype=torch.bool)
    mask[0, :5] = False  # left
    mask[1, 9:] = False  # right
    mask[2] = torch.rand(13) > 0.4  # anywhere
    mask[3] = False  # everywhere
    later = mask.flip(1).roll(1, 0)
    y, state = mixer(torch.where(mask[..., None], x, 1e3), None, mask.long())
    y_later, state_later = mixer(torch.where(later[..., None], x, 1e3), state, later)
    y_last, _ = mixer(x[:, :1], state_later)
    assert y[~mask].count_nonzero() == 0 and y_later[~later].count_nonzero() == 0
    for row in range(5):
        alone, one = mixer(x[row : row + 1][:, mask[row]])
        torch.testing.assert_close(y[row][mask[row]], alone[0], **NEAR)
        alone, one_later = mixer(x[row : row + 1][:, later[row]], one)
        torch.testing.assert_close(y_later[row][later[row]], alone[0], **NEAR)
        torch.testing.assert_close(y_last[row], mixer(x[row : row + 1, :1], one_later)[0][0], **NEAR)
        if not grows(name):  # else it has a slot for every column of the batch
            row_of_batch = state.map(lambda t, r=row: t[r : r + 1])
            torch.testing.assert_close(tensors(row_of_batch), tensors(one), **NEAR)


@pytest.mark.parametrize("name", MIXERS)
def test_every_parameter_gets_a_gradient(name):
    """Through the write too: to q, k, v, every gate, M_0, the a_i and the persistent tokens."""
    mixer = build(name)
    y, _ = mixer(torch.randn(2, 13, DIM))
    (y * torch.randn_like(y)).sum().backward()
    for parameter_name, parameter in mixer.named_parameters():
        if parameter.numel():  # M_0 on phi* is empty
            assert parameter.grad is not None and parameter.grad.count_nonzero() > 0, parameter_name


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("time", [1, 20])
def test_continuing_from_a_state_leaves_no_parameter_out(name, time):
    """M_0 and persistent tokens have a gradient of zero then, and not none: DistributedDataParallel waits for all."""
    mixer = build(name)
    with torch.no_grad():
        _, state = mixer(torch.randn(2, 7, DIM))
    x = torch.randn(2, time, DIM)
    y, _ = mixer(x, state)
    y.sum().backward()
    assert [n for n, p in mixer.named_parameters() if p.numel() and p.grad is None] == []
    with torch.no_grad():
        assert torch.equal(mixer(x, state)[0], y)


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_has_constant_size_and_rows(name):
    mixer = build(name)
    x = torch.randn(3, 40, DIM)
    _, small = mixer(x[:, :0])
    _, large = mixer(x)
    assert all(len(t) == 3 for t in tensors(large))
    same = [t.shape for t in tensors(small)] == [t.shape for t in tensors(large)]
    assert same == (not grows(name))
    order = torch.tensor([2, 0, 0])
    y, _ = mixer(x[order, :6], large.map(lambda t: t.index_select(0, order)))
    torch.testing.assert_close(y, mixer(x[:, :6], large)[0][order])


@pytest.mark.parametrize("name", ["mac", "attention", "swa", "mag", "mal"])
def test_a_state_or_mask_of_another_shape_is_refused(name):
    mixer = build(name)
    x = torch.randn(2, 3, DIM)
    with pytest.raises(ValueError, match="batch"):
        mixer(x[:1], mixer(x)[1])
    with pytest.raises(ValueError, match=r"mask has shape \[2, 4\]"):
        mixer(x, None, torch.ones(2, 4))


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in OWN])
def test_an_input_or_a_state_of_another_kind_is_refused(name):
    layer = build(name)
    for x, state, message in (
        (torch.randn(5, DIM), None, rf"x must be \[batch, time, {DIM}\], got \[5, {DIM}\]"),
        (torch.ones(1, 5, DIM, dtype=torch.int64), None, "x must be floating point, got torch.int64"),
        (torch.randn(1, 5, DIM), torch.randn(2, 3), r"state must be the .*State .*, or None, got a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, state)
