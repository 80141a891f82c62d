"""Summaries of traces, alarms, and effective remembrance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .hooks import eval_mode
from .logs import Alarm, GateRecord, MemoryRecord
from .tracing import GATES, MemoryTrace, Trace

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
    if recent < 1:
        raise ValueError(f"recent={recent} must be at least 1")
    if ids.dim() != 2 or ids.shape[1] <= 2 * recent:
        raise ValueError(
            f"ids must be [batch, time] of more than 2 recent = {2 * recent} tokens, got {list(ids.shape)}"
        )
    with torch.inference_mode(), eval_mode(model):
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
