"""One global memory and N local ones over the same tokens (TNT, arXiv 2511.07343).

    o_t = f(V_{start of t's global chunk}, q_t) + sum over i of f(W_t^(i), P_t q_t)                    (Eqs. 7 and 15)

f(W, q) is what the memory network with the matrices W answers to q. V is the global memory, written in large chunks one
after the other (Eq. 5), and q_t reads it as it carried_prediction before its chunk. Each W^(i) is a local memory. It is
written in small chunks, and goes back to its learned M_0 at every ``shard``-th token (Eqs. 6 and 14). The stretches
between, the shards, are independent of one another, and here they are read together as rows of one batch (tnt.py). P_t
projects the query onto the keys that a local memory has been taught (tnt.py). Any rule can be the inner step; the
paper's is ``RULES["tnt"]``.

Tokens cut where shards end, for memories that begin anew there (tnt.py).

Queries projected onto the keys that a memory has been trained on (TNT, arXiv 2511.07343, Eqs. 7 and 15, App. C).

    P_t = sum over tau of  k_tau k_tau^T / |k_tau|^2

over the tokens tau <= t of a span, a shard or a chunk. In place of q_t a local memory is asked P_t q_t. P_t is never
made for each token: inside a block of tokens, P_t q_t is the causal product ``tril(q k^T) k``, and what came before the
block is one d x d matrix.
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
from .stateful import Stateful


@dataclass(frozen=True)
class Hierarchy:
    """Which memories there are, when their frozen memory is refreshed, and when they are reset.

    Attributes:
        global_chunk: C_G, tokens in a chunk of the global memory. A query reads it as it was before the query's chunk,
            and so up to as many tokens late.
        local_chunks: C_L, tokens in a chunk of each local memory. A later stage of training, or decoding, may make them
            smaller.
        shard: S_L, tokens after which local memories begin anew; a multiple of every local chunk, so that chunks
            counted from the start of a shard or of the sequence are the same.
        project: what local memories are asked: P_t q_t, with P_t summed over the keys of the "shard" so far (TNT,
            App. C) or of the "chunk" so far (Eq. 7); None: q_t itself.

    Raises:
        ValueError: a size that is no whole number >= 1, no local chunk, a shard that is no multiple of one, or an
            unknown ``project``.
    """

    global_chunk: int
    local_chunks: tuple[int, ...]
    shard: int
    project: str | None = "shard"

    def __post_init__(self) -> None:
        if not isinstance(self.local_chunks, list | tuple) or not self.local_chunks:
            raise ValueError(
                f"hierarchy local_chunks must list the chunk of each local memory, such as [8, 16]; "
                f"got {self.local_chunks!r}"
            )
        object.__setattr__(self, "local_chunks", tuple(self.local_chunks))
        check_size("the length of hierarchy local_chunks", len(self.local_chunks), MOST)
        sizes = [("global_chunk", self.global_chunk), ("shard", self.shard)]
        for name, value in sizes + [("each of local_chunks", c) for c in self.local_chunks]:
            check_size(f"hierarchy {name}", value, LONGEST)
        for chunk in self.local_chunks:
            if self.shard % chunk:
                raise ValueError(
                    f"hierarchy shard={self.shard} must be a multiple of every local chunk, and {chunk} does not "
                    "divide it"
                )
        if self.project not in ("shard", "chunk", None):
            raise ValueError(f"hierarchy project must be 'shard', 'chunk' or None, got {self.project!r}")

    @classmethod
    def of(cls, value: Hierarchy | Mapping[str, Any]) -> Hierarchy:
        """A hierarchy as it is, or from a mapping of its fields, as configurations have it.

        Raises:
            ValueError: no mapping, or fields that are missing or unknown.
        """
        if isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or set(value) - set(known) or set(known[:3]) - set(value):
            raise ValueError(
                f"hierarchy must map {', '.join(known[:3])} and, if you like, {known[3]} to values; got {value!r}"
            )
        return cls(**value)

    def rules(self, rule: Rule) -> tuple[Rule, ...]:
        """``rule`` with the chunk and the ``read`` of the global memory, and of each local one.

        Raises:
            ValueError: a rule that cannot be read as it was before a chunk, or that cannot be reset.
        """
        if rule.features.infinite:
            raise ValueError(
                "a hierarchy resets its local memories, and those of Exponential features have columns for tokens of "
                "the shards before; take Polynomial or Identity features"
            )
        local = (rule.vary(window={"chunk": chunk, "read": "after"}) for chunk in self.local_chunks)
        return (rule.vary(window={"chunk": self.global_chunk, "read": "frozen"}), *local)


@dataclass(frozen=True, repr=False, eq=False)
class HierarchicalState(State):
    """What ``HierarchicalMemory`` carries; its size is constant, and every tensor has the batch first.

    Attributes:
        memories: the state of the global memory, and then that of each local one. Those of local ones count the tokens
            of the current shard; where a shard has ended they have begun anew already.
        projections: P, ``[batch, heads, dim, dim]``. With ``project="shard"`` there is one, of the current shard; with
            "chunk" one for each local memory, of its current chunk; with None there is none.
    """

    memories: tuple[MemoryState, ...]
    projections: tuple[Tensor, ...]

    @property
    def seen(self) -> Tensor:
        """``[batch]`` int64, tokens read so far."""
        return self.memories[0].seen


class HierarchicalGates(nn.ModuleList):
    """A ``GateProjection`` for each memory of a hierarchy. Together they make gates of ``len(rules) * heads`` heads,
    the global memory's first. The arguments are those of ``GateProjection``, with one rule for each memory."""

    def __init__(self, dim: int, heads: int, rules: tuple[Rule, ...], rank: int | None = None) -> None:
        super().__init__(GateProjection(dim, heads, rule, rank) for rule in rules)
        self.heads = len(rules) * heads

    def forward(self, x: Tensor) -> Gates:
        """x ``[batch, time, dim]`` -> gates ``[batch, members * heads, time]``; the members are the memories."""
        members = [projection(x) for projection in self]

        def joined(name: str) -> Tensor | None:
            parts = [getattr(gates, name) for gates in members]
            return None if parts[0] is None else torch.cat(parts, 1)

        return Gates(torch.cat([g.eta for g in members], 1), *map(joined, ("alpha", "theta", "gamma", "delta")))


