"""What the memories of a model do during its training, and the alarm when they are of no use."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from atlas_memory.console import print_line
from atlas_memory.data import Document
from atlas_memory.data.tokenization import encode
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.monitor import Alarm, alarms, effective_remembrance, summarise, trace
from atlas_memory.monitor.watching import memories
from atlas_memory.train import sharded
from atlas_memory.train.callbacks import AtStepEnd, StopOnInterrupt
from atlas_memory.train.checkpoints import writing
from atlas_memory.train.logs import MEMORY, read_log
from atlas_memory.train.logs import line as log_line
from atlas_memory.train.processes import process

OnAlarm = Callable[[int, Alarm], None]
"""What is told of an alarm: the step after which it was raised, and what is wrong."""


class MemoryWatch(AtStepEnd):
    """Looks at every memory of a model every so many steps: a line of ``memory.jsonl`` with what ``summarise`` says of
    a ``trace`` over the beginnings of held-out texts, always the same, and with the effective remembrance beyond
    ``back`` tokens. What is wrong in two looks in a row is an alarm: a line on the console, a POST to ``webhook`` and a
    call of ``on_alarm``, once until it is over.

    The first process looks. Of a ``sharded`` model all processes bring the weights together, and it looks at a copy.

    Args:
        path: of ``memory.jsonl``; what it has is gone on from.
        every: steps between looks; 0: none.
        tokens_per_step: of training; a look reads half as many, and at most ``rows`` x ``length``.
        interrupt: tells when the run is about to stop, so that its checkpoint is written before the look.
        webhook: an address that is told of alarms, as JSON with ``step``, ``run``, ``kind``, ``memory`` and ``text``.
    """

    rows, length, piece, back = 2, 512, 256, 128

    def __init__(
        self,
        path: Path,
        model: Any,
        tokenizer: Any,
        documents: Sequence[Document],
        every: int,
        tokens_per_step: int,
        console: Console,
        interrupt: StopOnInterrupt,
        webhook: str | None = None,
        sharded: bool = False,
        on_alarm: OnAlarm | None = None,
    ) -> None:
        self.path, self.model, self.console, self.webhook, self.sharded = path, model, console, webhook, sharded
        self.on_alarm = on_alarm
        super().__init__(interrupt)
        length = max(64, min(self.length, tokens_per_step // 2))
        texts = [encode(tokenizer, d.text[: 16 * length])[:length] for d in documents]
        longest = max(map(len, texts), default=0)
        rows = max(1, min(self.rows, tokens_per_step // (2 * length)))
        chosen = [ids for ids in texts if len(ids) == longest][:rows]
        self.ids = torch.from_numpy(np.stack(chosen).astype(np.int64)) if longest else None
        self.every = every if longest and memories(model) else 0
        self._suspected: set[tuple[str, str]] = set()  # in the last look
        self._raised: set[tuple[str, str]] = set()
        self._untold: set[tuple[str, str]] = set()
        self.figures: dict[str, float] = {}
        """Of the step that has just ended, for those who draw curves: of each memory, means over its heads."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        lines = read_log(self.path.parent, MEMORY)
        if lines:
            self._suspected, self._raised = _keys(lines[-1].get("suspected", ())), _keys(lines[-1].get("alarms", ()))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.figures = {}

    def look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not self.every or state.global_step % self.every:
            return
        begun = time.perf_counter()
        weights = sharded.whole_weights(self.model) if self.sharded else None
        if process() > 0:
            return
        model = self.model
        if weights is not None:
            model = _whole(model.config, weights)
        line = self._look(model)
        self.figures = _figures(line)
        line["alarms"] = [alarm for alarm in line["suspected"] if _key(alarm) in self._suspected]
        line = {"step": state.global_step, "seconds": round(time.perf_counter() - begun, 3), **line}
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(log_line(line))
        for alarm in line["alarms"]:
            if _key(alarm) not in self._raised:
                self._raise(state.global_step, alarm)
            elif _key(alarm) in self._untold:  # whoever listens did not, the last time
                self._tell(state.global_step, alarm)
        self._suspected, self._raised = _keys(line["suspected"]), _keys(line["alarms"])

    def _look(self, model: Any) -> dict[str, Any]:
        assert self.ids is not None
        summary = summarise(trace(model, self.ids, piece=self.piece))
        long = self.ids.shape[1] > 2 * self.back
        remembered = effective_remembrance(model, self.ids, self.back, self.piece) if long else None
        suspected = [{"kind": a.kind, "memory": a.name, "text": a.text} for a in alarms(summary)]
        return {"remembrance": remembered, "back": self.back, **summary, "suspected": suspected}

    def _raise(self, step: int, alarm: dict[str, str]) -> None:
        text = f"memory alarm after step {step:,}: {alarm['text']}"
        print_line(self.console, text, style="bold red")
        self._tell(step, alarm)
        if self.on_alarm is not None:
            self.on_alarm(step, Alarm(alarm["kind"], alarm["memory"], alarm["text"]))

    def _tell(self, step: int, alarm: dict[str, str]) -> None:
        if self.webhook is None:
            return
        self._untold.discard(_key(alarm))
        body = json.dumps({"step": step, "run": str(self.path.parent), **alarm}).encode()
        try:
            request = urllib.request.Request(self.webhook, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
        except (OSError, HTTPException, ValueError) as error:  # training does not end for want of a listener
            self._untold.add(_key(alarm))
            text = f"train.alarm_webhook={self.webhook!r} could not be told: {error}; it is told after the next look"
            print_line(self.console, text)


def _whole(config: Any, weights: dict[str, Any]) -> AtlasForCausalLM:
    """A model of these weights, without those that are tied to others."""
    with torch.device("meta"):  # where nothing is drawn, which takes long
        model = AtlasForCausalLM(config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):  # a block's own, and not saved
        with torch.random.fork_rng(devices=[]):  # training must not notice
            model = AtlasForCausalLM(config)
        model.load_state_dict(weights, strict=False)
    return model


def _figures(line: dict[str, Any]) -> dict[str, float]:
    """The line of a look, one number for each figure of each memory: "memory/model.layers.0.mixer/share" and so on."""
    found = {} if line["remembrance"] is None else {"memory/remembrance": line["remembrance"]}
    for memory in line["memories"]:
        errors = {f"error {lag}": error for lag, error in zip(line["lags"], memory["error"], strict=True)}
        for name, value in (memory | errors).items():
            if name in ("name", "error"):
                continue
            values = value["mean"] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            known = [x for x in values if x is not None]
            if known:
                found[f"memory/{memory['name']}/{name}"] = sum(known) / len(known)
    return found


def _key(alarm: dict[str, str]) -> tuple[str, str]:
    return alarm["kind"], alarm["memory"]


def _keys(found: list[dict[str, str]]) -> set[tuple[str, str]]:
    return set(map(_key, found))
