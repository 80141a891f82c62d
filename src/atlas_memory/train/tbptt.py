"""Truncated backpropagation through time: the memory states of rows between steps and in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from atlas_memory.layers.stateful import check_tensors
from atlas_memory.models.cache import AtlasCache
from atlas_memory.rules.state import MAX_TOKENS
from atlas_memory.train.checkpoint import checking

FILES = "memory-*.safetensors"  # one of every process
Packed = tuple[dict[str, torch.Tensor], dict[str, str]]
"""The states of a process's rows by name; and which rows they are."""


class TBPTTStates:
    """The states of all layers at the end of each row's last segment, detached.

    A process reads `accumulation` batches of `batch` rows a step, other rows in each of `groups` consecutive steps. In
    group g, batch a of process p has the `batch` rows from `((g * accumulation + a) * processes + p) * batch` on, as
    the sampler deals them. When segments grow (`lengthen`), batches have fewer rows and there are more groups.

    Args:
        model: An `AtlasForCausalLM` whose states have a constant size.
        batch: Rows in a batch of one process.
        accumulation: Batches a step.
        groups: Steps until the same rows are read again (`data.interleave`).
        process, processes: Which one this is, and how many there are.
    """

    def __init__(
        self, model: Any, batch: int, accumulation: int = 1, groups: int = 1, process: int = 0, processes: int = 1
    ) -> None:
        self._blocks = model.model.layers
        with torch.no_grad():
            self._like = [b.mixer.initial_state(0) for b in self._blocks]
        self._batch, self._accumulation, self._groups = batch, accumulation, groups
        self._process, self._processes = process, processes
        self._begin(1)

    def _begin(self, times: int) -> None:
        batch, batches = self._batch // times, self._groups * times * self._accumulation * self._processes
        mine = range(self._process, batches, self._processes)
        self._rows = [range(n * batch, (n + 1) * batch) for n in mine]
        self._caches = [AtlasCache(len(self._blocks), straight_through=True) for _ in mine]
        self._next, self._times = 0, times

    def lengthen(self, times: int) -> None:
        """Continue with segments `times` as long as at first, from the first group; all processes must call."""
        if times == self._times:
            return
        mine = self._pack()
        parts = [mine] * self._processes
        if self._processes > 1:
            torch.distributed.all_gather_object(parts, mine)
        self._begin(times)
        self._unpack(parts)

    def next_cache(self) -> AtlasCache:
        """The cache of the batch that is read next; reading updates it. Gradients go through it to M_0."""
        cache = self._caches[self._next]
        self._next = (self._next + 1) % len(self._caches)
        return cache

    def _pack(self) -> Packed:
        tensors: dict[str, torch.Tensor] = {}
        seen = []
        for n, cache in enumerate(self._caches):
            seen.append(cache.get_seq_length())
            for i, layer in enumerate(cache.blocks if seen[-1] else ()):
                for name, tensor in layer.state.named_tensors():
                    tensors[f"{n}.{i}.{name}"] = tensor.detach().cpu().contiguous().clone()
        return tensors, {
            "rows": json.dumps([[r.start, r.stop] for r in self._rows]),
            "seen": json.dumps(seen),
            "group": str(self._next // self._accumulation),
            "times": str(self._times),
        }

    def save(self, folder: Path) -> None:
        """Write the states of this process's rows."""
        tensors, about = self._pack()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / FILES.replace("*", str(self._process)), metadata=about)

    def load(self, folder: Path) -> None:
        """Take this process's rows from what all processes saved. ValueError if rows are missing or do not fit."""
        own = {row for rows in self._rows for row in rows}
        parts = []
        with checking(folder / FILES):
            for path in sorted(folder.glob(FILES)):
                with safe_open(path, framework="pt") as file:
                    about = file.metadata()
                    batches = self._check_rows(about)
                    # All rows may not fit into memory.
                    mine = [key for key in file.keys() if own & set(batches[int(key.split(".", 1)[0])])]  # noqa: SIM118
                    parts.append(({key: file.get_tensor(key) for key in mine}, about))
            if sum(map(len, (rows for _, about in parts for rows in _batches(about)))) > self._total:
                raise ValueError("it has rows twice")
        self._unpack(parts, str(folder))
        if int(parts[0][1]["times"]) == self._times:  # otherwise segments grow with the next step
            self._next = int(parts[0][1]["group"]) * self._accumulation

    @property
    def _total(self) -> int:
        """Rows of all processes and groups."""
        return self._batch * self._accumulation * self._groups * self._processes

    def _check_rows(self, about: dict[str, str]) -> list[range]:
        """The rows of each batch in a file."""
        batches, seen = _batches(about), json.loads(about["seen"])
        if any(rows.start < 0 or rows.stop > self._total or not rows for rows in batches):
            raise ValueError(f"it has other rows than the {self._total} of this run")
        known = [type(count) is int and 0 <= count <= MAX_TOKENS for count in seen]
        if known != [True] * len(batches) or not 0 <= int(about["group"]) < self._groups * int(about["times"]):
            raise ValueError(f"its rows have read {seen} tokens in group {about['group']}")
        return batches

    def _unpack(self, parts: list[Packed], place: str = "the run") -> None:
        """Take this process's rows of what all processes packed at `place`."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        seen: dict[int, int] = {}
        for tensors, about in parts:
            batches = _batches(about)
            for rows, count in zip(batches, json.loads(about["seen"]), strict=True):
                seen |= dict.fromkeys(rows, count)
            with checking(Path(place) / FILES):
                for key, tensor in tensors.items():
                    n, name = key.split(".", 1)
                    for row, value in zip(batches[int(n)], tensor, strict=True):
                        found.setdefault(row, {})[name] = value
        own = [row for rows in self._rows for row in rows]
        if missing := [row for row in own if row not in seen]:
            raise ValueError(
                f"{place!r} holds the states of {len(seen)} rows, and row {missing[0]} is not among them: train with "
                "as many rows (batch_size x gradient_accumulation_steps x processes x data.interleave) as before"
            )
        for rows, cache in zip(self._rows, self._caches, strict=True):
            if not seen[rows[0]]:
                continue
            for i, (block, like, layer) in enumerate(zip(self._blocks, self._like, cache.blocks, strict=True)):
                names = [name for name, _ in like.named_tensors()]
                with checking(Path(place) / FILES):
                    tensors = {name: torch.stack([found[row][f"{i}.{name}"] for row in rows]) for name in names}
                    check_tensors(block.mixer, tensors, like, f"the state of layer {i}")
                values = iter([tensors[name] for name in names])
                device = next(block.parameters()).device
                restored = like.map(lambda _, values=values, device=device: next(values).to(device))
                layer.restore(restored, seen[rows[0]])


def _batches(about: dict[str, str]) -> list[range]:
    return [range(*rows) for rows in json.loads(about["rows"])]
