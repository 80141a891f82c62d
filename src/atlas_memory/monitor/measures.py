"""The figures by which a memory is seen, as functions of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST = 1e6
"""Tokens: a half-life beyond it is given as this."""


def half_life(alpha: Tensor, dim: int = -1) -> Tensor:
    """Tokens after which retention ``alpha`` has left half of what was written: ln(1/2) over the mean of ln(alpha)
    along ``dim``, at most ``LONGEST``."""
    rate = -alpha.double().clamp(min=1e-30).log().mean(dim)
    return (math.log(2) / rate.clamp(min=math.log(2) / LONGEST)).float()


def error(answer: Tensor, v: Tensor) -> Tensor:
    """|m - v|^2 / (|m|^2 + |v|^2) over the last dimension: 0 where m = v, 1 where the two have nothing to do with each
    other or one of them is zero, at most 2. Unlike the error over |v|^2 it has an end where v is short."""
    lengths = answer.square().sum(-1) + v.square().sum(-1)
    return (answer - v).square().sum(-1) / lengths.clamp(min=1e-30)


def change(after: Tensor, before: Tensor, v: Tensor) -> Tensor:
    """|after - before| / (|before| + |v|) over the last dimension."""
    return (after - before).norm(dim=-1) / (before.norm(dim=-1) + v.norm(dim=-1)).clamp(min=1e-15)


def norm(matrices: tuple[Tensor, ...]) -> Tensor:
    """The Frobenius norm of all matrices ``[batch, heads, rows, columns]`` together, ``[batch, heads]``."""
    return torch.stack([m.float().square().sum((-2, -1)) for m in matrices]).sum(0).sqrt()


def turn(step: tuple[Tensor, ...], before: tuple[Tensor, ...]) -> Tensor:
    """Degrees between two steps of all matrices ``[batch, heads, rows, columns]`` together, ``[batch, heads]``: 0 goes
    straight on, 90 is another direction, 180 back; NaN where one of them is zero."""
    dot = sum(((a.double() * b.double()).sum((-2, -1)) for a, b in zip(step, before, strict=True)), torch.zeros(()))
    cosine = dot / (norm(step).double() * norm(before).double())
    return cosine.clamp(-1, 1).acos().rad2deg().float()


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares (Roy and Vetterli 2007), of ``[..., rows, columns]``; between 1
    and the smaller side, 0 of a matrix of zeros, and NaN of one with entries that are not finite."""
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0).double()
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mT
    squares = torch.linalg.eigvalsh(matrix @ matrix.mT).clamp(min=0)
    values = squares.sqrt()
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp(min=1e-30)
    entropy = -(share * share.clamp(min=1e-30).log()).sum(-1)
    return torch.where(finite, torch.where(total[..., 0] > 0, entropy.exp(), 0.0), torch.nan).float()
