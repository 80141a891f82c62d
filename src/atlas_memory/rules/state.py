"""The state of a memory between calls. Its size is fixed, except with ``Exponential`` features without a horizon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import KeyEntry, MappingKey, register_pytree_node

if TYPE_CHECKING:
    from .rule import Rule


MAX_TOKENS = 2**53
"""The most tokens that a state has read."""

Tree = Any
"""A tensor, None, a state, or a tuple of trees."""


def _map(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else fn(tree)
    if isinstance(tree, tuple):
        return tuple(_map(fn, part) for part in tree)
    if not isinstance(tree, State):
        raise TypeError(f"a state holds tensors, other states, None and tuples of these, got {tree!r} in it")
    return tree.map(fn)


def _named(name: str, tree: Tree) -> Iterator[tuple[str, Tensor]]:
    if tree is None:
        return
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, tuple):
        for i, part in enumerate(tree):
            yield from _named(f"{name}.{i}", part)
    else:
        yield from ((f"{name}.{inner}", t) for inner, t in tree.named_tensors())


def _flatten(state: State) -> tuple[list[Tree], str]:
    """The fields of a state that are not None, and their names as one string, which ``torch.export`` can save."""
    names = [f.name for f in fields(state) if getattr(state, f.name) is not None]  # type: ignore[arg-type]
    return [getattr(state, name) for name in names], " ".join(names)


def _flatten_with_keys(state: State) -> tuple[list[tuple[KeyEntry, Tree]], str]:
    # Not GetAttrKey: torch.export, which replaces paths in its checks by their text, takes state.keys for state.k.
    parts, names = _flatten(state)
    return [(MappingKey(name), part) for name, part in zip(names.split(), parts, strict=True)], names


def _unflatten(cls: type[State], parts: Iterable[Tree], names: str) -> State:
    values = dict(zip(names.split(), parts, strict=True))
    return cls(*(values.get(f.name) for f in fields(cls)))  # type: ignore[arg-type]


class State:
    """The base class of states: frozen dataclasses of tensors with the batch first, other states, None and tuples of
    these. They are values: make new tensors instead of changing theirs in place. They are pytrees, and
    ``torch.load(..., weights_only=True)`` reads them once their class has been imported."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        torch.serialization.add_safe_globals([cls])
        register_pytree_node(
            cls,
            _flatten,
            partial(_unflatten, cls),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            flatten_with_keys_fn=_flatten_with_keys,
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The state with ``fn`` applied to every tensor, e.g. ``state.map(lambda x: x[:1])``, its first row."""
        return type(self)(*(_map(fn, getattr(self, f.name)) for f in fields(self)))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        """The state on another device, its dtypes as they are."""
        return self.map(lambda t: t.to(device))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor and its path, such as ``memory.matrices.0.weights``."""
        for f in fields(self):  # type: ignore[arg-type]
            yield from _named(f.name, getattr(self, f.name))

    def tensors(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_tensors())

    def detach(self) -> Self:
        """The state without its graph, to train on from; inference tensors are copied."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # a copy would be another of that kind
            return self.map(Tensor.detach)
        return self.map(lambda t: t.detach().clone() if t.is_inference() else t.detach())

    def straight_through(self, fresh: Self) -> Self:
        """The state, which has no graph, with the gradient of ``fresh``, a layer's ``initial_state``: carried states
        train M_0 then, as if nothing of it had been forgotten."""
        starts = fresh.tensors()

        def add(old: Tensor) -> Tensor:
            start = next(starts)
            if not start.requires_grad:
                return old
            # For F.pad, from the last dimension on: behind, by as much as the state has grown.
            sizes = zip(old.shape[:0:-1], start.shape[:0:-1], strict=True)
            padding = [more for now, at_first in sizes for more in (0, now - at_first)]
            return old + F.pad(start - start.detach(), padding)

        return self.map(add)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with the graph; ``copy.deepcopy`` refuses tensors that have one."""
        return self.map(lambda t: memo.setdefault(id(t), t.clone()))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def __repr__(self) -> str:
        parts = (f"{name}={list(t.shape)}" for name, t in self.named_tensors())
        return f"{type(self).__name__}({', '.join(parts)}: {self.nbytes:,} bytes)"


@dataclass(frozen=True, repr=False, eq=False)
class Matrix(State):
    """One matrix of a memory, ``[batch, heads, rows, columns]`` each; on phi* with a column for every key at the end.

    Attributes:
        weights: W_t, the matrix now.
        frozen: W before the current chunk, at which gradients are taken.
        sums: what the optimiser keeps of gradients, such as S_t; empty without momentum.
        dual: the accumulator A_t of a retention with a mirror map, else None.
    """

    weights: Tensor
    frozen: Tensor
    sums: tuple[Tensor, ...] = ()
    dual: Tensor | None = None


@dataclass(frozen=True, repr=False, eq=False)
class MemoryState(State):
    """A memory between two calls.

    Attributes:
        matrices: those of the memory network, in the order in which they act.
        k, v: the last c - 1 keys and values, ``[batch, heads, c - 1, dim]``, zero before the first token. If the bias
            reads a gate delta, it is the last entry of v.
        keys: ``[batch, heads, n, dim]``, the key of each column of the feature-mapped matrices, the latest last; n is 0
            but for ``Exponential`` features.
        seen: ``[batch]`` int64, tokens read so far; ``seen % chunk`` is the place within the chunk.
    """

    matrices: tuple[Matrix, ...]
    k: Tensor
    v: Tensor
    keys: Tensor
    seen: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """W_t of every matrix."""
        return tuple(m.weights for m in self.matrices)

    @property
    def frozen(self) -> tuple[Tensor, ...]:
        """W of every matrix before the current chunk."""
        return tuple(m.frozen for m in self.matrices)

    def readout_weights(self, rule: Rule) -> tuple[Tensor, ...]:
        """The matrices with which the memory answers now (``InnerOptimiser.readout_weights``)."""
        stepped = self.seen % rule.every == 0
        return tuple(rule.optimiser.readout_weights(m.sums, m.weights, stepped) for m in self.matrices)

    def answering_with(self, weights: tuple[Tensor, ...]) -> MemoryState:
        """The state with these matrices and nothing pending."""
        matrices = (
            replace(m, weights=w, frozen=w, sums=tuple(map(torch.zeros_like, m.sums)))
            for m, w in zip(self.matrices, weights, strict=True)
        )
        return replace(self, matrices=tuple(matrices))

    def map_key_columns(self, rule: Rule, fn: Callable[[Tensor], Tensor], keys: Tensor) -> MemoryState:
        """For phi*: the state with these ``keys``, and ``fn`` applied to the columns of keys of all matrices."""
        of_keys = partial(map_columns, fn, keys.shape[-1])
        matrices = tuple(m.map(of_keys) if rule.kernelised(i) else m for i, m in enumerate(self.matrices))
        return replace(self, matrices=matrices, keys=keys)


def check_count(seen: Tensor) -> None:
    """Raise ValueError if ``seen``, a state's count of tokens, has been cast to floating point."""
    if seen.is_floating_point():
        raise ValueError(
            f"the state's seen, which counts tokens, must be int64, got {seen.dtype}: cast t.is_floating_point()"
        )


def check_numbers(state: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raise ValueError unless the named tensors of a state are finite, and counts of tokens 0 to ``MAX_TOKENS``."""
    for name, t in state:
        if t.dtype == torch.bool or t.is_complex() or (t.is_floating_point() and t.itemsize == 1):
            raise ValueError(f"{where} has {name} of {t.dtype}, in which no state is kept")
        if t.is_floating_point():
            if not t.isfinite().all():
                raise ValueError(f"{where} has numbers in {name} that are not finite: begin with another, or with None")
        elif len(wrong := t[(t < 0) | (t > MAX_TOKENS)]):
            raise ValueError(
                f"{where} has {name}={int(wrong[0])}, and it counts tokens: it must be 0 to {MAX_TOKENS:,}"
            )


def map_columns(fn: Callable[[Tensor], Tensor], first: int, w: Tensor) -> Tensor:
    """``w`` with ``fn`` applied to all but the ``first`` columns."""
    return torch.cat([w[..., :first], fn(w[..., first:])], -1)


def initial_state(rule: Rule, initial: tuple[Tensor, ...], k: Tensor) -> MemoryState:
    """The state before the first token, from M_0 (``initial``, each ``[heads, rows, columns]``); ``k``
    ``[batch, heads, time, dim]`` gives batch, dim, dtype and device."""
    batch, heads, _, dim = k.shape
    past = k.new_zeros(batch, heads, rule.window.size - 1, dim)
    keys = past if rule.features.infinite else past[..., :0, :]

    def begin(i: int, m: Tensor) -> Matrix:
        w, a = rule.retention.begin(F.pad(m, (0, keys.shape[2])) if rule.kernelised(i) else m)
        dual = None if a is None else a.to(k).repeat(batch, 1, 1, 1)
        weights = w.to(k).repeat(batch, 1, 1, 1)  # copied, since M_0 may be trained meanwhile
        return Matrix(weights, weights, (torch.zeros_like(weights),) * rule.accumulators, dual)

    return MemoryState(
        matrices=tuple(begin(i, m) for i, m in enumerate(initial)),
        k=past,
        v=k.new_zeros(batch, heads, rule.window.size - 1, dim + rule.bias.has_delta),
        keys=keys,
        seen=torch.zeros(batch, dtype=torch.int64, device=k.device),
    )
