"""The layout of chunks: where the tokens of a call lie when its rows (the sequences of its batch) begin at different
places of their chunks, and how a call is cut into groups of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.autograd import can_read
from ..rules.rule import Rule
from ..rules.state import MemoryState
from .banded import band, overlapping, shift_right, take
from .chunk_context import Chunk

ALIGNED = 8
"""Chunks that are cut short have a multiple of so many slots: products of such sizes are fast."""


@dataclass(frozen=True)
class ChunkLayout:
    """``time`` tokens of each row, placed on chunks of ``chunk`` slots, the first token at slot ``phase`` of its row.

    Attributes:
        phase: ``[batch]``, how many tokens of its chunk each row has read before; None: none.
        length: ``[batch]``, how many of a row's tokens are there, the rest being right padding; None: all.
        before: of one chunk that is cut short, how many of its tokens all rows have read before; they have no slots.
        whole: how many tokens that chunk has; None: ``chunk``.
    """

    chunk: int
    time: int
    phase: Tensor | None
    length: Tensor | None
    before: int = 0
    whole: int | None = None

    @staticmethod
    def of(rule: Rule, time: int, phase: Tensor | None, length: Tensor | None, before: int = 0) -> ChunkLayout:
        """The layout of a group of chunks, which is cut short where its tokens lie in one chunk and all rows begin
        there at the same slot. An empty slot costs as much as a token, under Muon a step."""
        whole = rule.window.chunk
        if phase is not None or before + time > whole or (before == 0 and time == whole) or rule.features.infinite:
            return ChunkLayout(whole, time, phase, length)
        slots = time
        if before + time < whole:
            multiple = rule.every if rule.optimiser.estimates_change else ALIGNED
            slots = min(-(-time // multiple) * multiple, whole - before)
        return ChunkLayout(slots, time, None, length, before, whole)

    @property
    def count(self) -> int:
        """How many chunks the layout has."""
        return -(-(self.time if self.phase is None else self.time + self.chunk - 1) // self.chunk)

    @property
    def start(self) -> Tensor | int:
        """The slot of each row's first token, ``[batch, 1]``; or one slot for all rows."""
        return 0 if self.phase is None else self.phase[:, None]

    @property
    def end(self) -> Tensor | int:
        """The slot behind each row's last token, ``[batch]``; or one for all rows."""
        return (self.time if self.length is None else self.length) + (0 if self.phase is None else self.phase)

    def filled(self, j: int) -> Tensor | bool:
        """Whether chunk j is read to its end, of each row ``[batch]`` or of all."""
        return (j + 1) * (self.whole or self.chunk) <= self.before + self.end

    def place(self, x: Tensor, before: int = 0) -> Tensor:
        """Lay tokens on the layout: from ``[batch, ..., before + time, dim]`` to
        ``[batch, ..., before + count * chunk, dim]``. Slots without a token are undefined. The ``before`` earlier
        tokens come directly before each row's first."""
        return shift_right(x, self.phase, self.count * self.chunk + before)

    def chunks(self, x: Tensor) -> Tensor:
        """Lay tokens on the layout, by chunks: ``[batch, ..., time, dim]`` -> ``[batch, ..., count, chunk, dim]``."""
        return self.place(x).unflatten(-2, (self.count, self.chunk))

    def inside(self, device: torch.device, before: int = 0) -> Tensor:
        """Which slots hold a token of the call or one of those ``before``, bool ``[batch or 1, before + count *
        chunk]``."""
        slot = torch.arange(before + self.count * self.chunk, device=device) - self.start
        tokens = before + (self.time if self.length is None else self.length[:, None])
        return ((slot >= 0) & (slot < tokens)).view(-1, slot.shape[-1])

    def from_chunks(self, y: Tensor) -> Tensor:
        """The inverse of ``place``: take tokens from the layout, ``[batch, ..., count * chunk, dim]`` ->
        ``[batch, ..., time, dim]``."""
        if self.phase is None:
            return y[..., : self.time, :]
        return take(y, self.start + torch.arange(self.time, device=y.device))


