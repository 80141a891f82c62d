"""What one chunk of ``chunkwise`` is made of. Sequences and heads are one leading dimension here, n = batch * heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules.rule import Params, Rule
from ..rules.state import Matrix
from .fast_weight import add_product, times, to_rows, weighted
from .muon_space import MuonSpace
from .triangular import WindowPairs

Condition = Tensor | bool
"""Whether something holds: for all sequences and heads, or for each, ``[n]``."""


class Chunk(NamedTuple):
    """One chunk of b slots for tokens, and its N window tokens: its own, the c - 1 before it, and before these a few
    empty places (``tokens_before`` in chunk_layout.py). A slot is empty where the sequence has no token of this call,
    since the call begins or ends inside the chunk.

    Attributes:
        k, q: keys of the window tokens ``[n, N, dim]``, queries ``[n, b, dim]``.
        v: values of the window tokens, ``[n, N, dim]``, or ``dim + 1`` with the gate delta.
        window: Gamma ``[n, b, N]``, gamma of each token (row) and window token; with windows of one token its diagonal,
            ``[n, b]``.
        alpha, eta: ``[n, b]`` or channel-wise ``[n, b, dim]``; 1 and 0 in empty slots.
        theta: ``[n, b]``; 1 in empty slots, where it is read.
        inside: which slots are not empty, bool ``[n, b]``.
    """

    k: Tensor
    q: Tensor
    v: Tensor
    window: Tensor
    alpha: Tensor
    theta: Tensor
    eta: Tensor
    inside: Tensor


class MatrixState(NamedTuple):
    """One matrix of the memory between two chunks, ``[n, rows, columns]`` each: ``Matrix`` (rules/state.py), except
    that ``frozen`` is None where it equals ``weights``, as at the start of every chunk under a linear retention."""

    weights: Tensor
    frozen: Tensor | None
    sums: tuple[Tensor, ...] = ()
    dual: Tensor | None = None

    @staticmethod
    def of(matrix: Matrix, aligned: bool) -> MatrixState:
        """From a state in which, if ``aligned``, all sequences of the batch are at the start of a chunk."""
        frozen = None if aligned and matrix.dual is None else matrix.frozen
        return MatrixState(matrix.weights, frozen, matrix.sums, matrix.dual).map(lambda x: x.flatten(0, 1))

    @property
    def start(self) -> Tensor:
        """The frozen matrix, W as it was at the start of the chunk."""
        return self.weights if self.frozen is None else self.frozen

    def map(self, fn: Callable[[Tensor], Tensor]) -> MatrixState:
        """The same with ``fn`` applied to every tensor."""
        frozen, dual = (None if x is None else fn(x) for x in (self.frozen, self.dual))
        return MatrixState(fn(self.weights), frozen, tuple(map(fn, self.sums)), dual)

    def matrix(self, heads: int) -> Matrix:
        """The ``Matrix`` that a state holds."""
        weights = self.weights.unflatten(0, (-1, heads))
        frozen, dual = (None if x is None else x.unflatten(0, (-1, heads)) for x in (self.frozen, self.dual))
        sums = tuple(s.unflatten(0, (-1, heads)) for s in self.sums)
        return Matrix(weights, weights if frozen is None else frozen, sums, dual)


class Inputs(NamedTuple):
    """The inputs f of a matrix for some tokens, its window tokens or its queries: phi(k) or phi(q) where the matrix is
    feature-mapped, else hidden units.

    Attributes:
        f: ``[n, tokens, F]``; of infinite-dimensional features the kernel with the keys of the columns so far.
        written: of window tokens, the inputs of which writes are made (``tangent`` of retentions); of queries, None.
        kernel: f . written_i for every window token i, ``[n, tokens, N]``; None where nothing needs it.
        at_target: what the matrix's decay target answers, ``[n, tokens, rows]``; None where it has not been computed.
        known: W_0 f ``[n, tokens, rows]`` for the matrix before the chunk; None where it has not been computed.
        columns: of infinite-dimensional features, the column of each window token, ``[n, N]``.
    """

    f: Tensor
    written: Tensor | None = None
    kernel: Tensor | None = None
    at_target: Tensor | None = None
    known: Tensor | None = None
    columns: Tensor | None = None

    def apply(self, w: Tensor) -> Tensor:
        """W f for every token, ``[n, tokens, rows]``; W is ``[n, rows, F]``, or ``[heads, rows, F]``. Of infinite-
        dimensional features M_0 has the first columns only, and W zeros after those of f."""
        f, have, want = self.f, w.shape[-1], self.f.shape[-1]
        if have == want:
            return times(f, w)
        return times(f[..., :have], w) if have < want else times(f, w[..., :want])


class ChunkParams(NamedTuple):
    """The outer parameters as a chunk needs them.

    Attributes:
        params: gain and shift of a layer norm are ``[n, dim]``; M_0 is ``[heads, rows, columns]``, or with a mirror map
            ``[n, rows, columns]``.
        targets: for each matrix the decay targets of W and of its dual variable A, shaped as M_0; None: zero.
    """

    params: Params
    targets: tuple[tuple[Tensor | None, Tensor | None], ...]

    @staticmethod
    def of(rule: Rule, params: Params, batch: int) -> ChunkParams:
        """For so many sequences."""
        initial, norm = params.initial, params.norm
        if rule.retention.has_mirror_map and batch != 1:
            initial = tuple(m.repeat(batch, 1, 1) for m in initial)
        if norm is not None and batch != 1:
            norm = norm[0].repeat(batch, 1), norm[1].repeat(batch, 1)
        return ChunkParams(Params(initial, params.sqrt_a, norm), tuple(map(rule.retention.decay_target, initial)))


class ChunkContext(NamedTuple):
    """What all matrices of a memory have in common over a chunk.

    Attributes:
        online: whether the rule's errors are.
        filled: whether the chunk is read to its end.
        pairs: the pairs of triangular.py, where errors are online and windows longer than one token; else None.
        muon_space: how Muon orthogonalises.
    """

    rule: Rule
    online: bool
    chunk: Chunk
    filled: Condition
    pairs: WindowPairs | None
    muon_space: MuonSpace


class MatrixContext(NamedTuple):
    """One matrix of the memory over one chunk.

    Attributes:
        state: the matrix before the chunk.
        initial, target, dual_target: its M_0, and the decay targets of W and A; see ``ChunkParams``.
        keys: the inputs of the window tokens.
        errors, back: of pairs, the errors at the pre-norm output ``[n, U, dim]`` and the function that makes this
            matrix's updates of them. Errors are shorter than updates, and are summed first; those of all pairs of one
            window token are back-propagated in the same way. None: updates are summed.
    """

    context: ChunkContext
    state: MatrixState
    initial: Tensor
    target: Tensor | None
    dual_target: Tensor | None
    keys: Inputs
    errors: Tensor | None = None
    back: Callable[[Tensor], Tensor] | None = None

    def decayed_answer(self, inputs: Inputs, retained: Tensor) -> Tensor:
        """What the matrix before the chunk, decayed by ``retained`` ``[n, tokens, C]``, answers to inputs: ``[n,
        tokens, rows]``."""
        known = inputs.apply(self.state.weights) if inputs.known is None else inputs.known
        retained = to_rows(retained, known.shape[-1])
        if self.target is None:
            return retained * known
        at_target = inputs.apply(self.target) if inputs.at_target is None else inputs.at_target
        return torch.lerp(at_target, known, retained)

    def write(self, w: Tensor, a: Tensor) -> Tensor:
        """W + sum_i a_i f_i^T over the window tokens, a ``[n, N, rows]``."""
        if self.keys.columns is None:
            assert self.keys.written is not None
            return add_product(self.keys.written, w, a)
        return w.scatter_add(-1, self.keys.columns[:, None].expand(-1, w.shape[-2], -1), a.mT)

    def summed(self, numbers: Tensor, updates: Tensor) -> Tensor:
        """The updates ``[n, U, rows]`` times one number each, ``[n, U]`` or ``[n, C, U]``, summed over those of one
        window token: ``[n, N, rows]``."""
        pairs = self.context.pairs
        if pairs is None:
            return weighted(numbers, updates)
        if self.back is None or self.errors is None or numbers.dim() == 3:  # the errors have other channels
            return pairs.summed(numbers, updates)
        return self.back(pairs.summed(numbers, self.errors))
