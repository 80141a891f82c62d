"""``trace``: what every memory of a model does at every token of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..memory import Gates, MemoryState
from ..monitor import measures
from ..rules.validation import UNBOUNDED, check_size
from .lessons import Lesson, by_memory, lessons, names, states
from .watching import Watched, evaluating, watch
from .writes import memory_writes

LAGS = (16, 256)
"""How many tokens back a key is asked about: what is recent, and what is older."""
GATES = ("alpha", "eta", "theta", "gamma", "delta")

Matrices = tuple[Tensor, ...]


@dataclass(frozen=True)
class MemoryTrace:
    """One memory of one layer, all its heads, over ``time`` tokens of ``batch`` rows; float32, on the CPU.

    Attributes:
        name: of the layer, and behind a colon of the memory where the layer has several.
        alpha, eta, theta, delta: the gates, ``[batch, heads, time]``; of channel-wise ones the mean over channels. None
            where the rule has none.
        gamma: how many tokens of its window count at a token, ``[batch, heads, time]``: the sum of the window's gates.
        surprise: how wrong the memory is about a token before it is written, ``[batch, heads, time]``:
            |m - v_t|^2 / (|m|^2 + |v_t|^2) of its answer m = M_{t-1}(k_t). 0: it is right; 1: it knows nothing, or
            answers nothing; at most 2.
        error: the same of the pair written so many tokens before, ``[batch, heads, lags, time]``; NaN where the text is
            younger.
        written: |m' - m| / (|m| + |v|) of the pair of the first lag, ``[batch, heads, time]``: how far the answer to a
            key has moved since before it was written, m' being the answer now. 0: nothing was written, or all is
            forgotten.
        share: |y - y'| / (|y| + |y'|), ``[batch, time]``: how much of what the layer's mixer gives out hangs on what
            its memories have written, y' being what it gives out if they stay at M_0; from 0 to 1. Of all memories of a
            layer the same.
        branch: |y| / |x + y|, ``[batch, time]``: how much of what the block passes on comes from its mixer; NaN for a
            layer that stands alone.
        norm, moved: |M| and |M - M_0| (Frobenius, all matrices), ``[batch, heads, points]``, after every piece read.
        momentum: |S|; None where the optimiser keeps none.
        momentum_rank: effective rank of the last matrix of S; None likewise.
        rank: effective rank of the last matrix of M, ``[batch, heads, points]``: in how many directions it differs.
        turn: degrees by which the path of M bends, ``[batch, heads, points]``: between the step that it took from the
            start of a piece to its end, and the step of the piece before. 0: it goes straight on; 90: each piece is
            written in another direction; 120: pieces are forgotten one after the other, since the step between two
            states that have nothing to do with each other takes the first back; 180: it takes back all. NaN for the
            first piece.
    """

    name: str
    alpha: Tensor | None
    eta: Tensor
    theta: Tensor | None
    gamma: Tensor | None
    delta: Tensor | None
    surprise: Tensor
    error: Tensor
    written: Tensor
    share: Tensor
    branch: Tensor
    norm: Tensor
    moved: Tensor
    momentum: Tensor | None
    momentum_rank: Tensor | None
    rank: Tensor
    turn: Tensor

    @property
    def half_life(self) -> Tensor | None:
        """Tokens after which alpha has left half, ``[batch, heads]``; None where the rule forgets by no gate."""
        return None if self.alpha is None else measures.half_life(self.alpha)


@dataclass(frozen=True)
class Trace:
    """What was seen while a text was read.

    Attributes:
        memories: of each layer, in the order of the layers.
        nats: -log p of each token given those before it, ``[batch, time]``, NaN for the first; None for a model that
            predicts nothing.
        points: tokens read after each piece, to which ``norm``, ``moved``, ``momentum``, ``momentum_rank``,
            ``rank`` and ``turn`` belong.
        lags: of ``MemoryTrace.error``.
    """

    memories: tuple[MemoryTrace, ...]
    nats: Tensor | None
    points: tuple[int, ...]
    lags: tuple[int, ...]


def trace(model: Any, ids: Tensor, *, lags: Sequence[int] = LAGS, piece: int = 64) -> Trace:
    """Read ``ids`` ``[batch, time]`` with a language model and see every memory at every token.

    The text is read as ``model(input_ids=..., past_key_values=...)`` reads it, in eval mode, ``piece`` tokens a call;
    what is seen besides is asked of copies, two to three times the work of reading. The memory needed on the model's
    device does not depend on the length; ``traces`` gives the same piece by piece.

    Args:
        model: an Atlas language model, or any module that is called likewise and has layers with memories.
        ids: int64, without padding.
        lags: how many tokens back keys are asked about, growing.
        piece: tokens between two looks at the matrices.

    Raises:
        ValueError: ids of another shape or none, no lags or such that do not grow, a piece below 1.
    """
    return joined(list(traces(model, ids, lags=lags, piece=piece)))


def traces(model: Any, ids: Tensor, *, lags: Sequence[int] = LAGS, piece: int = 64) -> Iterator[Trace]:
    """As ``trace``, a ``Trace`` for each piece as soon as it is read; points count from the text's first token."""
    lags = tuple(lags)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or 0 in ids.shape:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids must be a tensor of int64 token ids [batch, time] with at least one token, got {got}")
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if known is not None and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise ValueError(f"ids must be from 0 to {known - 1}, got {int(ids.min())} to {int(ids.max())}")
    if not lags or min(lags) < 1 or sorted(set(lags)) != list(lags):
        raise ValueError(f"lags must be whole numbers of at least 1 that grow, got {list(lags)}")
    check_size("piece", piece, UNBOUNDED)
    device = next(model.parameters()).device
    cache: Any = None
    last: Tensor | None = None  # log-probabilities of the token that comes next
    followed: list[_Layer] | None = None
    read = 0
    for part in ids.to(device).split(piece, 1):
        with torch.inference_mode(), evaluating(model):
            with watch(model) as seen:
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            if followed is None:
                followed = [_Layer(watched, lags) for watched in seen]
            found = [m for layer, watched in zip(followed, seen, strict=True) for m in layer.look(watched, part)]
            nats, last = _nats(getattr(out, "logits", None), part, last)
        read += part.shape[1]
        yield Trace(tuple(found), nats, (read,), lags)