def to_chunks(rule: Rule, tokens: tuple[Tensor, ...], state: MemoryState, layout: ChunkLayout, first: Tensor) -> Chunk:
    """The tokens of a group on its layout, as a ``Chunk`` of which every tensor has the chunks as its first dimension.
    ``first`` ``[batch]`` is how many tokens each row has before the group's first chunk, some of which may lie in an
    earlier call."""
    q, k, v, alpha, theta, eta, gamma = tokens
    size, chunk, count, heads = rule.window.size, layout.chunk, layout.count, q.shape[1]
    reach = tokens_before(chunk, size)
    spare = reach - (size - 1)
    if reach:
        k, v = (
            torch.cat([past.new_zeros(*past.shape[:-2], spare, past.shape[-1]), past, new], -2)
            for past, new in ((state.k, k), (state.v, v))
        )
    inside = layout.inside(q.device)

    def gate(values: Tensor, neutral: float) -> Tensor:
        placed = layout.place(values[..., None] if values.dim() == 3 else values)
        placed = torch.where(inside[:, None, :, None], placed, neutral)
        return (placed if values.dim() == 4 else placed[..., 0]).unflatten(2, (count, chunk))

    alpha = gate(alpha if rule.retention.gated else torch.ones_like(theta), 1.0)
    theta, eta, gamma = gate(theta, 1.0), gate(eta, 0.0), gate(gamma, 0.0)
    window = gamma[..., 0]
    if size > 1:  # tokens before the sequence's first are not in any window
        exists = layout.inside(q.device, reach)
        exists = exists & (first[:, None] + torch.arange(exists.shape[1], device=q.device) >= reach)
        # The spare places count as still older tokens, of weight 0.
        window = band(F.pad(gamma, (0, spare)), exists.unfold(-1, chunk + reach, chunk)[:, None])
    if reach:
        k, v = (overlapping(layout.place(x, reach), chunk + reach, chunk) for x in (k, v))
    else:
        k, v = layout.chunks(k), layout.chunks(v)
    inside = inside.unflatten(-1, (count, chunk))[:, None].expand(len(q), heads, -1, -1)
    parts = (k, layout.chunks(q), v, window, alpha, theta, eta, inside)
    return Chunk(*(x.movedim(2, 0).flatten(1, 2) for x in parts))


def tokens_before(chunk: int, size: int) -> int:
    """How many places for window tokens there are before a chunk of so many slots with windows of ``size`` tokens: the
    c - 1, and empty ones that bring the window tokens of a chunk to a multiple of 8, where that adds at most a quarter.
    A matrix product 71 columns wide takes half as long again as one of 72, and in float64 one of 23 three times as long
    as one of 24."""
    tokens = chunk + size - 1
    spare = -tokens % 8
    return size - 1 + (spare if size > 1 and 4 * spare <= tokens else 0)


def starts_chunk(rule: Rule, state: MemoryState | None) -> bool:
    """Whether all rows of a state stand at the start of a chunk. A GPU is waited for to find that out. Where numbers
    cannot be looked at, as under a compiler, it is not known, and so False."""
    if state is None:
        return True
    return can_read(state.seen) and not (state.seen % rule.window.chunk).any()


def place_of_all(rule: Rule, state: MemoryState | None, length: Tensor | None = None) -> int:
    """How many tokens of their chunk all rows of a state have read, if that is one number, not 0, from which a call can
    go on with what is left of the chunk alone; else 0, as where rows end at different ``length``. A GPU is not waited
    for."""
    if state is None or length is not None:
        return 0
    if state.seen.device.type != "cpu" or not can_read(state.seen) or not len(state.seen):
        return 0
    places = state.seen % rule.window.chunk
    place = int(places[0])
    # Steps are counted from the first slot, and the token of the chunk-boundary update of a lag retention is the
    # chunk's first.
    alone = place % rule.every == 0 and not rule.retention.lag and not rule.features.infinite
    return place if alone and bool((places == place).all()) else 0


def groups(time: int, place: int, width: int, chunk: int, whole: bool) -> list[int]:
    """How many tokens are read at a time: what is left of a chunk of which all rows have read ``place``; then up to
    ``width``; and alone what is left at the end and fills no chunk, for its layout is cut short. That not where chunks
    are read at once (``whole``), nor under a compiler, which would unroll both."""
    sizes = [min(chunk - place, time)] if place else []
    rest = time - sum(sizes)
    sizes += [width] * (rest // width)
    cut = rest % width
    if cut > chunk and cut % chunk and not whole and not torch.compiler.is_compiling():
        return [*sizes, cut - cut % chunk, cut % chunk]
    return [*sizes, cut] if cut else sizes
