"""The updates of a chunk's pairs (live.py), solved in *blocks* of a few tokens, one block after the other.

The system of all pairs would have (b c)^2 entries. But what is written up to token n is in W_n and S_n, and is met at a
later token t as what alpha, the steps and theta have made of these two. With ``onward`` and ``moved`` for how much of
W_n and of S_n is then in W_t,

    R[t, p]  =  onward[t, n] R[n, p] + moved[t, n] P[n, p]     for every p up to n.

With n the last token before a block, the sum over the pairs before the block is therefore that of two rows, R[n] and
P[n], in which the updates of all pairs of one window token can be summed before they meet the kernel (``Pairs.fold``).
What is left is a small system for the pairs of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fast_weight import Onward, scale_rows
from .live import Pairs, before_each_token, solve


def solve_pairs(
    base: Tensor, rate: Tensor, stood: Tensor, kernel: Tensor, mixing: Tensor, onward: Onward, pairs: Pairs
) -> Tensor:
    """The updates u ``[..., b c, m]`` of all pairs.

    Args:
        base, stood: ``[..., b c, m]``.
        rate: ``[..., C or 1, b c]``.
        kernel: the kernel among the window tokens, ``[..., N, N]``.
        mixing: R, how much of each update is in the matrix after each token, ``[..., C, b, b c]``.
        onward: for W and S, what is in them after each block, and how much of that later tokens meet; see ``Onward``.
    """
    size, tokens = pairs.size, pairs.block
    by_block = [x.split(tokens * size, dim) for x, dim in ((base, -2), (rate, -1), (stood, -2))]
    solved: list[Tensor] = []
    for number, (u, r, answered, rows) in enumerate(zip(*by_block, mixing.split(tokens, -2), strict=True)):
        start, block = number * tokens, Pairs(size, rows.shape[-2])
        among = slice(pairs.spare + start, pairs.spare + start + block.chunk + size - 1)
        if number:  # take away what earlier blocks wrote, by the rows R[n] and P[n]
            before, written = Pairs(size, start), torch.cat(solved, -2)
            near = kernel[..., among, pairs.spare : pairs.spare + start + size - 1]
            for factor, in_matrix in onward:
                numbers = in_matrix[..., number - 1, : start * size]
                met = block.of(near @ before.fold(scale_rows(numbers, written)))
                kept = block.each(factor[..., start - 1 : start + block.chunk - 1, number - 1], -1)
                answered = answered - scale_rows(kept, met)
        reach = before_each_token(rows[..., start * size : (start + block.chunk) * size], 0.0, block)
        solved.append(solve(u, r, answered, block.columns(block.of(kernel[..., among, among])), reach))
    return torch.cat(solved, -2)