def joined(parts: Sequence[Trace]) -> Trace:
    """Traces of pieces that follow one another, as one."""

    def of(n: int) -> MemoryTrace:
        each = [part.memories[n] for part in parts]
        tensors = [f.name for f in fields(MemoryTrace) if isinstance(getattr(each[0], f.name), Tensor)]
        whole: dict[str, Any] = {name: torch.cat([getattr(m, name) for m in each], -1) for name in tensors}
        return replace(each[0], **whole)

    nats = None if parts[0].nats is None else torch.cat([cast(Tensor, part.nats) for part in parts], 1)
    memories = tuple(of(n) for n in range(len(parts[0].memories)))
    return Trace(memories, nats, tuple(point for part in parts for point in part.points), parts[0].lags)


def _nats(logits: Tensor | None, ids: Tensor, last: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """-log p of each of ``ids``, the first by what was predicted ``last``; and what is predicted now."""
    if logits is None:
        return None, None
    log_p = logits.float().log_softmax(-1)
    before = torch.full_like(log_p[:, :1], torch.nan) if last is None else last
    predicted = torch.cat([before, log_p[:, :-1]], 1)
    return -predicted.gather(2, ids[..., None])[..., 0].cpu(), log_p[:, -1:]


class _Layer:
    """A layer whose memories are followed from piece to piece."""

    def __init__(self, watched: Watched, lags: tuple[int, ...]) -> None:
        own = names(watched.layer)
        self.names = [f"{watched.name}:{name}" if name else watched.name for name in own]
        self.lags = lags
        self.memories: list[_Memory] = []  # one for each lesson
        self.start: list[MemoryState] | None = None
        self.paths: list[_Path] = []
        self.without: Any = None

    def look(self, watched: Watched, ids: Tensor) -> list[MemoryTrace]:
        """What was seen of the layer while it read ``ids`` ``[batch, time]``."""
        batch, time = ids.shape
        found: list[list[dict[str, Tensor]]] = [[] for _ in self.names]
        for call in watched.reads:
            state = call.state if call.state is not None else watched.layer.initial_state(batch)
            for part in lessons(watched.layer, call.x, state):
                self.memories = self.memories or [_Memory(self.lags) for _ in part]
                looks = [memory.look(lesson) for memory, lesson in zip(self.memories, part, strict=True)]
                for each, look in zip(found, by_memory(watched.layer, looks), strict=True):
                    each.append(look)
        if self.start is None:
            self.start = states(watched.layer, watched.layer.initial_state(batch))
            self.paths = [_Path(start.weights) for start in self.start]
        share, branch = self._share(watched)
        ends = states(watched.layer, watched.reads[-1].after)
        return [
            MemoryTrace(
                name=name,
                share=share,
                branch=branch,
                turn=path.turn(end.weights),
                **_tokens(each, time),
                **_matrices(end, start),
            )
            for name, each, end, start, path in zip(self.names, found, ends, self.start, self.paths, strict=True)
        ]

    def _share(self, watched: Watched) -> tuple[Tensor, Tensor]:
        """``MemoryTrace.share`` and ``branch``."""
        calls = watched.reads if watched.block is None else watched.mixed
        mixer = cast(nn.Module, watched.layer if watched.block is None else watched.block.mixer)
        parts = []
        with memory_writes(mixer, False):
            for call in calls:
                other, self.without = mixer(call.x, self.without)
                parts.append(other)
        y, without = torch.cat([call.y for call in calls], 1), torch.cat(parts, 1)
        length = y.norm(dim=-1)
        share = (y - without).norm(dim=-1) / (length + without.norm(dim=-1)).clamp(min=1e-12)
        if watched.block is None:
            return share.float().cpu(), torch.full_like(share, torch.nan).float().cpu()
        branch = length / (torch.cat(watched.residual, 1) + y).norm(dim=-1).clamp(min=1e-12)
        return share.float().cpu(), branch.float().cpu()


class _Memory:
    """The last pairs that one memory was taught, and what it had answered to them before."""

    def __init__(self, lags: tuple[int, ...]) -> None:
        self.lags = lags
        self.past: tuple[Tensor, ...] | None = None

    def look(self, lesson: Lesson) -> dict[str, Tensor]:
        """The figures of each token of a lesson, ``[batch, heads, ..., time]``."""
        if self.past is None:
            empty = lesson.k.new_zeros(*lesson.k.shape[:2], self.lags[-1], lesson.k.shape[3])
            self.past = empty, empty + torch.nan, empty + torch.nan
        k, v = (torch.cat([past, new], 2) for past, new in zip(self.past, (lesson.k, lesson.v), strict=False))
        of = [slice(self.lags[-1] - lag, self.lags[-1] - lag + lesson.k.shape[2]) for lag in self.lags]
        before, *after = lesson.answers_before_and_after(*(k[:, :, places] for places in of))
        old = torch.cat([self.past[2], before], 2)
        self.past = k[:, :, -self.lags[-1] :], v[:, :, -self.lags[-1] :], old[:, :, -self.lags[-1] :]
        errors = [measures.error(answer, v[:, :, places]) for answer, places in zip(after, of, strict=True)]
        return _gates(lesson.gates) | {
            "surprise": measures.error(before, lesson.v),
            "error": torch.stack(errors, 2),
            "written": measures.change(after[0], old[:, :, of[0]], v[:, :, of[0]]),
        }


class _Path:
    """Where the matrices of a memory stood after the last piece, and how they had come there."""

    def __init__(self, start: Matrices) -> None:
        self.at = start
        self.step: Matrices | None = None

    def turn(self, end: Matrices) -> Tensor:
        """``MemoryTrace.turn`` at the end of the next piece, ``[batch, heads, 1]``."""
        step = tuple(a - b for a, b in zip(end, _wider(self.at, end), strict=True))
        before, self.at, self.step = self.step, end, step
        if before is None:
            return torch.full((*end[0].shape[:2], 1), torch.nan)
        return measures.turn(step, _wider(before, end))[..., None].cpu()


def _wider(matrices: Matrices, like: Matrices) -> Matrices:
    """With a column of zeros for every key that was read since: on phi* a matrix has one for each."""
    return tuple(F.pad(a, (0, b.shape[-1] - a.shape[-1])) for a, b in zip(matrices, like, strict=True))


def _gates(gates: Gates) -> dict[str, Tensor]:
    """The gates that there are, ``[batch, heads, time]`` each."""
    found = {}
    for name in GATES:
        gate = getattr(gates, name)
        if gate is not None:
            found[name] = gate if gate.dim() == 3 else gate.sum(-1) if name == "gamma" else gate.mean(-1)
    return found


def _tokens(parts: list[dict[str, Tensor]], time: int) -> dict[str, Any]:
    """The figures of the last ``time`` tokens read: persistent tokens were read before the text's first."""
    whole = {name: torch.cat([part[name] for part in parts], -1)[..., -time:].float().cpu() for name in parts[0]}
    return {**dict.fromkeys(GATES), **whole}


def _matrices(end: MemoryState, start: MemoryState) -> dict[str, Any]:
    """The figures of a memory's matrices, ``[batch, heads, 1]`` each."""
    moved = tuple(w - w0 for w, w0 in zip(end.weights, _wider(start.weights, end.weights), strict=True))
    sums = tuple(m.sums[0] for m in end.matrices if m.sums)
    found = {
        "norm": measures.norm(end.weights),
        "moved": measures.norm(moved),
        "momentum": measures.norm(sums) if sums else None,
        "momentum_rank": measures.effective_rank(sums[-1]) if sums else None,
        "rank": measures.effective_rank(end.weights[-1]),
    }
    return {name: None if value is None else value[..., None].cpu() for name, value in found.items()}
