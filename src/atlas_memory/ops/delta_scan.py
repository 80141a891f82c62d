"""All chunks of a group at once, where the memory is one matrix and its updates are linear in it, as the delta rule's
are. What a chunk does to its matrix is then known before the matrix is: with D = W - home, F the inputs f of its b
tokens as rows, Q its queries, U the updates of triangular.py, ``[..., b, m]``, and in the first line R and cA a row
late,

    U = U_0 + G D^T,                 where (I + diag(rate) (R * K)) [U_0, G] = [base + rate home f, rate cA f]
    D' = D M - B,                    M = cA_b I - G^T diag(r) F,   B = (diag(r) U_0)^T F,   r the last row of R
    y = Y + A D^T,                   A = diag(cA) Q - (R * K_qk) G,   Y = Q home^T - (R * K_qk) U_0

So everything but D' = D M - B, one product a chunk, is computed for all chunks together, in few large operations in
place of many small ones. For which rules: ``has_scan`` in dispatch.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules.rule import Params, Rule
from .chunk_context import Chunk, MatrixState
from .decay_masks import raw_masks
from .fast_weight import add_product
from .matrix_inputs import times
from .online_gradient import kept
from .triangular import before_each_token


def read_chunks(
    rule: Rule, params: Params, memory: MatrixState, chunks: Chunk, filled: bool
) -> tuple[Tensor, MatrixState]:
    """What ``read_chunk`` makes of one chunk after the other: y ``[batch, heads, n b, dim]`` and the matrix, ``[batch,
    heads, dim, dim]``, after the last.

    Args:
        memory: the matrix before the first chunk, at whose start all sequences stand.
        chunks: n of them, the first dimension of every tensor; gates one a head.
        filled: whether the last is read to its end.
    """
    n, batch = chunks.v.shape[:2]
    each = Chunk(*(x.expand(n, batch, *x.shape[2:]).flatten(0, 1) for x in chunks))  # as sequences of a batch
    b, dim = each.v.shape[-2:]
    k, q = each.kq.split([b, b], -2)
    masks, decay_target = raw_masks(rule, each), rule.retention.decay_target(params.initial[0])[0]
    retained, mixing = masks.retained.mT, masks.mixing().squeeze(-3)
    rate = kept(rule, each).mT
    base = rule.bias.derivative(each.v, each.v)  # of whatever prediction
    base = base if decay_target is None else base + rate * times(k, decay_target)
    system = rate * before_each_token(mixing, 0.0, None) * (k @ k.mT)
    right = torch.cat([base, rate * before_each_token(retained, 1.0, None) * k], -1)
    updates, by_matrix = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).chunk(2, -1)
    seen, last = -(mixing * (q @ k.mT)), mixing[..., -1, :, None] * k
    reads = add_product(retained * q, seen, by_matrix)
    y = seen @ updates if decay_target is None else add_product(times(q, decay_target), seen, updates)
    moves = retained[..., -1:, :] * torch.eye(dim, dtype=k.dtype, device=k.device) - by_matrix.mT @ last
    writes = updates.mT @ last
    at = [memory.weights if decay_target is None else memory.weights - decay_target]
    for move, write in zip(moves.split(batch), writes.split(batch), strict=True):
        at.append(at[-1] @ move - write)
    y = rule.network.end(q, add_product(y, reads, torch.cat(at[:-1]).mT), params.norm)
    end, start = (x if decay_target is None else x + decay_target for x in (at[-1], at[-2]))
    return y.unflatten(0, (n, batch)).movedim(0, 2).flatten(2, 3), MatrixState(end, None if filled else start)
