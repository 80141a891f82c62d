"""Updates that depend on what the chunk has written before, as online errors (step.py) and the delta step do: one
triangular system each.

The update u_p of one matrix is the vector, as long as the matrix has rows, that is written under the input f_p of token
p when token t is read (with windows of one token t is p). It is linear in what the matrix, with all earlier updates in
it, answers to f_p just before that:

    u_p          = base_p + rate_p W_{t-1} f_p
    W_{t-1} f_p  = carried_p - sum over p' of R[t-1, p'] (f_p . f_p') u_p'

Here carried_p is the carried prediction, what the matrix would answer had the chunk written nothing: what it answered
at the chunk's start, decayed. R[t, p] says how much of update p is in W_t (decay_masks.py). With K the kernel,
K[p, p'] = f_p . f_p', the updates solve (I + diag(rate) (R * K)) u = base + rate carried, with R a row late: a unit
lower triangular system, the WY form of DeltaNet. For DeltaNet rate = 1 and base = -v; an online error has the rate r_t
of its bias.

With a window of c > 1 tokens every token of the window has an error of its own at every t at which it is in the window.
The updates p are then of *pairs* (t, i), c for each of the b tokens of the chunk, in the order of t and then from the
oldest i. U counts updates: b tokens, or b c pairs. The system of all pairs would have (b c)^2 entries, and is solved in
*blocks* of a few tokens, one block after the other: what is written up to token n is in W_n and S_n, and is met at a
later token t as what alpha, the steps and theta have made of these two. With x[t, n] and y[t, n] for how much of W_n
and of S_n is then in W_t (the inter-block coefficients),

    R[t, p]  =  x[t, n] R[n, p] + y[t, n] P[n, p]     for every p up to n.

With n the last token before a block, the sum over the pairs before the block is therefore that of two rows, R[n] and
P[n], in which the updates of all pairs of one window token can be summed before they meet the kernel
(``WindowPairs.summed``). What is left is a small system for the pairs of the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .banded import overlapping, stretches
from .fast_weight import join_channels, split_channels, to_rows

BLOCK = 128
"""About how many pairs a block has."""


class WindowPairs(NamedTuple):
    """The pairs of a chunk of b = ``chunk`` tokens with windows of c = ``size``; ``spare`` empty places come before its
    window tokens and are counted in N. ``of_token`` ``[N, b c]`` is 1 where a pair is of a window token, else 0."""

    size: int
    chunk: int
    spare: int
    of_token: Tensor

    @staticmethod
    def make(size: int, chunk: int, spare: int, like: Tensor) -> WindowPairs:
        """With ``of_token`` in the dtype and on the device of ``like``."""
        token = torch.arange(spare + chunk + size - 1, device=like.device)
        of_pair = spare + torch.arange(chunk, device=like.device)[:, None] + torch.arange(size, device=like.device)
        return WindowPairs(size, chunk, spare, (token[:, None] == of_pair.flatten()).to(like.dtype))

    @property
    def block(self) -> int:
        """How many tokens a block has."""
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
        chunk = seen - self.spare - self.size + 1
        return self._replace(chunk=chunk, of_token=self.of_token[:seen, : chunk * self.size])

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

    def summed(self, numbers: Tensor, x: Tensor) -> Tensor:
        """Rows of pairs ``[n, b c, m]`` times one number each, ``[n, b c]`` or ``[n, C, b c]``, summed into the rows of
        their window tokens: ``[n, N, m]``."""
        if numbers.dim() == 2:
            return (numbers[:, None] * self.of_token).bmm(x)
        return join_channels((numbers[:, :, None] * self.of_token) @ split_channels(x, numbers.shape[1]))


def late(rows: Tensor, at_start: float = 0.0) -> Tensor:
    """Rows ``[..., b, k]``, one for the memory after each token, as those of the memory before each token."""
    return F.pad(rows[..., :-1, :], (0, 0, 1, 0), value=at_start)


def solve(base: Tensor, rate: Tensor, carried: Tensor, kernel: Tensor, reach: Tensor) -> Tensor:
    """The updates u ``[n, U, m]``, from the letters of the equations above.

    Args:
        base, carried: ``[n, U, m]``.
        rate: ``[n, U]`` or ``[n, C, U]``.
        kernel: f_p . f_p' ``[n, U, U]``.
        reach: R a row late, how much of each update is in the matrix just before each, ``[n, U, U]`` or
            ``[n, C, U, U]``.
    """
    if rate.dim() == 2 and reach.dim() == 3:
        rate = rate[..., None]
        system, right = rate * reach * kernel, torch.addcmul(base, rate, carried)
        # The diagonal of ones and what is above it are not read.
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    rate, reach = (rate if rate.dim() == 3 else rate[:, None])[..., None], reach if reach.dim() == 4 else reach[:, None]
    channels = max(rate.shape[1], reach.shape[1])
    system = rate * reach * kernel[:, None]
    right = split_channels(base, channels) + rate * split_channels(carried, channels)
    return join_channels(torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True))


def solve_blocks(
    base: Tensor,
    rate: Tensor,
    carried: Tensor,
    kernel: Tensor,
    mix: Tensor,
    between: tuple[tuple[Tensor, Tensor], ...],
    pairs: WindowPairs,
) -> Tensor:
    """The updates u ``[n, b c, m]`` of all pairs.

    Args:
        base, rate, carried: as in ``solve``.
        kernel: the kernel among the window tokens, ``[n, N, N]``.
        mix: R, how much of each update is in the matrix after each token, ``[n, b, b c]`` or ``[n, C, b, b c]``.
        between: the inter-block coefficients; see ``DecayMasks``.
    """
    size, tokens = pairs.size, pairs.block
    by_block = [x.split(tokens * size, dim) for x, dim in ((base, 1), (rate, -1), (carried, 1))]
    solved: list[Tensor] = []
    for number, (u, r, answered, rows) in enumerate(zip(*by_block, mix.split(tokens, -2), strict=True)):
        start, block = number * tokens, pairs._replace(chunk=rows.shape[-2], spare=0)
        among = slice(pairs.spare + start, pairs.spare + start + block.chunk + size - 1)
        if number:  # take away what earlier blocks wrote, by the rows R[n] and P[n]
            before, written = pairs.upto(pairs.spare + start + size - 1), torch.cat(solved, 1)
            near = kernel[..., among, : pairs.spare + start + size - 1]
            for later, in_matrix in between:
                numbers = in_matrix[..., number - 1, : start * size]
                met = block.of(near @ before.summed(numbers, written))
                left = block.each(later[..., start - 1 : start + block.chunk - 1, number - 1], -1)
                answered = answered - to_rows(left[..., None] if left.dim() == 2 else left.mT, met.shape[-1]) * met
        reach = block.each(late(rows[..., start * size : (start + block.chunk) * size]), -2)
        solved.append(solve(u, r, answered, block.columns(block.of(kernel[..., among, among])), reach))
    return torch.cat(solved, 1) if len(solved) > 1 else solved[0]
