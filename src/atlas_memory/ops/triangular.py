"""Errors that see the chunk's earlier writes (``online``, step.py), and the delta step: one triangular system each.

The update u_p of one matrix is the vector, as long as the matrix has rows, that is written under the input f_p of token
p when token t is read (with windows of one token t is p). It is linear in what the matrix, with all earlier updates in
it, answers to f_p just before that:

    u_p          = base_p + rate_p W_{t-1} f_p
    W_{t-1} f_p  = stood_p - sum over p' of R[t-1, p'] (f_p . f_p') u_p'

Here stood_p is what the matrix would answer had the chunk written nothing: what it answered at the chunk's start,
decayed. R[t, p] says how much of update p is in W_t (``DecayMasks.mixing``). With K the kernel, K[p, p'] = f_p . f_p',
the updates solve (I + diag(rate) (R * K)) u = base + rate carried_prediction, with R a row late: a unit lower
triangular system, the WY form of DeltaNet. For DeltaNet rate = 1 and base = -v; a online error has the rate r_t of its
bias.

With a window of c > 1 tokens every token of the window has an error of its own at every t at which it is in the window.
The updates p are then of *pairs* (t, i), c for each of the b tokens of the chunk, in the order of t and then from the
oldest i. ``[..., b c]`` below counts pairs; with c = 1 they are the tokens. The system of pairs is solved in blocks
(triangular.py).

The updates of a chunk's pairs (triangular.py), solved in *blocks* of a few tokens, one block after the other.

The system of all pairs would have (b c)^2 entries. But what is written up to token n is in W_n and S_n, and is met at a
later token t as what alpha, the steps and theta have made of these two. With ``inter_block`` and ``moved`` for how much
of W_n and of S_n is then in W_t,

    R[t, p]  =  onward[t, n] R[n, p] + moved[t, n] P[n, p]     for every p up to n.

With n the last token before a block, the sum over the pairs before the block is therefore that of two rows, R[n] and
P[n], in which the updates of all pairs of one window token can be summed before they meet the kernel
(``WindowPairs.fold``). What is left is a small system for the pairs of the block."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .banded import added, overlapping, stretches
from .fast_weight import DecayMasks, Inputs, InterBlock, join_channels, scale_rows, split_channels

BLOCK = 128
"""About how many pairs a block has."""


class WindowPairs(NamedTuple):
    """The pairs of a chunk of b = ``chunk`` tokens with windows of c = ``size``; ``spare`` empty places come before its
    window tokens and are counted in N."""

    size: int
    chunk: int
    spare: int = 0

    @property
    def block(self) -> int:
        """How many tokens a block of triangular.py has."""
        return max(BLOCK // self.size, 1)

    @property
    def ends(self) -> slice:
        """The last token of every block."""
        return slice(self.block - 1, None, self.block)

    @property
    def number(self) -> int:
        """How many pairs there are, b c."""
        return self.chunk * self.size

    def upto(self, seen: int) -> WindowPairs:
        """The pairs of the chunk's first tokens, up to window token ``seen`` of N."""
        return self._replace(chunk=seen - self.spare - self.size + 1)

    def of(self, x: Tensor) -> Tensor:
        """Rows of pairs ``[..., b c, d]`` from rows of window tokens ``[..., N, d]``."""
        return overlapping(x[..., self.spare :, :], self.size, 1).flatten(-3, -2)

    def columns(self, x: Tensor) -> Tensor:
        """Columns of pairs from columns of window tokens, ``[..., n, N] -> [..., n, b c]``."""
        return stretches(x[..., self.spare :], self.size)

    def gates(self, window: Tensor) -> Tensor:
        """gamma of every pair ``[..., b c]``, from the band matrix Gamma ``[..., b, N]``."""
        # The inverse of bands.band: the c gates of each row begin one place later than those of the row before.
        rows = F.pad(window[..., self.spare :].flatten(-2), (0, self.chunk))
        return rows.unflatten(-1, (self.chunk, self.chunk + self.size))[..., : self.size].flatten(-2)

    def each(self, x: Tensor, dim: int) -> Tensor:
        """Each entry of ``x`` along ``dim``, one for each of the b tokens, repeated for all c pairs of that token."""
        return x.repeat_interleave(self.size, dim)

    def fold(self, x: Tensor) -> Tensor:
        """Rows of pairs summed into the rows of their window tokens: ``[..., b c, d] -> [..., N, d]``."""
        return F.pad(added(x.unflatten(-2, (self.chunk, self.size)), 1), (0, 0, self.spare, 0))


