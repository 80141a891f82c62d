"""What the rows of a training run remember from one step to the next, and how a checkpoint keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from atlas_memory.layers.stateful import check_tensors
from atlas_memory.models.cache import AtlasCache
from atlas_memory.rules.state import TOKENS
from atlas_memory.train.loaded import fitting

FILES = "memory-*.safetensors"  # one of every process
Packed = tuple[dict[str, torch.Tensor], dict[str, str]]
"""What the rows of a process remember, as far as they have been read, by name; and which rows they are."""


class CarriedStates:
    """The states of all layers at the end of each row's last segment, without their graphs.

    A process reads `accumulation` batches of `batch` rows a step, other rows in each of `lanes` steps. Rows are counted
    over all processes and lanes: in lane l, batch a of process p has the `batch` rows from `((l * accumulation + a) *
    processes + p) * batch` on, as the sampler deals them. When segments grow (`deal`), batches have fewer rows and
    there are more lanes: the same rows, each with what it remembers.

    Args:
        model: An `AtlasForCausalLM`, whose states have a constant size; its weights may be sharded afterwards.
        batch: Rows in a batch of one process.
        accumulation: Batches a step.
        lanes: Steps until the same rows are read again.
        process, processes: Which one this is, and how many there are.
    """

    def __init__(
        self, model: Any, batch: int, accumulation: int = 1, lanes: int = 1, process: int = 0, processes: int = 1
    ) -> None:
        self._blocks = model.model.layers
        with torch.no_grad():  # of what tensors each state is made, for `_take`
            self._like = [b.mixer.initial_state(0) for b in self._blocks]
        self._batch, self._accumulation, self._lanes = batch, accumulation, lanes
        self._process, self._processes = process, processes
        self._begin(1)

    def _begin(self, times: int) -> None:
        batch, turns = self._batch // times, self._lanes * times * self._accumulation * self._processes
        mine = range(self._process, turns, self._processes)
        self._rows = [range(turn * batch, (turn + 1) * batch) for turn in mine]
        self._caches = [AtlasCache(len(self._blocks), straight_through=True) for _ in mine]
        self._turn, self._times = 0, times

    def deal(self, times: int) -> None:
        """Go on with segments `times` as long as at first, from the first lane; all processes must ask. Nothing changes
        if they are as long as now."""
        if times == self._times:
            return
        mine = self._packed()
        parts = [mine] * self._processes
        if self._processes > 1:
            torch.distributed.all_gather_object(parts, mine)
        self._begin(times)
        self._take(parts)

    def next(self) -> AtlasCache:
        """The cache of the batch that is read next; reading updates it. Gradients go through it to M_0."""
        cache = self._caches[self._turn]
        self._turn = (self._turn + 1) % len(self._caches)
        return cache

    def _packed(self) -> Packed:
        tensors: dict[str, torch.Tensor] = {}
        seen = []
        for n, cache in enumerate(self._caches):
            seen.append(cache.get_seq_length())
            for i, held in enumerate(cache.blocks if seen[-1] else ()):
                for name, tensor in held.state.named_tensors():
                    tensors[f"{n}.{i}.{name}"] = tensor.detach().cpu().contiguous().clone()
        return tensors, {
            "rows": json.dumps([[r.start, r.stop] for r in self._rows]),
            "seen": json.dumps(seen),
            "lane": str(self._turn // self._accumulation),
            "times": str(self._times),
            "processes": str(self._processes),
        }

    def save(self, folder: Path) -> None:
        """Write the states of this process's rows, as far as they have been read."""
        tensors, about = self._packed()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / FILES.replace("*", str(self._process)), metadata=about)

    def load(self, folder: Path) -> None:
        """Read what all processes saved, and take this one's rows of it, however they were dealt then.

        Raises:
            ValueError: Rows are missing: another number of rows was trained; or what is there is no state of this
                model's.
        """
        own = {row for rows in self._rows for row in rows}
        parts = []
        with fitting(folder / FILES):
            for path in sorted(folder.glob(FILES)):
                with safe_open(path, framework="pt") as file:
                    about = file.metadata()
                    batches = self._batches(about)
                    # Others may be far more than fits into memory. An open file has keys() and is no mapping.
                    mine = [key for key in file.keys() if own & set(batches[int(key.split(".", 1)[0])])]  # noqa: SIM118
                    parts.append(({key: file.get_tensor(key) for key in mine}, about))
            if sum(map(len, (rows for _, about in parts for rows in self._batches(about)))) > self._total:
                raise ValueError("rows stand in it twice")
        self._take(parts, str(folder))
        if int(parts[0][1].get("times", 1)) == self._times:  # otherwise segments grow with the next step
            self._turn = int(parts[0][1]["lane"]) * self._accumulation

    @property
    def _total(self) -> int:
        """Rows of all processes and lanes."""
        return self._batch * self._accumulation * self._lanes * self._processes

    def _batches(self, about: dict[str, str]) -> list[range]:
        """The rows of each batch in a file; ValueError if they are none of this run, or what they have read is no
        number."""
        batches, seen = [range(*rows) for rows in json.loads(about["rows"])], json.loads(about["seen"])
        if any(rows.start < 0 or rows.stop > self._total or not rows for rows in batches):
            raise ValueError(f"it has other rows than the {self._total} of this run")
        if len(seen) != len(batches) or not all(type(count) is int and 0 <= count <= TOKENS for count in seen):
            raise ValueError("what its rows have read is no number of tokens")
        if not 0 <= int(about["lane"]) < self._lanes * max(int(about.get("times", 1)), 0):
            raise ValueError(f"its lane is {about['lane']}, and its segments {about.get('times')} times as long")
        return batches

    def _take(self, parts: list[Packed], place: str = "the run") -> None:
        """Begin with this process's rows of what all processes packed at `place`."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        seen: dict[int, int] = {}
        for tensors, about in parts:
            batches = [range(*rows) for rows in json.loads(about["rows"])]
            for rows, count in zip(batches, json.loads(about["seen"]), strict=True):
                seen |= dict.fromkeys(rows, count)
            with fitting(Path(place) / FILES):
                for key, tensor in tensors.items():
                    n, name = key.split(".", 1)
                    for row, value in zip(batches[int(n)], tensor, strict=True):
                        found.setdefault(row, {})[name] = value
        own = [row for rows in self._rows for row in rows]
        if missing := [row for row in own if row not in seen]:
            raise ValueError(
                f"{place!r} holds what {len(seen)} rows remember, and row {missing[0]} is not among them: train "
                "with as many rows (batch_size x gradient_accumulation_steps x processes x lanes) as before"
            )
        for rows, cache in zip(self._rows, self._caches, strict=True):
            if not seen[rows[0]]:
                continue
            for i, (block, like, held) in enumerate(zip(self._blocks, self._like, cache.blocks, strict=True)):
                names = [name for name, _ in like.named_tensors()]
                with fitting(Path(place) / FILES):
                    tensors = {name: torch.stack([found[row][f"{i}.{name}"] for row in rows]) for name in names}
                    check_tensors(block.mixer, tensors, like, f"what rows remember in layer {i}")
                values = iter([tensors[name] for name in names])
                device = next(block.parameters()).device
                restored = like.map(lambda _, values=values, device=device: next(values).to(device))
                held.restore(restored, seen[rows[0]])
