"""One global memory and N local ones over the same tokens (TNT, arXiv 2511.07343).

    o_t = f(V_{start of t's global chunk}, q_t) + sum over i of f(W_t^(i), P_t q_t)                    (Eqs. 7 and 15)
    P_t = sum over tau <= t of k_tau k_tau^T / |k_tau|^2                                                      (App. C)

f(W, q) is what the memory network with the weights W answers to q. V is the global memory, written in large chunks
(Eq. 5), and q_t reads it as it was before its chunk. Each W^(i) is a local memory, written in small chunks, and goes
back to its learned M_0 at every ``shard``-th token (Eqs. 6 and 14), so that shards are read together as rows of one
batch. P_t projects the query onto the keys that a local memory has read in its shard or chunk: inside a block of tokens
by the causal product ``tril(q k^T) k``, and for what came before by one d x d matrix.

Any rule can be the inner step; the paper's is ``RULES["tnt"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, MemoryState, Rule, initial_state, l2_normalise, resolve_rule
from ..ops.banded import take
from ..ops.chunk_layout import ChunkLayout
from ..ops.precision import are_finite, kept_dtype
from ..ops.precision import cast as cast_to
from ..rules.autograd import no_autocast
from ..rules.state import State
from ..rules.validation import LONGEST, MOST, check_size
from .gate_projection import GateProjection
from .omega_memory import OmegaMemory
from .padding import SegmentLayout
from .stateful import Stateful


@dataclass(frozen=True)
class Hierarchy:
    """Which memories there are, when their frozen memory is refreshed, and when they are reset.

    Attributes:
        global_chunk: C_G, tokens in a chunk of the global memory, which queries read as it was before their chunk.
        local_chunks: C_L, tokens in a chunk of each local memory. Later training, or decoding, may make them smaller.
        shard: S_L, tokens after which local memories are reset; a multiple of every local chunk.
        project: what local memories are queried with: P_t q_t, with P_t summed over the keys of the "shard" so far
            (TNT, App. C) or of the "chunk" so far (Eq. 7); None: q_t itself.

    Raises:
        ValueError: a size below 1, no local chunk, a shard that is no multiple of one, or an unknown ``project``.
    """

    global_chunk: int
    local_chunks: tuple[int, ...]
    shard: int
    project: str | None = "shard"

    def __post_init__(self) -> None:
        chunks = self.local_chunks
        if not isinstance(chunks, list | tuple) or not 0 < len(chunks) <= MOST:
            raise ValueError(
                f"hierarchy local_chunks must list 1 to {MOST} chunks, such as [8, 16]; got {str(chunks)[:80]}"
            )
        object.__setattr__(self, "local_chunks", tuple(chunks))
        sizes = [("global_chunk", self.global_chunk), ("shard", self.shard)]
        for name, value in sizes + [("each of local_chunks", chunk) for chunk in chunks]:
            check_size(f"hierarchy {name}", value, LONGEST)
        if wrong := [chunk for chunk in chunks if self.shard % chunk]:
            raise ValueError(f"hierarchy shard={self.shard} must be a multiple of the local chunk {wrong[0]}")
        if self.project not in ("shard", "chunk", None):
            raise ValueError(f"hierarchy project must be 'shard', 'chunk' or None, got {self.project!r}")

    @classmethod
    def of(cls, value: Hierarchy | Mapping[str, Any]) -> Hierarchy:
        """A hierarchy as it is, or from a mapping of its fields. Raises ValueError for missing or unknown fields."""
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or set(value) - set(known) or set(known[:3]) - set(value):
            raise ValueError(f"hierarchy must map {', '.join(known)} (optional) to values; got {value!r}")
        return cls(**value)

    def rules(self, rule: Rule) -> tuple[Rule, ...]:
        """The rules of the global memory and of each local one. ValueError for a rule whose state grows."""
        if rule.features.infinite:
            raise ValueError(
                "a hierarchy resets its memories, and Exponential features cannot be: take Polynomial ones"
            )
        local = (rule.vary(window={"chunk": chunk, "read": "after"}) for chunk in self.local_chunks)
        return (rule.vary(window={"chunk": self.global_chunk, "read": "frozen"}), *local)


@dataclass(frozen=True, repr=False, eq=False)
class HierarchicalState(State):
    """What ``HierarchicalMemory`` carries; its size is constant.

    Attributes:
        memories: the state of the global memory, and then that of each local one, counting tokens of the current shard.
        projections: P, ``[batch, heads, dim, dim]``: one with ``project="shard"``, one a local memory with "chunk".
    """

    memories: tuple[MemoryState, ...]
    projections: tuple[Tensor, ...]

    @property
    def seen(self) -> Tensor:
        """``[batch]`` int64, tokens read so far."""
        return self.memories[0].seen


class HierarchicalGates(nn.ModuleList):
    """A ``GateProjection`` for each memory of a hierarchy, with the same arguments but one rule for each memory."""

    def __init__(self, dim: int, heads: int, rules: tuple[Rule, ...], rank: int | None = None) -> None:
        super().__init__(GateProjection(dim, heads, rule, rank) for rule in rules)
        self.heads = len(rules) * heads

    def forward(self, x: Tensor) -> Gates:
        """x ``[batch, time, dim]`` -> gates ``[batch, memories * heads, time]``, the global memory's heads first."""
        gates = [projection(x) for projection in self]

        def joined(name: str) -> Tensor | None:
            parts = [getattr(own, name) for own in gates]
            return None if parts[0] is None else torch.cat(parts, 1)

        return Gates(torch.cat([own.eta for own in gates], 1), *map(joined, ("alpha", "theta", "gamma", "delta")))


