"""Sliding-window and full attention against a dense loop over rows, heads and tokens."""

import pytest
import torch
import torch.nn.functional as F

from atlas_memory.layers.attention import AttentionState, FullAttention, SlidingWindowAttention
from atlas_memory.layers.padding import move_padding_right, restore_padding

from . import naive_attention


def build(window: int, dtype: torch.dtype = torch.float64) -> SlidingWindowAttention:
    torch.manual_seed(0)
    return SlidingWindowAttention(12, 3, window).to(dtype)


@pytest.mark.parametrize("window", [1, 2, 5, 40])
@pytest.mark.parametrize("time", [0, 1, 4, 5, 6, 23])
def test_equals_dense(window: int, time: int) -> None:
    layer = build(window)
    x = torch.randn(2, time, 12, dtype=torch.float64)
    y, state = layer(x)
    assert y.shape == x.shape
    for row in range(2):
        torch.testing.assert_close(
            y[row], naive_attention.causal_attention(layer, x[row], window), rtol=1e-10, atol=1e-10
        )
    assert state.seen.tolist() == [time, time]
    assert state.keys.shape == (2, 3, window - 1, 4)


@pytest.mark.parametrize("window", [1, 3, 30])
def test_padding_anywhere_and_in_any_call_changes_nothing(window: int) -> None:
    layer = build(window)
    x = torch.randn(5, 17, 12, dtype=torch.float64)
    mask = torch.rand(5, 17) < 0.6
    mask[0], mask[1] = True, False
    mask[2, :6], mask[3, 11:] = False, False
    noisy = x.masked_fill(~mask[..., None], 1e9)
    whole, _ = layer(noisy, None, mask.long())
    assert (whole[~mask] == 0).all()
    for row in range(5):
        torch.testing.assert_close(
            whole[row][mask[row]],
            naive_attention.causal_attention(layer, x[row][mask[row]], window),
            rtol=1e-9,
            atol=1e-9,
        )
    first, state = layer(noisy[:, :7], None, mask[:, :7])
    second, state = layer(noisy[:, 7:], state, mask[:, 7:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-9, atol=1e-9)
    assert torch.equal(state.seen, mask.sum(1))


@pytest.mark.parametrize("time", [0, 1, 9])
def test_full_attention_equals_dense(time: int) -> None:
    torch.manual_seed(0)
    layer = FullAttention(12, 3).double()
    x = torch.randn(2, time, 12, dtype=torch.float64)
    y, state = layer(x)
    for row in range(2):
        torch.testing.assert_close(
            y[row], naive_attention.causal_attention(layer, x[row], time + 1), rtol=1e-10, atol=1e-10
        )
    assert state.keys.shape == (2, 3, time, 4) and state.seen.tolist() == [time, time]


def test_full_attention_without_a_past_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that fast kernels take, also over a padded batch; from a past on, a mask."""
    calls: list[dict] = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(k), original(*a, **k))[1])
    layer = FullAttention(12, 3)
    x = torch.randn(2, 5, 12)
    _, state = layer(x, None, torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]))
    layer(x, state)
    assert calls[0] == {"is_causal": True} and set(calls[1]) == {"attn_mask"}


def test_causality_and_rows_are_bitwise() -> None:
    layer = build(4, torch.float32)
    x = torch.randn(3, 19, 12)
    y, _ = layer(x)
    for t in (0, 3, 4, 9, 18):
        other = x.clone()
        other[:, t] += 100
        changed, _ = layer(other)
        assert torch.equal(changed[:, :t], y[:, :t])
        assert torch.equal(changed[:, t + 4 :], y[:, t + 4 :]), "beyond the window nothing changes either"
        assert not torch.equal(changed[:, t], y[:, t])
    other = x.clone()
    other[1] += 100
    assert torch.equal(layer(other)[0][[0, 2]], y[[0, 2]])


def test_gradients_equal_dense() -> None:
    layer = build(3)
    x = torch.randn(1, 8, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 12, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad((layer(x)[0][0] * weight).sum(), inputs)
    theirs = torch.autograd.grad((naive_attention.causal_attention(layer, x[0], 3) * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_bfloat16_is_kept_and_positions_stay_exact_far_out() -> None:
    layer = build(4, torch.bfloat16)
    x = torch.randn(1, 6, 12, dtype=torch.bfloat16)
    y, state = layer(x)
    assert y.dtype == state.keys.dtype == torch.bfloat16 and state.seen.dtype == torch.int64
    layer = build(4, torch.float32)
    x = torch.randn(1, 6, 12)
    near, _ = layer(x, layer(torch.zeros(1, 3, 12))[1])
    _, state = layer(torch.zeros(1, 3, 12))
    far = type(state)(state.keys, state.values, state.seen + 10**9)
    assert torch.equal(layer(x, far)[0], near)


def test_pack_and_unpack_are_inverse() -> None:
    x = torch.randn(3, 7, 2)
    mask = torch.rand(3, 7) < 0.5
    packed, lengths, order = move_padding_right(x, mask)
    for row in range(3):
        assert torch.equal(packed[row, : lengths[row]], x[row][mask[row]])
        assert (packed[row, lengths[row] :] == 0).all()
    assert torch.equal(restore_padding(packed, order, mask), x * mask[..., None])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="dim=10 with heads=4"):
        SlidingWindowAttention(10, 4, 8)
    with pytest.raises(ValueError, match="window must be an integer >= 1, got 0"):
        SlidingWindowAttention(8, 2, 0)
    layer = build(4)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    with pytest.raises(ValueError, match="mask has shape"):
        layer(x, None, torch.ones(2, 4))
    with pytest.raises(ValueError, match="another batch"):
        layer(x[:1], layer(x)[1])
    for state in (build(6)(x)[1], FullAttention(12, layer.heads).double()(x)[1], _of_heads(layer.heads * 2, x)):
        with pytest.raises(ValueError, match="of another batch or attention"):
            layer(x, state)
    with pytest.raises(ValueError, match="state must be the FullAttentionState"):
        FullAttention(12, layer.heads).double()(x, layer(x)[1])


def _of_heads(heads: int, x: torch.Tensor) -> AttentionState:
    empty = x.new_zeros(len(x), heads, 3, 12 // heads)
    return AttentionState(empty, empty, torch.zeros(len(x), dtype=torch.int64))
