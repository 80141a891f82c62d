"""How the matrices of a memory see the tokens of a chunk (``Inputs``): feature-mapped ones as phi(k) and phi(q), the
others as hidden units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..rules.autograd import Function, call, without_autocast
from ..rules.rule import Params, Rule
from .dispatch import has_chunks
from .fast_weight import Inputs, add_product, large
from .kernel_cache import KernelColumns

Write = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MappedInputs:
    """How feature-mapped matrices see a chunk: all of them alike.

    Attributes:
        keys, queries: how they see the window tokens and the queries.
        both: the function of a matrix W that gives W phi(k) and W phi(q), from one product.
        write: see ``Updates``.
    """

    keys: Inputs
    queries: Inputs
    both: Callable[[Tensor], tuple[Tensor, Tensor]]
    write: Write

    @staticmethod
    def of(rule: Rule, params: Params, kq: Tensor, k: Tensor, q: Tensor, columns: KernelColumns | None) -> MappedInputs:
        """For the window tokens' keys k ``[..., N, dim]`` and the queries q ``[..., b, dim]`` of a chunk, which lie one
        after the other in kq; ``columns`` are those of the keys, for phi*."""
        kernel = partial(rule.features.kernel, sqrt_a=params.sqrt_a)
        to_keys, to_queries = cached(partial(kernel, k, k)), cached(partial(kernel, q, k))
        sizes = [k.shape[-2], q.shape[-2]]
        filled = k if columns is None else columns.keys[..., : columns.filled, :]
        f = rule.features.columns(kq, filled, params.sqrt_a)
        cut, write = (None, None) if columns is None else (f.shape[-1], _into(columns))

        def apply(f: Tensor, w: Tensor) -> Tensor:
            w = w if cut is None else w[..., :cut]
            return times(f if cut is None else f[..., : w.shape[-1]], w)  # M_0 has the first columns only

        def both(w: Tensor) -> tuple[Tensor, Tensor]:
            of_keys, of_queries = apply(f, w).split(sizes, -2)
            return of_keys, of_queries

        f_k, f_q = f.split(sizes, -2)
        written = rule.retention.tangent(f_k)
        if rule.retention.fixed_row_sums:
            to_keys, to_queries = cached(partial(times, f_k, written)), cached(partial(times, f_q, written))
        keys, queries = (
            Inputs(u, partial(apply, f_u), f_u if columns is None else None, written, to)
            for u, f_u, to in ((k, f_k, to_keys), (q, f_q, to_queries))
        )
        return MappedInputs(keys, queries, both, partial(add, written) if write is None else write)

    def at(self, w: Tensor) -> tuple[Inputs, Inputs]:
        """``keys`` and ``queries`` for the matrix that makes the chunk's steps from w on, with ``known`` filled in."""
        of_keys, of_queries = self.both(w)
        return replace(self.keys, known=of_keys), replace(self.queries, known=of_queries)


def centred(rule: Rule, i: int, u: Tensor) -> Tensor:
    """What matrix i, which is not feature-mapped, multiplies of its input u ``[..., width]``: u itself; but u less its
    mean if it is the last matrix, its rows have the same sum at all times and a layer norm follows. All outputs of a
    token then differ by one number, which the norm takes away, and with it most of the rounding (notes/diary.md). Rows
    have the same sum at all times where W does not decay to zero and steps are made of gradients as they come, which is
    not known of classes without a fast form."""
    retention, last = rule.retention, i + 1 == len(rule.network.feature_mapped)
    if not (retention.fixed_row_sums and last and rule.network.norm) or rule.optimiser.erases or not has_chunks(rule):
        return u
    return u if retention.gated and not retention.to_initial else retention.tangent(u)


def hidden_inputs(u: Tensor, written: Tensor) -> Inputs:
    """How a matrix that is not feature-mapped sees tokens with hidden units u ``[..., n, width]``; ``written`` are
    those of the window tokens, as writes use them."""
    return Inputs(u, partial(times, u), u, written, cached(partial(times, u, written)))


def cached(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``compute``, called at most once."""
    found: list[Tensor] = []

    def kept() -> Tensor:
        if not found:
            found.append(compute())
        return found[0]

    return kept


def times(f: Tensor, w: Tensor) -> Tensor:
    """W f for each of n tokens, ``[..., n, F], [..., m, F] -> [..., n, m]``; with inputs f_i in place of W, f . f_i. W
    may be one matrix for each head, ``[heads, m, F]``."""
    if w.dim() == f.dim():
        return call(_Times, f, w) if large(w) else f @ w.mT
    # A product would copy W for each sequence.
    return _by_sequence(call(_Times, _by_head(f), w), f) if large(f) else torch.einsum("bhnf,hmf->bhnm", f, w)


class _Times(Function):
    """``times`` with its gradients, both by rows, as f and W lie. PyTorch's own of W lies by columns, and that of W f^T
    for f: what they are added to and multiplied by is then passed over twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, w: Tensor) -> Tensor:
        return f @ w.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        f, w = ctx.saved_tensors
        return g @ w, g.mT @ f


def _by_head(x: Tensor) -> Tensor:
    """``[batch, heads, n, m] -> [heads, batch * n, m]``."""
    return x.transpose(0, 1).flatten(1, 2)


def _by_sequence(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_by_head``, for as many tokens as ``like`` has."""
    return x.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)


def add(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
    """A write, W + sum_i a_i f_i^T: f ``[..., N, F]``, w ``[..., m, F]``, a ``[..., N, m]``."""
    return call(_Add, f, w, a) if large(w) else add_product(w, a.mT, f)


class _Add(Function):
    """``add`` with its gradients by rows, as its arguments lie."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return add_product(w, a.mT, f)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, a = ctx.saved_tensors
        return a @ g, g, f @ g.mT


def _into(columns: KernelColumns) -> Write:
    """``write`` on phi*: a sum into the columns of the window tokens, which come after the columns of M_0."""
    at = columns.window[:, None, None] + columns.keys.shape[-1]
    return lambda w, a: w.scatter_add(-1, at.expand(*w.shape[:-1], -1), a.mT)