def split_gates(gates: Gates, memories: int) -> list[Gates]:
    """The gates of each memory of a hierarchy; the inverse of ``HierarchicalGates.forward``."""
    width, per_token = gates.eta.shape[1] // memories, replace(gates, length=None)

    def of(i: int) -> Gates:
        own = slice(i * width, (i + 1) * width)
        return replace(per_token.map(lambda gate: gate[:, own]), length=gates.length)

    return [of(i) for i in range(memories)]


class HierarchicalMemory(Stateful):
    """A global and N local memories in place of one ``OmegaMemory``; each has an M_0 and gates of its own.

    Args:
        dim, heads, gates, gate_rank: as of ``OmegaMemory``.
        rule: a name in ``RULES`` or a ``Rule``, for all memories; its chunk and its ``read`` are the hierarchy's.
        hierarchy: a ``Hierarchy``, or a mapping of its fields.

    Raises:
        ValueError: a rule that a hierarchy cannot have, an unknown one, or a bad size.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        rule: str | Rule,
        hierarchy: Hierarchy | Mapping[str, Any],
        gates: bool = True,
        gate_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.hierarchy, self.rule = Hierarchy.of(hierarchy), resolve_rule(rule)
        self.rules = self.hierarchy.rules(self.rule)
        self.dim, self.heads = dim, heads
        self.memories = nn.ModuleList(OmegaMemory(dim, heads, rule, gates=False) for rule in self.rules)
        self.gates = HierarchicalGates(dim * heads, heads, self.rules, gate_rank) if gates else None
        self._projections = {"shard": 1, "chunk": len(self.memories) - 1, None: 0}[self.hierarchy.project]

    def empty_inputs(self, batch: int) -> tuple[Any, ...]:
        like = next(self.parameters())
        q = torch.zeros(batch, self.heads, 0, self.dim, dtype=like.dtype, device=like.device)
        return q, q, q, Gates(q.new_zeros(batch, len(self.rules) * self.heads, 0))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates | None = None,
        state: HierarchicalState | None = None,
        *,
        checked: bool = False,
    ) -> tuple[Tensor, HierarchicalState]:
        """Read and write every token in turn, as ``OmegaMemory.forward``. Gates have ``(N + 1) * heads`` heads, the
        global memory's first."""
        if not checked:
            cast(OmegaMemory, self.memories[0]).check_heads(q, k, v)
        if gates is None:
            if self.gates is None:
                raise ValueError(
                    "this memory was made with gates=False: pass gates=Gates(eta=..., ...) with every call"
                )
            gates = self.gates(k.transpose(1, 2).flatten(2))
        if not isinstance(gates, Gates) or gates.eta.shape[1] != len(self.memories) * self.heads:
            got = list(gates.eta.shape) if isinstance(gates, Gates) else f"a {type(gates).__name__}"
            raise ValueError(
                f"gates must have {len(self.memories)} * {self.heads} heads, the global memory's first, got {got}"
            )
        self._check_hierarchy(state)
        state = None if state is None else state.map(cast_to(kept_dtype(q)))
        global_gates, *local_gates = split_gates(gates, len(self.memories))
        y, global_state = self.memories[0](q, k, v, global_gates, None if state is None else state.memories[0])
        if not q.shape[-2]:
            return y, self._initial_state(q) if state is None else state
        seen = None if state is None else state.seen
        layout = SegmentLayout(self.hierarchy.shard, q, seen, gates.length)
        local, state = self._forward_local(layout, (q, k, v), local_gates, state)
        return y + local, replace(state, memories=(global_state, *state.memories))

    def _forward_local(
        self, layout: SegmentLayout, qkv: tuple[Tensor, ...], gates: list[Gates], state: HierarchicalState | None
    ) -> tuple[Tensor, HierarchicalState]:
        """The sum of the local memories' outputs, and their state."""
        fresh = self._initial_state(qkv[0])
        fresh = replace(fresh, memories=fresh.memories[1:])
        if state is not None:
            state = replace(state, memories=state.memories[1:])
        q, k, v = map(layout.fold, qkv)
        if state is not None and layout.count > 1:
            # The first shard of each row continues from the state, the others are fresh.
            state = _map_both(lambda old, new: torch.cat([old, *[new] * (layout.count - 1)]), state, fresh)
        queries, projections = self._project_queries(layout, q, k, state)
        outputs, ends = [], []
        for i, memory in enumerate(self.memories[1:]):
            own = replace(replace(gates[i], length=None).map(layout.fold), length=layout.lengths)
            y, end = memory(queries[i], k, v, own, None if state is None else state.memories[i])
            outputs.append(y)
            ends.append(end)
        total = sum(outputs[1:], start=outputs[0])
        last = HierarchicalState(tuple(ends), projections).map(layout.last)

        def reset_where_ended(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(layout.ended.view(-1, *(1,) * (old.dim() - 1)), new, old)

        return layout.unfold(total), _map_both(reset_where_ended, last, fresh)

    def _project_queries(
        self, layout: SegmentLayout, q: Tensor, k: Tensor, state: HierarchicalState | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What each local memory is queried with (q, or P_t q_t), from folded q and k; and P after each shard."""
        chunks = self.hierarchy.local_chunks
        if self.hierarchy.project is None:
            return (q,) * len(chunks), ()
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide, keys = q.to(dtype), k.to(dtype)
        carried = (_zero_projection(wide),) * len(chunks) if state is None else state.projections
        with no_autocast(q.device):
            if self.hierarchy.project == "shard":
                projected, end = project_queries(wide, keys, carried[0], layout.lengths)
                return (projected.to(q.dtype),) * len(chunks), (end,)
            results = []
            for i, chunk in enumerate(chunks):
                phase = None if state is None else state.memories[i].seen % chunk
                results.append(project_queries_by_chunk(wide, keys, carried[i], layout.lengths, phase, chunk))
        return tuple(y.to(q.dtype) for y, _ in results), tuple(end for _, end in results)

    def _check_hierarchy(self, state: HierarchicalState | None) -> None:
        self.check_state(state, HierarchicalState)
        ours = len(self.memories), self._projections
        if state is not None and (found := (len(state.memories), len(state.projections))) != ours:
            raise ValueError(
                f"state has {found} memories and projections, this hierarchy {ours}: it is another layer's"
            )

    def _initial_state(self, q: Tensor) -> HierarchicalState:
        """The state before the first token, for a batch like that of q."""
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        memories = (initial_state(m.rule, m.params.initial, q) for m in cast(list[OmegaMemory], self.memories))
        return HierarchicalState(tuple(memories), (_zero_projection(q),) * self._projections)

    def retrieve(self, q: Tensor, state: HierarchicalState | None = None) -> Tensor:
        """The sum of what all memories of a state (None: fresh ones) answer to q ``[batch, heads, time, dim]``, without
        writing. No query is projected: P_t includes the key of the querying token, and a query alone has none."""
        self._check_hierarchy(state)
        states = (None,) * len(self.memories) if state is None else state.memories
        memories = cast(list[OmegaMemory], self.memories)
        return torch.stack([memory.retrieve(q, own) for memory, own in zip(memories, states, strict=True)]).sum(0)


def _map_both(fn: Callable[[Tensor, Tensor], Tensor], a: HierarchicalState, b: HierarchicalState) -> HierarchicalState:
    """The state whose tensors are fn(x, y), with x a tensor of ``a`` and y the same one of ``b``."""
    others = b.tensors()
    return a.map(lambda x: fn(x, next(others)))


def _zero_projection(q: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])


def project_queries(q: Tensor, k: Tensor, carried: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
    """P_t q_t, shaped as q, with P summed from the first token of each row on; and P after the last real token.

    q and k are ``[batch, heads, time, dim]``, k of any length; ``carried`` ``[batch, heads, dim, dim]`` is P before
    them; ``length`` ``[batch]`` counts the real tokens of each row, the rest being right padding."""
    time, dim = q.shape[-2:]
    block = min(time, dim)  # where both parts cost the same
    count = -(-time // block)
    unit = _unit_keys(k, None if length is None else torch.arange(time, device=k.device) < length[:, None])
    q, unit = (F.pad(x, (0, 0, 0, count * block - time)).unflatten(2, (count, block)) for x in (q, unit))
    until = torch.cat([carried[:, :, None], unit.mT @ unit], 2).cumsum(2)  # P before each block, and at the end
    y = _causal_product(q, unit) + q @ until[:, :, :-1]
    return y.flatten(2, 3)[..., :time, :], until[:, :, -1]


def project_queries_by_chunk(
    q: Tensor, k: Tensor, carried: Tensor, length: Tensor | None, phase: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """As ``project_queries``, with P summed from the first token of each chunk on. ``phase`` ``[batch]``: each row's
    place in the chunk to which ``carried`` belongs; None: 0."""
    layout = ChunkLayout(chunk, q.shape[-2], phase, length)
    by_chunk = layout.chunks(q)
    unit = _unit_keys(layout.place(k), layout.inside(k.device))
    y = _causal_product(by_chunk, unit.unflatten(2, (layout.count, chunk)))
    y = torch.cat([y[:, :, :1] + by_chunk[:, :, :1] @ carried[:, :, None], y[:, :, 1:]], 2).flatten(2, 3)
    # The chunk in which each row stopped: the one behind the layout, which is empty, where that is full.
    stopped = (torch.zeros(len(q), dtype=torch.int64, device=q.device) + layout.end)[:, None] // chunk
    last = take(F.pad(unit, (0, 0, 0, chunk)), stopped * chunk + torch.arange(chunk, device=q.device))
    return layout.from_chunks(y), last.mT @ last + torch.where((stopped == 0)[..., None, None], carried, 0.0)


def _causal_product(q: Tensor, k: Tensor) -> Tensor:
    """sum over tau <= t of k_tau (k_tau . q_t), for unit keys: ``[..., time, dim]`` all."""
    return (q @ k.mT).tril() @ k


def _unit_keys(k: Tensor, real: Tensor | None) -> Tensor:
    """k at unit length, zero where it is not finite or not ``real`` ``[batch or 1, time]``."""
    counts = are_finite(k) if real is None else are_finite(k) & real[:, None]
    return l2_normalise(torch.where(counts[..., None], k, 0.0))
