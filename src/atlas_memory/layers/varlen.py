"""Packed rows: rows that hold several sequences, such as documents, each read as if it were alone.

A sequence begins with an empty state. Packed rows are therefore cut where sequences begin, the sequences read in groups
of similar length, and the results put back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..rules.state import State
from .padding import check_mask
from .stateful import Stateful


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences, or the part of them in this call, that are read as one batch, right padded to the longest.

    Attributes:
        index: `[sequences, longest]` int64, places of their tokens in the flattened rows `[batch * time]`.
        real: `[sequences, longest]` bool, False at padding; None: all are equally long.
        row: `[sequences]`, the row of each, in the order of tokens.
        continues: `[sequences]` bool, whether a sequence began before this call.
    """

    index: Tensor
    real: Tensor | None
    row: Tensor
    continues: Tensor

    def unpack(self, x: Tensor) -> Tensor:
        """Tokens `[batch, time, ...]` as `[sequences, longest, ...]`; at padding stand tokens of other sequences."""
        return x.flatten(0, 1)[self.index]

    def unpack_mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask of the sequences, bool `[sequences, longest]`, from that of the rows `[batch, time]`; None: all."""
        if mask is None:
            return self.real
        mask = self.unpack(mask.bool())
        return mask if self.real is None else self.real & mask

    def flatten(self, y: Tensor) -> Tensor:
        """`[sequences, longest, ...]` without its padding, `[tokens, ...]`."""
        return y.flatten(0, 1) if self.real is None else y[self.real]

    def initial_state(self, layer: nn.Module, x: Tensor, state: State | None) -> State | None:
        """The state with which each sequence begins: that of its row, or a fresh one. ValueError for one that grows."""
        if state is None or not self.continues.any():
            return None
        if (first := next(state.tensors(), None)) is None:
            return state  # it has no tensors
        if first.shape[0] != x.shape[0]:
            raise ValueError(f"x has batch size {x.shape[0]} but the state has {first.shape[0]}; give the same rows")
        fresh = layer(x[:1, :0])[1].tensors()
        source = torch.where(self.continues, self.row, x.shape[0])

        def choose(old: Tensor) -> Tensor:
            new = next(fresh)
            if old.shape[1:] != new.shape[1:]:
                name = type(layer).__name__
                raise ValueError(f"{name} has a state that grows: give document_starts to a call without a state")
            return torch.cat([old, new.to(old.dtype)])[source.to(old.device)]

        return state.map(choose)


@dataclass(frozen=True)
class PackedRows:
    """How rows `[batch, time]` are cut into sequences.

    Attributes:
        groups: The sequences, in groups of similar length; in one where a state grows.
        order: `[batch * time]`, where each token is among those of all groups; None: they are in order.
        last: `[batch]`, which sequence, over all groups, is the last of each row.
        shape: (batch, time).
    """

    groups: tuple[SequenceGroup, ...]
    order: Tensor | None
    last: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_starts(
        cls, starts: Tensor | PackedRows | None, x: Tensor, layer: nn.Module, mask: Tensor | None = None
    ) -> PackedRows | None:
        """The sequences of x `[batch, time, ...]`; None where none begins.

        Args:
            starts: `[batch, time]`, nonzero at the first token of every sequence; or what was made of them.
            layer: The layer that is to read x.
            mask: `[batch, time]`, nonzero at real tokens; a start that is marked at padding is that of the next real
                token. Where none follows in this call, the sequence has begun and is empty.
        """
        if starts is None or isinstance(starts, PackedRows):
            return starts
        check_mask("document_starts", starts, x)
        batch, time = starts.shape
        starts = starts.to(x.device).bool()
        if mask is not None:
            check_mask("mask", mask, x)
            starts = starts_at_real_tokens(starts, mask.to(x.device))
        if not time or not starts.any():
            return None
        begins = starts.clone()
        begins[:, 0] = True
        row, column = begins.nonzero(as_tuple=True)
        first = row * time + column
        length = torch.diff(first, append=first.new_tensor([batch * time]))
        grows = any(getattr(module, "grows", False) for module in layer.modules())
        members = [torch.arange(len(length), device=x.device)] if grows else _group_by_length(length)
        groups = []
        for chosen in members:
            token = torch.arange(int(length[chosen].max()), device=x.device)
            index, real = first[chosen, None] + token, token < length[chosen, None]
            groups.append(
                SequenceGroup(
                    index=index.clamp(max=batch * time - 1),
                    real=None if bool(real.all()) else real,
                    row=row[chosen],
                    continues=~starts[row[chosen], column[chosen]],
                )
            )
        return cls(
            groups=tuple(groups),
            order=torch.cat([g.flatten(g.index) for g in groups]).argsort() if len(groups) > 1 else None,
            last=torch.cat(members).argsort()[begins.sum(1).cumsum(0) - 1],
            shape=(batch, time),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False, **_: Any) -> PackedRows:
        """The same on a device: accelerate calls this where the layers of a model are on several."""

        def move(value: Any) -> Any:
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else value

        groups = tuple(SequenceGroup(*map(move, vars(group).values())) for group in self.groups)
        return PackedRows(groups, move(self.order), move(self.last), self.shape)

    def pack(self, ys: list[Tensor]) -> Tensor:
        """Outputs of each group `[sequences, longest, ...]` as `[batch, time, ...]`."""
        y = torch.cat([g.flatten(y) for g, y in zip(self.groups, ys, strict=True)])
        return (y if self.order is None else y[self.order]).unflatten(0, self.shape)

    def final_state(self, states: list[State]) -> State:
        """The state after each row, from the states after the sequences of each group."""
        others = [state.tensors() for state in states[1:]]
        return states[0].map(lambda t: torch.cat([t, *map(next, others)])[self.last.to(t.device)])


def _group_by_length(length: Tensor) -> list[Tensor]:
    """Sequences in groups of similar length, so that padding at most doubles the tokens."""
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


def previous_real_token(mask: Tensor) -> Tensor:
    """The place of the real token before each token of `mask` `[batch, time]`, int64 `[batch, time]`; -1: none."""
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    nearest = torch.where(mask.bool(), places, -1)
    return torch.nn.functional.pad(nearest, (1, 0), value=-1)[:, :-1].cummax(1).values


def starts_at_real_tokens(starts: Tensor, mask: Tensor) -> Tensor:
    """Where sequences begin, bool `[batch, time]`: a start at padding is moved to the next real token, or to the
    end."""
    marks, before = starts.cumsum(1), previous_real_token(mask)
    earlier = torch.where(before < 0, 0, marks.gather(1, before.clamp(min=0)))
    place = mask.bool().clone()
    place[:, -1:] = True
    return place & (marks > earlier)


def forward_packed(
    layer: nn.Module, x: Tensor, state: Any, mask: Tensor | None, starts: Tensor | PackedRows | None, **options: Any
) -> tuple[Tensor, Any]:
    """`layer(x, state, mask, **options)`, each sequence by itself; `starts` as in `PackedRows.from_starts`."""
    rows = PackedRows.from_starts(starts, x, layer, mask)
    if rows is None:
        return _call(layer, x, state, mask, options)
    results = [
        _call(layer, group.unpack(x), group.initial_state(layer, x, state), group.unpack_mask(mask), options)
        for group in rows.groups
    ]
    return rows.pack([y for y, _ in results]), rows.final_state([after for _, after in results])


def _call(layer: nn.Module, x: Tensor, state: Any, mask: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """`layer(x, state, mask, **options)`; ValueError where it returns no y, shaped as x, and `State`."""
    found, name = layer(x, state, mask, **options), type(layer).__name__
    pair = isinstance(found, tuple) and len(found) == 2
    y, after = found if pair else (None, None)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        got = list(y.shape) if isinstance(y, Tensor) else f"a {type(y if pair else found).__name__}"
        raise ValueError(f"{name} must return (y, state), y [batch, time, dim] as x is, {list(x.shape)}; got {got}")
    if isinstance(layer, Stateful) and not isinstance(after, State):
        raise ValueError(f"{name} must return a State (atlas_memory.memory) beside y, got a {type(after).__name__}")
    for at, tensor in after.named_tensors() if isinstance(after, State) else ():
        if tensor.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"{name} must have the batch of {len(x)} first in {at} of its state, got {list(tensor.shape)}"
            )
    return y, after


class SequenceMixer(Stateful):
    """A `Stateful` layer whose `forward` checks what it is given, reads packed sequences one by one and skips padding.
    A subclass has the two class variables and `_forward`."""

    state_type: ClassVar[type[State]]
    input_projection: ClassVar[str]
    """The name of a linear map that reads x, whose dtype x must have."""

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Read x, and write it to the memory.

        Args:
            x: `[batch, time, dim]`, time may be 0. Entries are clamped (nonfinite_inputs.py). From a token with NaN or
                infinity on, outputs and state of its row are NaN.
            state: What an earlier call returned; None: nothing has been read.
            mask: `[batch, time]`, nonzero at real tokens, in any pattern. Outputs at the others are zero, and all else
                is as if these were absent. None: all are real.
            document_starts: `[batch, time]`, nonzero at the first token of every document, which is read as if nothing
                had been before. A row whose first token is not marked continues from `state`. None: none begins.

        Returns:
            y `[batch, time, dim]` in x's dtype, and the state, of the layer's `state_type`.

        Raises:
            ValueError: x, state or mask of a shape that does not fit.
        """
        self.check_x(x, self.get_submodule(self.input_projection))
        self.check_state(state, self.state_type)
        if document_starts is not None:
            return forward_packed(self, x, state, mask, document_starts)
        return self.forward_masked(x, state, mask)
