"""Attention by hand: one row, a loop over tokens, for tests to compare with."""

import math

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """x `[tokens, heads, width]` rotated to absolute positions `[tokens]`, as complex numbers."""
    half = x.shape[-1] // 2
    angle = position.to(x.dtype)[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    number = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([number.real, number.imag], dim=-1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q `[heads, width]` against k `[tokens, heads, width]`: `[heads, tokens]`."""
    return torch.einsum("hd,shd->hs", q, k) / math.sqrt(q.shape[-1])


def attend(score: Tensor, v: Tensor) -> Tensor:
    """Softmax of `[heads, tokens]` over values `[tokens, heads, width]`: `[dim]`."""
    return torch.einsum("hs,shd->hd", score.softmax(-1), v).flatten()


def causal_attention(layer: torch.nn.Module, x: Tensor, window: int, prefix: Tensor | None = None) -> Tensor:
    """x `[time, dim]`: each token over itself and `window - 1` before it, and over a prefix without positions."""
    time = torch.arange(len(x))
    q, k, v = layer.qkv(x).reshape(len(x), 3, layer.heads, layer.head_dim).unbind(1)
    rotated_q, rotated_k = rotate(q, time), rotate(k, time)
    p = x[:0] if prefix is None else prefix
    _, p_k, p_v = layer.qkv(p).reshape(len(p), 3, layer.heads, layer.head_dim).unbind(1)
    rows = []
    for t in range(len(x)):
        seen = slice(max(0, t - window + 1), t + 1)
        score = torch.cat([scores(q[t], p_k), scores(rotated_q[t], rotated_k[seen])], 1)
        rows.append(attend(score, torch.cat([p_v, v[seen]])))
    return layer.out(torch.stack(rows)) if rows else x