class HierarchicalMemory(Stateful):
    """A global and N local memories in place of one ``OmegaMemory``; each has an M_0 and gates of its own.

    >>> memory = HierarchicalMemory(dim=16, heads=2, rule="tnt", hierarchy=Hierarchy(64, (4, 8), shard=64))
    >>> q, k, v = torch.randn(3, 1, 2, 200, 16)
    >>> y, state = memory(q, k, v)
    >>> y_next, state = memory(q, k, v, state=state)  # reads on where it stopped

    Args:
        dim: width of a head.
        heads: number of heads.
        rule: a name in ``RULES`` or a ``Rule``, for all memories; its chunk and its ``read`` are the hierarchy's.
        hierarchy: a ``Hierarchy``, or a mapping of its fields.
        gates: whether to own gate projections, which see the keys. Without, every call must bring ``gates``.
        gate_rank: see ``GateProjection``.

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
        self.members = nn.ModuleList(OmegaMemory(dim, heads, rule, gates=False) for rule in self.rules)
        self.gates = HierarchicalGates(dim * heads, heads, self.rules, gate_rank) if gates else None

    def empty(self, batch: int) -> tuple[Any, ...]:
        like = next(self.parameters())
        q = torch.zeros(batch, self.heads, 0, self.dim, dtype=like.dtype, device=like.device)
        return q, q, q, Gates(q.new_zeros(batch, len(self.rules) * self.heads, 0))

    def _members(self) -> list[OmegaMemory]:
        return [cast(OmegaMemory, member) for member in self.members]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None = None, state: HierarchicalState | None = None
    ) -> tuple[Tensor, HierarchicalState]:
        """Read and write every token in turn.

        Args:
            q, k, v: ``[batch, heads, time, dim]``.
            gates: your own, of ``(N + 1) * heads`` heads, the global memory's first; None: computed from the keys.
            state: where an earlier call stopped; None: fresh memories.

        Returns:
            y ``[batch, heads, time, dim]`` in q's dtype, and the state.

        Raises:
            ValueError: shapes that do not fit, or neither ``gates`` given nor owned.
        """
        for name, z in (("q", q), ("k", k), ("v", v)):
            self._members()[0].check_heads(name, z)
        if gates is not None and not isinstance(gates, Gates):
            raise ValueError(f"gates must be Gates(...), got a {type(gates).__name__}")
        if gates is None:
            if self.gates is None:
                raise ValueError(
                    "this memory was made with gates=False: pass gates=Gates(eta=..., ...) with every call"
                )
            gates = self.gates(k.transpose(1, 2).flatten(2))
        if gates.eta.shape[1] != len(self.members) * self.heads:
            raise ValueError(
                f"gates must have {len(self.members)} * {self.heads} heads, the global memory's first, "
                f"got eta of shape {list(gates.eta.shape)}"
            )
        self._check_hierarchy(state)
        state = None if state is None else state.map(cast_to(kept_dtype(q)))
        of_global, *of_locals = split_heads(gates, len(self.members))
        y, held = self.members[0](q, k, v, of_global, None if state is None else state.memories[0])
        if not q.shape[-2]:
            return y, self._fresh(q) if state is None else state
        shards = Shards(self.hierarchy.shard, q, None if state is None else state.seen, gates.length)
        local, state = self._read_locals(shards, q, k, v, of_locals, state)
        return y + local, replace(state, memories=(held, *state.memories))

    def _read_locals(
        self, shards: Shards, q: Tensor, k: Tensor, v: Tensor, gates: list[Gates], state: HierarchicalState | None
    ) -> tuple[Tensor, HierarchicalState]:
        """What the local memories answer in sum, and their state."""
        fresh = self._fresh(q)
        fresh = replace(fresh, memories=fresh.memories[1:])
        if state is not None:
            state = replace(state, memories=state.memories[1:])
        q, k, v = map(shards.fold, (q, k, v))
        if state is not None and shards.count > 1:
            # The first shard of each row goes on from the state, the others begin anew.
            state = _join(lambda held, new: torch.cat([held, *[new] * (shards.count - 1)]), state, fresh)
        asked, projections = self._ask(shards, q, k, state)
        total: Tensor | None = None
        ends = []
        for i, member in enumerate(self.members[1:]):
            own = replace(replace(gates[i], length=None).map(shards.fold), length=shards.lengths)
            y, held = member(asked[i], k, v, own, None if state is None else state.memories[i])
            total = y if total is None else total + y
            ends.append(held)
        assert total is not None
        end = HierarchicalState(tuple(ends), projections).map(shards.last)

        def begin_where_ended(held: Tensor, new: Tensor) -> Tensor:
            return torch.where(shards.ended.view(-1, *(1,) * (held.dim() - 1)), new, held)

        return shards.unfold(total), _join(begin_where_ended, end, fresh)

    def _ask(
        self, shards: Shards, q: Tensor, k: Tensor, state: HierarchicalState | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What each local memory is asked (q, or P_t q_t), from q and k as ``Shards.fold`` has laid them; and P after
        the last token of every shard."""
        chunks = self.hierarchy.local_chunks
        if self.hierarchy.project is None:
            return (q,) * len(chunks), ()
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide, keys = q.to(dtype), k.to(dtype)
        with no_autocast(q.device):
            if self.hierarchy.project == "shard":
                carried = self._no_keys(wide) if state is None else state.projections[0]
                asked, end = project_since_start(wide, keys, carried, shards.lengths)
                return (asked.to(q.dtype),) * len(chunks), (end,)
            results = []
            for i, chunk in enumerate(chunks):
                carried = self._no_keys(wide) if state is None else state.projections[i]
                phase = None if state is None else state.memories[i].seen % chunk
                results.append(project_since_chunk(wide, keys, carried, shards.lengths, phase, chunk))
        return tuple(y.to(q.dtype) for y, _ in results), tuple(end for _, end in results)

    @property
    def _projections(self) -> int:
        """How many sums P of keys a state has."""
        return {"shard": 1, "chunk": len(self.members) - 1, None: 0}[self.hierarchy.project]

    def _check_hierarchy(self, state: HierarchicalState | None) -> None:
        self.check_state(state, HierarchicalState)
        if state is None:
            return
        for name, found, ours in (
            ("memories", state.memories, len(self.members)),
            ("projections", state.projections, self._projections),
        ):
            if len(found) != ours:
                raise ValueError(f"state has {len(found)} {name}, this hierarchy {ours}: it is another layer's")

    def _no_keys(self, q: Tensor) -> Tensor:
        """P before any key, zero, for a batch like that of q."""
        return q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])

    def _fresh(self, q: Tensor) -> HierarchicalState:
        """The state before the first token, for a batch like that of q."""
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        memories = (initial_state(member.rule, member.params.initial, q) for member in self._members())
        return HierarchicalState(tuple(memories), (self._no_keys(q),) * self._projections)

    def retrieve(self, q: Tensor, state: HierarchicalState | None = None) -> Tensor:
        """The sum of what all memories of a state answer to q, without writing; q and the result are
        ``[batch, heads, time, dim]``. None: fresh memories.

        No query is projected: P_t has the key of the token that asks in it, and a query alone has no key.
        """
        self._check_hierarchy(state)
        held = (None,) * len(self.members) if state is None else state.memories
        answers = [member.retrieve(q, own) for member, own in zip(self._members(), held, strict=True)]
        return torch.stack(answers).sum(0)


