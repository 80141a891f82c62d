"""Measurements of every memory of a model at every token of a text; their summaries, alarms; effective remembrance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, MemoryState
from ..rules.gates import half_life
from ..rules.validation import UNBOUNDED, check_size
from . import hooks
from .logs import Alarm, GateRecord, MemoryRecord

LAGS = (16, 256)
"""Tokens after its write at which a key is queried again."""
GATES = ("alpha", "eta", "theta", "gamma", "delta")

Matrices = tuple[Tensor, ...]


@dataclass(frozen=True)
class MemoryTrace:
    """One memory of one layer, all its heads, over ``time`` tokens of ``batch`` rows; float32, on the CPU. Values by
    token are ``[batch, heads, time]``, those of the matrices ``[batch, heads, positions]``.

    Attributes:
        name: of the layer, and behind a colon of the memory where the layer has several.
        alpha, eta, theta, delta: the gates; of channel-wise ones the mean over channels. None where the rule has none.
        gamma: the sum of the window's gates: how many tokens count.
        error_before_write: |m - v_t|^2 / (|m|^2 + |v_t|^2) of the answer m = M_{t-1}(k_t) before the token is written.
            0: it is right; 1: it is zero or unrelated to v_t; at most 2.
        recall_error: the same of the pair written so many tokens before, ``[batch, heads, lags, time]``; NaN at the
            beginning.
        readout_change: |m' - m| / (|m| + |v|) of the pair of the first lag, m and m' being the answers to its key
            before the write and now. 0: nothing was written, or all is forgotten.
        memory_contribution: |y - y'| / (|y| + |y'|), ``[batch, time]``, of the mixer's output y and its output y' if
            the layer's memories stay at M_0.
        branch_ratio: |y| / |x + y|, ``[batch, time]``: the mixer's output relative to the residual stream after it;
            NaN for a layer without a block.
        norm, distance_from_init: |M| and |M - M_0| (Frobenius, all matrices).
        momentum_norm, momentum_rank: |S|, and the effective rank of its last matrix; None without momentum.
        effective_rank: of the last matrix of M.
        update_angle: degrees between the change of M over a piece and over the piece before. 0: same direction; 90:
            orthogonal; 120: each piece is forgotten in the next; 180: reversed. NaN for the first piece.
    """

    name: str
    alpha: Tensor | None
    eta: Tensor
    theta: Tensor | None
    gamma: Tensor | None
    delta: Tensor | None
    error_before_write: Tensor
    recall_error: Tensor
    readout_change: Tensor
    memory_contribution: Tensor
    branch_ratio: Tensor
    norm: Tensor
    distance_from_init: Tensor
    momentum_norm: Tensor | None
    momentum_rank: Tensor | None
    effective_rank: Tensor
    update_angle: Tensor

    @property
    def half_life(self) -> Tensor | None:
        """Tokens after which alpha has left half, ``[batch, heads]``; None without that gate."""
        return None if self.alpha is None else half_life(self.alpha)

    @property
    def wrote(self) -> bool:
        """Whether the memory differs at the end from M_0."""
        return bool((self.distance_from_init[..., -1] > 1e-6 * self.norm[..., -1]).any())


@dataclass(frozen=True)
class Trace:
    """Measurements on a text: the memories in the order of the layers."""

    memories: tuple[MemoryTrace, ...]
    nats: Tensor | None  # -log p of each token, [batch, time], NaN for the first; None without logits
    positions: tuple[int, ...]  # tokens read at each measurement of the matrices
    lags: tuple[int, ...]  # of MemoryTrace.recall_error


def trace(model: Any, ids: Tensor, *, lags: Sequence[int] = LAGS, piece: int = 64) -> Trace:
    """Read ``ids`` ``[batch, time]`` with a language model and measure every memory at every token.

    The text is read in eval mode, ``piece`` tokens a call; measuring takes two to three times the work of reading.

    Args:
        model: called as ``model(input_ids=..., past_key_values=...)``, with layers that have memories.
        ids: int64, without padding.
        lags: tokens after its write at which a key is queried, growing.
        piece: tokens between two measurements of the matrices.

    Raises:
        ValueError: ids of another shape or none, no lags or such that do not grow, a piece below 1.
    """
    return joined(list(traces(model, ids, lags=lags, piece=piece)))


def traces(model: Any, ids: Tensor, *, lags: Sequence[int] = LAGS, piece: int = 64) -> Iterator[Trace]:
    """As ``trace``, but yields a ``Trace`` for each piece: the memory needed does not grow with the text."""
    lags = tuple(lags)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids must be a tensor of int64 token ids [batch, time] with at least one token, got {got}")
    if not lags or min(lags) < 1 or sorted(set(lags)) != list(lags):
        raise ValueError(f"lags must be whole numbers of at least 1 that grow, got {list(lags)}")
    check_size("piece", piece, UNBOUNDED)
    device = next(model.parameters()).device
    cache: Any = None
    last: Tensor | None = None  # log-probabilities of the next token
    tracers: list[_LayerTracer] = []
    read = 0
    for part in ids.to(device).split(piece, 1):
        with torch.inference_mode(), hooks.eval_mode(model):
            with hooks.recorded(model) as layers:
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tracers = tracers or [_LayerTracer(layer, lags) for layer in layers]
            found = [m for tracer, layer in zip(tracers, layers, strict=True) for m in tracer.measure(layer, part)]
            nats, last = _nats(getattr(out, "logits", None), part, last)
        read += part.shape[1]
        yield Trace(tuple(found), nats, (read,), lags)


def joined(parts: Sequence[Trace]) -> Trace:
    """Traces of consecutive pieces as one."""

    def of(n: int) -> MemoryTrace:
        each = [part.memories[n] for part in parts]
        tensors = [f.name for f in fields(MemoryTrace) if isinstance(getattr(each[0], f.name), Tensor)]
        whole: dict[str, Any] = {name: torch.cat([getattr(m, name) for m in each], -1) for name in tensors}
        return replace(each[0], **whole)

    nats = None if parts[0].nats is None else torch.cat([cast(Tensor, part.nats) for part in parts], 1)
    memories = tuple(of(n) for n in range(len(parts[0].memories)))
    return Trace(memories, nats, tuple(end for part in parts for end in part.positions), parts[0].lags)


def _nats(logits: Tensor | None, ids: Tensor, last: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """-log p of each of ``ids``, the first by the prediction ``last``; and the prediction now."""
    if logits is None:
        return None, None
    log_p = logits.float().log_softmax(-1)
    before = torch.full_like(log_p[:, :1], torch.nan) if last is None else last
    predicted = torch.cat([before, log_p[:, :-1]], 1)
    return -predicted.gather(2, ids[..., None])[..., 0].cpu(), log_p[:, -1:]


class _LayerTracer:
    def __init__(self, seen: hooks.MemoryLayer, lags: tuple[int, ...]) -> None:
        self.names = [f"{seen.name}:{name}" if name else seen.name for name in hooks.memory_names(seen.layer)]
        self.lags = lags
        self.tracers: list[_TokenTracer] = []
        self.start: list[MemoryState] = []
        self.paths: list[tuple[Matrices, Matrices | None]] = []  # weights after the last piece, and their update
        self.without: Any = None  # the mixer's state with the writes off

    def measure(self, seen: hooks.MemoryLayer, ids: Tensor) -> list[MemoryTrace]:
        batch, time = ids.shape
        found: list[list[dict[str, Tensor]]] = [[] for _ in self.names]
        for call in seen.reads:
            state = call.state if call.state is not None else seen.layer.initial_state(batch)
            for inputs in hooks.write_inputs(seen.layer, call.x, state):
                self.tracers = self.tracers or [_TokenTracer(self.lags) for _ in inputs]
                measured = [tracer.measure(of) for tracer, of in zip(self.tracers, inputs, strict=True)]
                for each, of_memory in zip(found, hooks.split_by_memory(seen.layer, measured), strict=True):
                    each.append(of_memory)
        if not self.start:
            self.start = hooks.memory_states(seen.layer, seen.layer.initial_state(batch))
            self.paths = [(start.weights, None) for start in self.start]
        of_layer = self._contribution(seen)
        ends = hooks.memory_states(seen.layer, seen.reads[-1].after)
        updates = [_difference(end.weights, at) for end, (at, _) in zip(ends, self.paths, strict=True)]
        of = zip(self.names, found, ends, self.start, updates, self.paths, strict=True)
        traced = [
            MemoryTrace(name=name, **of_layer, **_by_token(each, time), **_of_matrices(end, start, update, before))
            for name, each, end, start, update, (_, before) in of
        ]
        self.paths = [(end.weights, update) for end, update in zip(ends, updates, strict=True)]
        return traced

    def _contribution(self, seen: hooks.MemoryLayer) -> dict[str, Tensor]:
        calls = seen.reads if seen.block is None else seen.mixed
        mixer = cast(nn.Module, seen.layer if seen.block is None else seen.block.mixer)
        parts = []
        with hooks.memory_writes(mixer, False):
            for call in calls:
                other, self.without = mixer(call.x, self.without)
                parts.append(other)
        y, without = torch.cat([call.y for call in calls], 1), torch.cat(parts, 1)
        length = y.norm(dim=-1)
        share = (y - without).norm(dim=-1) / (length + without.norm(dim=-1)).clamp(min=1e-12)
        branch = torch.full_like(length, torch.nan)
        if seen.block is not None:
            branch = length / (torch.cat(seen.residual, 1) + y).norm(dim=-1).clamp(min=1e-12)
        return {"memory_contribution": share.float().cpu(), "branch_ratio": branch.float().cpu()}


class _TokenTracer:
    """The last pairs written to a memory, and its answers to them before the write."""

    def __init__(self, lags: tuple[int, ...]) -> None:
        self.lags = lags
        self.past: tuple[Tensor, ...] | None = None

    def measure(self, inputs: hooks.WriteInputs) -> dict[str, Tensor]:
        longest = self.lags[-1]
        if self.past is None:
            empty = inputs.k.new_zeros(*inputs.k.shape[:2], longest, inputs.k.shape[3])
            self.past = empty, empty + torch.nan, empty + torch.nan
        k, v = (torch.cat([past, new], 2) for past, new in zip(self.past, (inputs.k, inputs.v), strict=False))
        of = [slice(longest - lag, longest - lag + inputs.k.shape[2]) for lag in self.lags]
        before, *after = inputs.readouts_before_and_after(*(k[:, :, places] for places in of))
        old = torch.cat([self.past[2], before], 2)
        self.past = k[:, :, -longest:], v[:, :, -longest:], old[:, :, -longest:]
        m, m_old, v_old = after[0], old[:, :, of[0]], v[:, :, of[0]]
        lengths = m_old.norm(dim=-1) + v_old.norm(dim=-1)
        errors = [error(answer, v[:, :, places]) for answer, places in zip(after, of, strict=True)]
        return _gates(inputs.gates) | {
            "error_before_write": error(before, inputs.v),
            "recall_error": torch.stack(errors, 2),
            "readout_change": (m - m_old).norm(dim=-1) / lengths.clamp(min=1e-15),
        }


def _widened(matrices: Matrices, like: Matrices) -> Matrices:
    """With zeros for keys that were read since: on phi* a matrix has a column for each."""
    return tuple(F.pad(a, (0, b.shape[-1] - a.shape[-1])) for a, b in zip(matrices, like, strict=True))


def _difference(end: Matrices, start: Matrices) -> Matrices:
    return tuple(a - b for a, b in zip(end, _widened(start, end), strict=True))


def _gates(gates: Gates) -> dict[str, Tensor]:
    """The gates that there are, ``[batch, heads, time]`` each."""
    found = {}
    for name in GATES:
        gate = getattr(gates, name)
        if gate is not None:
            found[name] = gate if gate.dim() == 3 else gate.sum(-1) if name == "gamma" else gate.mean(-1)
    return found


def _by_token(parts: list[dict[str, Tensor]], time: int) -> dict[str, Any]:
    """The measurements of the last ``time`` tokens: persistent tokens come before them."""
    whole = {name: torch.cat([part[name] for part in parts], -1)[..., -time:].float().cpu() for name in parts[0]}
    return {**dict.fromkeys(GATES), **whole}


def _of_matrices(end: MemoryState, start: MemoryState, update: Matrices, before: Matrices | None) -> dict[str, Any]:
    """The measurements of a memory's matrices after an update, ``[batch, heads, 1]`` each."""
    sums = tuple(m.sums[0] for m in end.matrices if m.sums)
    length = norm(end.weights)
    found = {
        "norm": length,
        "distance_from_init": norm(_difference(end.weights, start.weights)),
        "momentum_norm": norm(sums) if sums else None,
        "momentum_rank": effective_rank(sums[-1]) if sums else None,
        "effective_rank": effective_rank(end.weights[-1]),
        "update_angle": length * torch.nan if before is None else angle(update, _widened(before, update)),
    }
    return {name: None if value is None else value[..., None].cpu() for name, value in found.items()}


