"""All chunks of a group at once, where the memory is one matrix and its updates are linear in it, as the delta rule's
are. What a chunk does to its matrix is then known before the matrix is: with D = W - T, T the decay target, F the
inputs f of its b tokens as rows, Q its queries, U the updates of triangular.py, ``[..., b, m]``, and in the first line
R and cA a row late,

    U = U_0 + G D^T,                 where (I + diag(rate) (R * K)) [U_0, G] = [base + rate T f, rate cA f]
    D' = D M - B,                    M = cA_b I - G^T diag(r) F,   B = (diag(r) U_0)^T F,   r the last row of R
    y = Y + A D^T,                   A = diag(cA) Q - (R * K_qk) G,   Y = Q T^T - (R * K_qk) U_0

So everything but D' = D M - B, one product a chunk, is computed for all chunks together, in few large operations in
place of many small ones. For which rules: ``has_scan`` in dispatch.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.rule import Rule
from .banded import decay_matrix
from .chunk_context import Chunk, ChunkParams, MatrixState
from .fast_weight import times
from .triangular import late


def read_chunks(
    rule: Rule, params: ChunkParams, memory: MatrixState, chunks: Chunk, filled: bool
) -> tuple[Tensor, MatrixState]:
    """What ``read_chunk`` makes of one chunk after the other: y ``[chunks, n, b, dim]`` and the matrix ``[n, dim,
    dim]`` after the last.

    Args:
        memory: the matrix before the first chunk, at whose start all sequences are.
        chunks: several, the first dimension of every tensor; gates one a head.
        filled: whether the last is read to its end.
    """
    count, n = chunks.v.shape[:2]
    k, q, v, window, alpha, _, eta, _ = (x.flatten(0, 1) for x in chunks)  # as sequences of a batch
    decay, dim, target = decay_matrix(alpha), v.shape[-1], params.targets[0][0]
    retained = (alpha[:, :1] * decay[..., 0])[..., None]
    mix = decay * (eta * window)[:, None]
    rate = alpha[..., None] if rule.optimiser.after_decay else torch.ones_like(retained)
    base = rule.bias.derivative(v, v)  # of whatever prediction
    base = base if target is None else base + rate * times(k, target)
    system = rate * late(mix) * k.bmm(k.mT)
    right = torch.cat([base, rate * late(retained, 1.0) * k], -1)
    updates, by_matrix = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).chunk(2, -1)
    seen, last = -(mix * q.bmm(k.mT)), mix[:, -1, :, None] * k
    reads = torch.baddbmm(retained * q, seen, by_matrix)
    y = seen.bmm(updates) if target is None else torch.baddbmm(times(q, target), seen, updates)
    moves = retained[:, -1:] * torch.eye(dim, dtype=k.dtype, device=k.device) - by_matrix.mT.bmm(last)
    writes = updates.mT.bmm(last)
    w = memory.weights if target is None else (memory.weights.unflatten(0, (-1, len(target))) - target).flatten(0, 1)
    at = [w]
    for move, write in zip(moves.split(n), writes.split(n), strict=True):
        at.append(torch.baddbmm(write, at[-1], move, beta=-1))
    y = rule.network.end(q, torch.baddbmm(y, reads, torch.cat(at[:-1]).mT), params.params.norm)
    end, start = at[-1], at[-2]
    if target is not None:
        end, start = ((x.unflatten(0, (-1, len(target))) + target).flatten(0, 1) for x in (end, start))
    return y.unflatten(0, (count, n)), MatrixState(end, None if filled else start)
