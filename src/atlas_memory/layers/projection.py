"""Queries projected onto the keys that a memory has been trained on (TNT, arXiv 2511.07343, Eqs. 7 and 15, App. C).

    P_t = sum over tau of  k_tau k_tau^T / |k_tau|^2

over the tokens tau <= t of a span, a shard or a chunk. In place of q_t a local memory is asked P_t q_t. P_t is never
made for each token: inside a block of tokens, P_t q_t is the causal product ``tril(q k^T) k``, and what came before the
block is one d x d matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory import l2_normalise
from ..ops.bands import take
from ..ops.grid import Grid
from ..rules.precision import are_finite


def project_since_start(q: Tensor, k: Tensor, carried: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
    """P_t q_t with P summed from the first token of each row on.

    Args:
        q, k: ``[batch, heads, time, dim]``, k of any length; time at least 1.
        carried: P before the first token here, ``[batch, heads, dim, dim]``.
        length: ``[batch]``, real tokens of each row, the rest being right padding; None: all.

    Returns:
        P_t q_t ``[batch, heads, time, dim]``, and P after the last real token.
    """
    time, dim = q.shape[-2:]
    block = min(time, dim)  # where both parts cost the same
    count = -(-time // block)
    unit = _unit(k, None if length is None else torch.arange(time, device=k.device) < length[:, None])
    q, unit = (F.pad(x, (0, 0, 0, count * block - time)).unflatten(2, (count, block)) for x in (q, unit))
    until = torch.cat([carried[:, :, None], unit.mT @ unit], 2).cumsum(2)  # P before each block, and at the end
    y = _causal(q, unit) + q @ until[:, :, :-1]
    return y.flatten(2, 3)[..., :time, :], until[:, :, -1]


def project_since_chunk(
    q: Tensor, k: Tensor, carried: Tensor, length: Tensor | None, phase: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """P_t q_t with P summed from the first token of each chunk on; arguments and results as for
    ``project_since_start``, and:

    Args:
        phase: ``[batch]``, how far in its chunk each row is; None: at the start. ``carried`` belongs to that chunk.
        chunk: tokens in a chunk. P is zero again after the last of them.
    """
    grid = Grid(chunk, q.shape[-2], phase, length)
    asked = grid.chunks(q)
    unit = _unit(grid.lay(k), grid.inside(k.device))
    y = _causal(asked, unit.unflatten(2, (grid.count, chunk)))
    y = torch.cat([y[:, :, :1] + asked[:, :, :1] @ carried[:, :, None], y[:, :, 1:]], 2).flatten(2, 3)
    # The chunk in which each row stopped: the one behind the grid, which is empty, where that is full.
    stopped = (torch.zeros(len(q), dtype=torch.int64, device=q.device) + grid.end)[:, None] // chunk
    last = take(F.pad(unit, (0, 0, 0, chunk)), stopped * chunk + torch.arange(chunk, device=q.device))
    return grid.back(y), last.mT @ last + torch.where((stopped == 0)[..., None, None], carried, 0.0)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    """sum over tau <= t of k_tau (k_tau . q_t), for unit keys: ``[..., time, dim]`` all."""
    return (q @ k.mT).tril() @ k


def _unit(k: Tensor, real: Tensor | None) -> Tensor:
    """k at unit length, zero where it is no number or not ``real`` ``[batch or 1, time]``."""
    counts = are_finite(k) if real is None else are_finite(k) & real[:, None]
    return l2_normalise(torch.where(counts[..., None], k, 0.0))
