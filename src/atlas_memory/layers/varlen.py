"""Rows that hold several documents, each read as a sequence of its own.

A document begins with everything empty: memory, window, momentum, convolution and attention. Rows are therefore cut
where documents begin, the pieces read as batches of sequences of like length, and the results put back. Nothing
below this file knows of documents, so a packed document is exactly the document alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..rules.state import State
from .padding import check_mask, check_tensor
from .stateful import Stateful


@dataclass(frozen=True)
class Pieces:
    """Pieces of rows that are read as one batch, each padded to the longest. A row is one of the batch of a call.

    Attributes:
        index: `[pieces, longest]` int64, where a piece's tokens stand in the batch, its rows put one behind the other.
        real: `[pieces, longest]` bool, False behind the end of a shorter piece; None: all are equally long.
        row: `[pieces]`, the row from which a piece was cut; pieces are in the order of their tokens.
        continues: `[pieces]` bool, whether a piece goes on with the document that its row was in before this call.
    """

    index: Tensor
    real: Tensor | None
    row: Tensor
    continues: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Pieces:
        """The same on a device."""
        move = partial(torch.Tensor.to, device=device, non_blocking=non_blocking)
        real = None if self.real is None else move(self.real)
        return Pieces(move(self.index), real, move(self.row), move(self.continues))

    def split(self, x: Tensor) -> Tensor:
        """Tokens `[batch, time, ...]` as `[pieces, longest, ...]`; behind the end of a piece stand tokens of others."""
        return x.flatten(0, 1)[self.index]

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """Which tokens of the pieces are real: their own, where `mask` `[batch, time]` is not zero; None: all."""
        if mask is None or self.real is None:
            return self.real if mask is None else self.split(mask.bool())
        return self.real & self.split(mask.bool())

    def own(self, y: Tensor) -> Tensor:
        """The own tokens of the pieces, from `[pieces, longest, ...]`, one behind the other: `[tokens, ...]`."""
        return y.flatten(0, 1) if self.real is None else y[self.real]

    def begin(self, layer: nn.Module, x: Tensor, state: State | None) -> State | None:
        """The state with which each piece of the rows x begins: that of its row, or a fresh one.

        Raises:
            ValueError: the state grows with what was read, and is longer than a fresh one.
        """
        if state is None or not self.continues.any():
            return None
        if (first := next(state.tensors(), None)) is None:
            return state  # of nothing
        if first.shape[0] != x.shape[0]:
            raise ValueError(f"x has batch size {x.shape[0]} but the state has {first.shape[0]}; give the same rows")
        _, fresh = layer(x[:1, :0])
        source = torch.where(self.continues, self.row, x.shape[0])
        of_fresh = fresh.tensors()

        def choose(held: Tensor) -> Tensor:
            new = next(of_fresh)
            if held.shape[1:] != new.shape[1:]:
                raise ValueError(
                    f"a {type(layer).__name__} has a state that grows with what it reads (up to a horizon, if it has "
                    "one): give document_starts to a call that begins without a state"
                )
            return torch.cat([held, new.to(held.dtype)])[source.to(held.device)]

        return state.map(choose)


@dataclass(frozen=True)
class Documents:
    """How rows `[batch, time]` are cut into pieces, none of which reaches over the beginning of a document.

    Attributes:
        groups: The pieces, in batches of similar length, so that padding at most doubles what is read (except where a
            state grows with what is read).
        place: `[batch * time]`, where each token of the rows is among the tokens of all groups, put one behind the
            other; None: they are in order.
        last: `[batch]`, which piece is the last of each row, counted over all groups.
        shape: (batch, time).
    """

    groups: tuple[Pieces, ...]
    place: Tensor | None
    last: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, starts: Tensor | Documents | None, x: Tensor, layer: nn.Module, mask: Tensor | None = None
    ) -> Documents | None:
        """The cuts for x `[batch, time, ...]`; None where nothing begins.

        Args:
            starts: `[batch, time]`, bool or numbers, nonzero at the first token of every document; or the cuts that
                were made of them.
            layer: The layer that is to read x. If its state grows with what it reads, all pieces are one group, whose
                states are then of one length.
            mask: `[batch, time]`, nonzero at real tokens; a start that is marked at padding is that of the next real
                token. Where no more follows in this call, the document has begun and is empty.

        Raises:
            ValueError: starts is no tensor `[batch, time]`, or the mask of another shape.
        """
        if starts is None or isinstance(starts, Documents):
            return starts
        check_tensor("document_starts", starts)
        if starts.shape != x.shape[:2]:
            raise ValueError(
                f"document_starts has shape {list(starts.shape)} but the tokens are [batch, time] = "
                f"{list(x.shape[:2])}; mark the first token of every document in this call"
            )
        check_mask("document_starts", starts)
        batch, time = starts.shape
        starts = starts.to(x.device).bool()
        if mask is not None:
            _check_like(mask, starts)
            starts = at_real_tokens(starts, mask.to(starts.device))
        if not time or not starts.any():
            return None
        begins = starts.clone()
        begins[:, 0] = True
        row, column = begins.nonzero(as_tuple=True)
        first = row * time + column
        length = torch.diff(first, append=first.new_tensor([batch * time]))
        grows = any(getattr(module, "grows", False) for module in layer.modules())
        chosen = [torch.arange(len(length), device=x.device)] if grows else _alike(length)
        groups = []
        for pieces in chosen:
            token = torch.arange(int(length[pieces].max()), device=x.device)
            index, real = first[pieces, None] + token, token < length[pieces, None]
            groups.append(
                Pieces(
                    index=index.clamp(max=batch * time - 1),
                    real=None if bool(real.all()) else real,
                    row=row[pieces],
                    continues=~starts[row[pieces], column[pieces]],
                )
            )
        return cls(
            groups=tuple(groups),
            place=torch.cat([g.own(g.index) for g in groups]).argsort() if len(groups) > 1 else None,
            last=torch.cat(chosen).argsort()[begins.sum(1).cumsum(0) - 1],
            shape=(batch, time),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False, **_: Any) -> Documents:
        """The same on a device: accelerate calls this where the layers of a model lie on several."""
        place = None if self.place is None else self.place.to(device, non_blocking=non_blocking)
        groups = tuple(group.to(device, non_blocking) for group in self.groups)
        return Documents(groups, place, self.last.to(device, non_blocking=non_blocking), self.shape)

    def join(self, ys: list[Tensor]) -> Tensor:
        """Results of each group `[pieces, longest, ...]` as `[batch, time, ...]`."""
        y = torch.cat([g.own(y) for g, y in zip(self.groups, ys, strict=True)])
        return (y if self.place is None else y[self.place]).unflatten(0, self.shape)

    def end(self, states: list[State]) -> State:
        """The state after each row, from the states after the pieces of each group."""
        others = [state.tensors() for state in states[1:]]
        return states[0].map(lambda t: torch.cat([t, *map(next, others)])[self.last.to(t.device)])


def _alike(length: Tensor) -> list[Tensor]:
    """Pieces of `length` `[pieces]` in groups of similar length. If padding all to the longest makes at most twice as
    many tokens, they are one group; else those longer than half the longest are, and the rest is grouped so again.
    Groups are read one after the other: padding, and the number of groups, then each cost at most as much again as the
    tokens."""
    groups = []
    order = length.argsort(descending=True, stable=True)
    while len(order):
        sizes = length[order]
        longest, count = int(sizes[0]), len(order)
        if count * longest > 2 * int(sizes.sum()):
            count = int((2 * sizes > longest).sum())
        groups.append(order[:count].sort().values)
        order = order[count:]
    return groups


def _read(layer: nn.Module, x: Tensor, state: Any, mask: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """`layer(x, state, mask, **options)`.

    Raises:
        ValueError: the layer returns something else than y, shaped as x, and a state; one that is not `Stateful` may
            return anything as its state.
    """
    found, name = layer(x, state, mask, **options), type(layer).__name__
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"{name} must return (y, state) for each call, got a {type(found).__name__}")
    y, after = found
    if not isinstance(y, Tensor) or y.shape != x.shape:
        got = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise ValueError(f"{name} must return y [batch, time, dim] as x is, {list(x.shape)}; got {got}")
    if isinstance(layer, Stateful) and not isinstance(after, State):
        raise ValueError(
            f"{name} must return a State beside y, got a {type(after).__name__}: make it a frozen dataclass of "
            "tensors, the batch first in each, that derives from State (atlas_memory.memory)"
        )
    for at, tensor in after.named_tensors() if isinstance(layer, Stateful) else ():
        if tensor.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"{name} must have the batch of {len(x)} first in every tensor of its state, got {at} "
                f"{list(tensor.shape)}"
            )
    return y, after


def _check_like(mask: Any, starts: Tensor) -> None:
    check_tensor("mask", mask)
    if mask.shape != starts.shape:
        raise ValueError(f"mask has shape {list(mask.shape)} but document_starts {list(starts.shape)}; give the same")


def before_each(mask: Tensor) -> Tensor:
    """The place of the real token before each token of `mask` `[batch, time]`, int64 `[batch, time]`; -1: none."""
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    nearest = torch.where(mask.bool(), places, -1)
    return torch.nn.functional.pad(nearest, (1, 0), value=-1)[:, :-1].cummax(1).values


def at_real_tokens(starts: Tensor, mask: Tensor) -> Tensor:
    """Where documents begin, bool `[batch, time]`, with what is marked at padding moved to the real token behind it, or
    to the last place where none is behind it."""
    marks, before = starts.cumsum(1), before_each(mask)
    earlier = torch.where(before < 0, 0, marks.gather(1, before.clamp(min=0)))
    place = mask.bool().clone()
    place[:, -1:] = True
    return place & (marks > earlier)


def read_documents(
    layer: nn.Module, x: Tensor, state: Any, mask: Tensor | None, starts: Tensor | Documents | None, **options: Any
) -> tuple[Tensor, Any]:
    """`layer(x, state, mask, **options)` with every document a sequence of its own; starts as in `Documents.of`."""
    documents = Documents.of(starts, x, layer, mask)
    if documents is None:
        return _read(layer, x, state, mask, options)
    results = [_read(layer, g.split(x), g.begin(layer, x, state), g.mask(mask), options) for g in documents.groups]
    return documents.join([y for y, _ in results]), documents.end([after for _, after in results])