def split_heads(gates: Gates, members: int) -> list[Gates]:
    """The gates of each memory of a hierarchy, from those of all, whose heads come one memory after the other."""
    parts = replace(gates, length=None).map
    width = gates.eta.shape[1] // members

    def of(i: int) -> Gates:
        return replace(parts(lambda gate: gate[:, i * width : (i + 1) * width]), length=gates.length)

    return [of(i) for i in range(members)]


def _join(fn: Callable[[Tensor, Tensor], Tensor], a: HierarchicalState, b: HierarchicalState) -> HierarchicalState:
    """The state whose tensors are fn(x, y), with x a tensor of ``a`` and y the same one of ``b``."""
    others = b.tensors()
    return a.map(lambda x: fn(x, next(others)))


class Shards:
    """The tokens of a call cut where shards end, which is at another place in every row (a sequence of the batch).

    ``fold`` makes the shards rows of a larger batch: row ``j * batch + i`` of a folded tensor is the j-th shard of row
    i, right padded. The first shard of a row may have begun in an earlier call.

    Args:
        shard: tokens in a shard.
        q: ``[batch, heads, time, dim]`` of the call, for its sizes and device.
        seen: ``[batch]``, tokens that each row has read before; None: none.
        length: ``[batch]``, real tokens of each row, the rest being right padding; None: all.

    Attributes:
        count: shards of a row.
        lengths: ``[count * batch]``, real tokens of each folded row; None: all.
        ended: ``[batch]``, whether the row stopped where a shard ends.
    """

    def __init__(self, shard: int, q: Tensor, seen: Tensor | None, length: Tensor | None) -> None:
        batch, _, time, _ = q.shape
        self._time, self._width = time, min(shard, time)
        self.count = -(-(time if seen is None else time + shard - 1) // shard)
        self._sliced = seen is None  # then shards are plain slices
        phase = torch.zeros(batch, dtype=torch.int64, device=q.device) if seen is None else seen % shard
        real = torch.full_like(phase, time) if length is None else length
        border = torch.arange(self.count, device=q.device)[:, None] * shard - phase  # [count, batch]: shards' begins
        starts = border.clamp(min=0)
        lengths = (torch.minimum(border + shard, real) - starts).clamp(min=0)
        whole = length is None and (self.count == 1 or (self._sliced and time % shard == 0))
        self.lengths = None if whole else lengths.flatten()
        self.ended = (phase + real) % shard == 0
        row, token = torch.arange(batch, device=q.device), torch.arange(time, device=q.device)
        self._last = ((phase + real) // shard).clamp(max=self.count - 1) * batch + row
        # Where the tokens of the folded rows come from, and where those of the call go: [batch, n] each.
        at = starts[..., None] + torch.arange(self._width, device=q.device)
        self._source = at.clamp(max=time - 1).transpose(0, 1).flatten(1)
        shard_of = (phase[:, None] + token) // shard
        self._goal = shard_of * self._width + token - (shard_of * shard - phase[:, None]).clamp(min=0)

    def fold(self, x: Tensor) -> Tensor:
        """``[batch, heads, time, ...]`` to ``[count * batch, heads, width, ...]``."""
        if self.count == 1:
            return x
        rows = x.flatten(3) if x.dim() > 3 else x[..., None]
        total = self.count * self._width
        rows = F.pad(rows, (0, 0, 0, total - self._time)) if self._sliced else take(rows, self._source)
        rows = rows.unflatten(2, (self.count, self._width)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return rows if x.dim() > 3 else rows[..., 0]

    def unfold(self, y: Tensor) -> Tensor:
        """``[count * batch, heads, width, dim]`` back to ``[batch, heads, time, dim]``."""
        if self.count == 1:
            return y
        rows = y.unflatten(0, (self.count, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
        return rows[..., : self._time, :] if self._sliced else take(rows, self._goal)

    def last(self, x: Tensor) -> Tensor:
        """From ``[count * batch, ...]`` the shard in which each row of the call stopped: ``[batch, ...]``."""
        return x if self.count == 1 else x[self._last]


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
    layout = ChunkLayout(chunk, q.shape[-2], phase, length)
    asked = layout.chunks(q)
    unit = _unit(layout.place(k), layout.inside(k.device))
    y = _causal(asked, unit.unflatten(2, (layout.count, chunk)))
    y = torch.cat([y[:, :, :1] + asked[:, :, :1] @ carried[:, :, None], y[:, :, 1:]], 2).flatten(2, 3)
    # The chunk in which each row stopped: the one behind the layout, which is empty, where that is full.
    stopped = (torch.zeros(len(q), dtype=torch.int64, device=q.device) + layout.end)[:, None] // chunk
    last = take(F.pad(unit, (0, 0, 0, chunk)), stopped * chunk + torch.arange(chunk, device=q.device))
    return layout.from_chunks(y), last.mT @ last + torch.where((stopped == 0)[..., None, None], carried, 0.0)


def _causal(q: Tensor, k: Tensor) -> Tensor:
    """sum over tau <= t of k_tau (k_tau . q_t), for unit keys: ``[..., time, dim]`` all."""
    return (q @ k.mT).tril() @ k


def _unit(k: Tensor, real: Tensor | None) -> Tensor:
    """k at unit length, zero where it is no number or not ``real`` ``[batch or 1, time]``."""
    counts = are_finite(k) if real is None else are_finite(k) & real[:, None]
    return l2_normalise(torch.where(counts[..., None], k, 0.0))