def error(answer: Tensor, v: Tensor) -> Tensor:
    """|m - v|^2 / (|m|^2 + |v|^2) over the last dimension, at most 2."""
    lengths = answer.square().sum(-1) + v.square().sum(-1)
    return (answer - v).square().sum(-1) / lengths.clamp(min=1e-30)


def norm(matrices: Matrices) -> Tensor:
    """The Frobenius norm of all matrices ``[batch, heads, rows, columns]`` together, ``[batch, heads]``."""
    return torch.stack([m.float().square().sum((-2, -1)) for m in matrices]).sum(0).sqrt()


def angle(update: Matrices, before: Matrices) -> Tensor:
    """Degrees between two updates of all matrices ``[batch, heads, rows, columns]`` together, ``[batch, heads]``; NaN
    where one of them is zero."""
    dot = sum(((a.double() * b.double()).sum((-2, -1)) for a, b in zip(update, before, strict=True)), torch.zeros(()))
    cosine = dot / (norm(update).double() * norm(before).double())
    return cosine.clamp(-1, 1).acos().rad2deg().float()


def effective_rank(matrix: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli 2007), of ``[..., rows, columns]``;
    between 1 and the smaller side, 0 of a matrix of zeros, and NaN of one with entries that are not finite."""
    finite = matrix.isfinite().all(-1).all(-1)
    matrix = torch.where(finite[..., None, None], matrix, 0.0).double()
    if matrix.shape[-2] > matrix.shape[-1]:
        matrix = matrix.mT
    values = torch.linalg.eigvalsh(matrix @ matrix.mT).clamp(min=0).sqrt()
    total = values.sum(-1, keepdim=True)
    entropy = torch.special.entr(values / total.clamp(min=1e-30)).sum(-1)
    return torch.where(finite, torch.where(total[..., 0] > 0, entropy.exp(), 0.0), torch.nan).float()


SHORTEST_HALF_LIFE = 8.0
"""Tokens; a memory without a longer one retains no more than a convolution."""
LEAST_CHANGE, LEAST_CONTRIBUTION, LEAST_BRANCH = 0.002, 0.01, 0.001
"""Of `readout_change` (that of Hope's memories of keys and values begins at 0.01), `memory_contribution`,
`branch_ratio`."""
LEAST_ETA = 0.01
"""Below it, the gate is why a memory does not write."""

AGAIN = "Start a new run (another output_dir) with"
SLOWER = (
    f"{AGAIN} train.gate_lr_scale=0.1 (gates learn at a tenth of the rate; not those of block hope) or a lower "
    "train.learning_rate"
)


def summarise(trace: Trace) -> list[MemoryRecord]:
    """Each memory of a trace in a few numbers for each head: means over rows and tokens, and matrices at the end. None
    where the text was too short."""
    return [_summary(memory) for memory in trace.memories]


def _summary(memory: MemoryTrace) -> MemoryRecord:
    found: dict[str, Any] = {}
    for name in ("norm", "distance_from_init", "momentum_norm", "momentum_rank", "effective_rank"):
        value = getattr(memory, name)
        found[name] = None if value is None else _heads(value[..., -1:])
    for name in GATES:
        gate = getattr(memory, name)
        if gate is not None:
            found[name] = GateRecord(mean=_heads(gate), std=[_number(x) for x in gate.std((0, 2), correction=0)])
    life = memory.half_life
    return MemoryRecord(
        name=memory.name,
        half_life=None if life is None else _heads(life[..., None]),
        readout_change=_heads(memory.readout_change),
        error_before_write=_heads(memory.error_before_write),
        recall_error=[_heads(error) for error in memory.recall_error.unbind(2)],
        memory_contribution=_number(memory.memory_contribution.mean()),
        branch_ratio=_number(memory.branch_ratio.mean()),
        update_angle=_heads(memory.update_angle),
        **found,
    )


def _heads(x: Tensor) -> list[float | None]:
    """Means of ``[batch, heads, time]`` over rows and tokens, NaN left out."""
    return [_number(value) for value in x.nanmean((0, 2))]


def _number(x: Tensor) -> float | None:
    return float(f"{float(x):.5g}") if torch.isfinite(x) else None


def alarms(memories: Sequence[MemoryRecord]) -> list[Alarm]:
    """What is wrong with memories that ``summarise`` gives. A single text may need no memory: trust two probes in a
    row."""
    found = [alarm for memory in memories for alarm in _of(memory)]
    lives = [_largest(memory.half_life) for memory in memories]
    if lives and all(life is not None and life < SHORTEST_HALF_LIFE for life in lives):
        text = (
            f"no memory retains anything: the longest half-life of a head is {max(filter(None, lives)):.2f} tokens. "
            f"{SLOWER}; if data.order is crops or packed, use stream, which rewards retention"
        )
        return [Alarm(kind="no retention", memory="", text=text), *(a for a in found if a.kind == "nonfinite")]
    return found


def _of(memory: MemoryRecord) -> Iterable[Alarm]:
    name, contribution, branch = memory.name, memory.memory_contribution, memory.branch_ratio
    if None in (memory.norm or ()) or contribution is None:
        text = f"{name} holds numbers that are not finite. {AGAIN} a lower train.learning_rate"
        yield Alarm(kind="nonfinite", memory=name, text=text)
        return
    change, eta = _largest(memory.readout_change), _largest(memory.eta.mean if memory.eta else None)
    if change is not None and eta is not None and change < LEAST_CHANGE:
        why = (
            f"its gate eta is at most {eta:.1g}. A closed gate does not recover: check whether something holds eta at "
            f"zero. {SLOWER}"
            if eta < LEAST_ETA
            else f"though eta is {eta:.2f}. Check whether keys and values have collapsed. {AGAIN} a rule with "
            "normalised steps (optimiser.normalised)"
        )
        text = f"{name} writes nothing: writes change the answers to their keys by {change:.1%}; {why}"
        yield Alarm(kind="no writes", memory=name, text=text)
    elif contribution < LEAST_CONTRIBUTION or (branch is not None and branch < LEAST_BRANCH):
        used = (
            f"its writes change {contribution:.2%} of its mixer's output"
            if contribution < LEAST_CONTRIBUTION
            else f"{branch:.3%} of the residual stream comes from its mixer"
        )
        text = (
            f"{name} is unused: {used}. Look for a branch that is scaled away. {AGAIN} data.order=stream if it was "
            "another, which rewards memory"
        )
        yield Alarm(kind="unused", memory=name, text=text)


def _largest(values: Sequence[float | None] | None) -> float | None:
    return max((value for value in values or () if value is not None), default=None)


def effective_remembrance(model: Any, ids: Tensor, recent: int, piece: int = 256) -> float:
    """Effective remembrance (Buitrago and Gu, arXiv 2507.02782): the mean total variation distance between next-token
    predictions after the whole text and after its last tokens only. 0: older tokens are not used; at most 1.

    The second prediction starts from an empty memory ``recent`` to 2 ``recent`` tokens before. The memory needed does
    not depend on the length of the text.

    Args:
        model: a language model that is called as ``model(input_ids=..., past_key_values=...)``.
        ids: int64 ``[batch, time]``, without padding, longer than 2 ``recent``.
        recent: tokens that both read, at least.
        piece: tokens of a call.

    Raises:
        ValueError: a text that is too short, or ``recent`` below 1.
    """
    if recent < 1 or ids.dim() != 2 or ids.shape[1] <= 2 * recent:
        raise ValueError(f"ids must be [batch, time], longer than 2 recent, got {list(ids.shape)} and recent={recent}")
    with torch.inference_mode(), hooks.eval_mode(model):
        ids = ids.to(next(model.parameters()).device)
        *_, (_, whole) = _read(model, ids[:, : 2 * recent], None, piece)
        distances = []
        for start in range(2 * recent, ids.shape[1], recent):
            scored = ids[:, start : start + recent]
            *_, (_, last) = _read(model, ids[:, start - recent : start], None, piece)
            pairs = list(zip(_read(model, scored, whole, piece), _read(model, scored, last, piece), strict=True))
            distances += [0.5 * (p - q).abs().sum(-1) for (p, _), (q, _) in pairs]
            whole = pairs[-1][0][1]
        return float(torch.cat(distances, 1).mean())


def _read(model: Any, ids: Tensor, cache: Any, piece: int) -> Iterator[tuple[Tensor, Any]]:
    """The distributions after each token of a piece, ``[batch, piece, vocabulary]``, and the state after it."""
    for part in ids.split(piece, 1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        yield out.logits.float().softmax(-1), cache