def before_each_token(rows: Tensor, at_start: float, pairs: WindowPairs | None) -> Tensor:
    """For every pair the row of the memory just before its token, ``[..., b c, n]``, from ``rows`` ``[..., b, n]``, one
    for the memory after each token; ``at_start`` fills the row before the first."""
    rows = F.pad(rows[..., :-1, :], (0, 0, 1, 0), value=at_start)
    return rows if pairs is None else pairs.each(rows, -2)


def carried_prediction(
    inputs: Inputs,
    w: Tensor,
    s: Tensor | None,
    decay_target: Tensor | None,
    masks: DecayMasks,
    pairs: WindowPairs | None,
) -> Tensor:
    """What W_{t-1} would answer to every pair without the chunk's writes, ``[..., b c, m]``.

    Args:
        inputs: how the matrix sees the window tokens.
        w, s: the matrix and its momentum before the chunk; None: there is no momentum.
        home: the decay target of the matrix: it is home plus a matrix that decays to zero. None: zero.
    """

    def to_pairs(x: Tensor) -> Tensor:
        return x if pairs is None else pairs.of(x)

    held = to_pairs(inputs.held(w))
    to_home = None if decay_target is None else to_pairs(inputs.apply(decay_target))
    held = held if to_home is None else held - to_home
    out = scale_rows(before_each_token(masks.retained[..., None], 1.0, pairs).squeeze(-1), held)
    if s is not None:
        started = before_each_token(masks.started()[..., None], 0.0, pairs).squeeze(-1)
        out = out - scale_rows(started, to_pairs(inputs.apply(s)))
    return out if to_home is None else out + to_home


def solve(base: Tensor, rate: Tensor, carried_prediction: Tensor, kernel: Tensor, reach: Tensor) -> Tensor:
    """The updates u ``[..., n, m]`` of n tokens or pairs, from the letters of the equations above.

    Args:
        base, carried_prediction: ``[..., n, m]``.
        rate: ``[..., C or 1, n]``, with C the number of channels where gates are channel-wise, else 1.
        kernel: f_p . f_p' ``[..., n, n]``.
        reach: R a row late, how much of each update is in the matrix just before each token, ``[..., C, n, n]``.
    """
    channels = max(reach.shape[-3], rate.shape[-2])
    system = rate[..., None] * reach * kernel[..., None, :, :]
    right = split_channels(base, channels) + rate[..., None] * split_channels(carried_prediction, channels)
    # The diagonal of ones and what is above it are not read.
    return join_channels(torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True))


def solve_pairs(
    base: Tensor,
    rate: Tensor,
    carried_prediction: Tensor,
    kernel: Tensor,
    mixing: Tensor,
    inter_block: InterBlock,
    pairs: WindowPairs,
) -> Tensor:
    """The updates u ``[..., b c, m]`` of all pairs.

    Args:
        base, carried_prediction: ``[..., b c, m]``.
        rate: ``[..., C or 1, b c]``.
        kernel: the kernel among the window tokens, ``[..., N, N]``.
        mixing: R, how much of each update is in the matrix after each token, ``[..., C, b, b c]``.
        onward: for W and S, what is in them after each block, and how much of that later tokens meet; see
    ``InterBlock``.
    """
    size, tokens = pairs.size, pairs.block
    by_block = [x.split(tokens * size, dim) for x, dim in ((base, -2), (rate, -1), (carried_prediction, -2))]
    solved: list[Tensor] = []
    for number, (u, r, answered, rows) in enumerate(zip(*by_block, mixing.split(tokens, -2), strict=True)):
        start, block = number * tokens, WindowPairs(size, rows.shape[-2])
        among = slice(pairs.spare + start, pairs.spare + start + block.chunk + size - 1)
        if number:  # take away what earlier blocks wrote, by the rows R[n] and P[n]
            before, written = WindowPairs(size, start), torch.cat(solved, -2)
            near = kernel[..., among, pairs.spare : pairs.spare + start + size - 1]
            for factor, in_matrix in inter_block:
                numbers = in_matrix[..., number - 1, : start * size]
                inputs_of = block.of(near @ before.fold(scale_rows(numbers, written)))
                kept = block.each(factor[..., start - 1 : start + block.chunk - 1, number - 1], -1)
                answered = answered - scale_rows(kept, inputs_of)
        reach = before_each_token(rows[..., start * size : (start + block.chunk) * size], 0.0, block)
        solved.append(solve(u, r, answered, block.columns(block.of(kernel[..., among, among])), reach))
    return torch.cat(solved, -2)
