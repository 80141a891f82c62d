"""Probes of the memories during training, and alarms when they stop being useful."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

from atlas_memory.console import print_line
from atlas_memory.data.tokenization import encode
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.monitor import Alarm, alarms, effective_remembrance, summarise, trace
from atlas_memory.monitor.hooks import memory_layers
from atlas_memory.monitor.logs import MEMORY, ProbeRecord, read_log
from atlas_memory.monitor.tracing import LAGS
from atlas_memory.train.callbacks import AfterStep, Evaluation, StopOnInterrupt, append
from atlas_memory.train.config import RunConfig
from atlas_memory.train.distributed import gather_weights, rank

OnAlarm = Callable[[int, Alarm], None]
"""What is called with an alarm and the step after which it was raised."""


class MemoryProbe(AfterStep):
    """Probes every memory of a model every `train.probe_every` steps, on the beginnings of held-out texts, always the
    same: a line of ``memory.jsonl``. What is wrong in two probes in a row is an alarm: a line on the console, a POST to
    `train.alarm_webhook` (JSON with ``step``, ``run``, ``kind``, ``memory`` and ``text``) and a call of ``on_alarm``,
    once until it is over.

    The first process probes; of a sharded model all processes gather the weights, and it probes a copy. A probe reads
    half as many tokens as a training step, and at most ``rows`` x ``length``. ``interrupt`` tells when the run is about
    to stop, so that its checkpoint is written before the probe.
    """

    rows, length, piece, recent = 2, 512, 256, 128

    def __init__(
        self,
        config: RunConfig,
        evaluation: Evaluation,
        tokens_per_step: int,
        interrupt: StopOnInterrupt,
        console: Console,
        on_alarm: OnAlarm | None = None,
    ) -> None:
        super().__init__(interrupt)
        self.path, self.run, self.model = Path(config.output_dir) / MEMORY, config.train, evaluation.model
        self.console, self.on_alarm = console, on_alarm
        length = max(64, min(self.length, tokens_per_step // 2))
        texts = [encode(evaluation.tokenizer, d.text[: 16 * length])[:length] for d in evaluation.documents]
        longest = max(map(len, texts), default=0)
        rows = max(1, min(self.rows, tokens_per_step // (2 * length)))
        chosen = [ids for ids in texts if len(ids) == longest][:rows]
        self.ids = torch.from_numpy(np.stack(chosen).astype(np.int64)) if longest else None
        self.every = self.run.probe_every if longest and memory_layers(self.model) else 0
        self._suspected: set[tuple[str, str]] = set()  # in the last probe
        self._raised: set[tuple[str, str]] = set()
        self._unsent: set[tuple[str, str]] = set()
        self.metrics: dict[str, float] = {}
        """Of the step that has just ended, for `train.report_to`: of each memory, means over its heads."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for last in read_log(self.path.parent, MEMORY)[-1:]:
            self._suspected, self._raised = {a.key for a in last.suspected}, {a.key for a in last.alarms}

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.metrics = {}

    def after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not self.every or state.global_step % self.every:
            return
        begun = time.perf_counter()
        weights = gather_weights(self.model) if self.run.fsdp else None
        if rank() > 0:
            return
        model = self.model if weights is None else _gathered(self.model.config, weights)
        probe = self._probe(state.global_step, model)
        probe.seconds = round(time.perf_counter() - begun, 3)
        self.metrics = _metrics(probe)
        append(self.path, probe)
        for alarm in probe.alarms:
            if alarm.key not in self._raised:
                self._raise(probe.step, alarm)
            elif alarm.key in self._unsent:
                self._send(probe.step, alarm)
        self._suspected, self._raised = {a.key for a in probe.suspected}, {a.key for a in probe.alarms}

    def _probe(self, step: int, model: Any) -> ProbeRecord:
        assert self.ids is not None
        memories = summarise(trace(model, self.ids, piece=self.piece))
        long = self.ids.shape[1] > 2 * self.recent
        suspected = alarms(memories)
        return ProbeRecord(
            step=step,
            seconds=0.0,
            effective_remembrance=effective_remembrance(model, self.ids, self.recent, self.piece) if long else None,
            recent=self.recent,
            lags=list(LAGS),
            memories=memories,
            suspected=suspected,
            alarms=[alarm for alarm in suspected if alarm.key in self._suspected],
        )

    def _raise(self, step: int, alarm: Alarm) -> None:
        print_line(self.console, f"memory alarm after step {step:,}: {alarm.text}", style="bold red")
        self._send(step, alarm)
        if self.on_alarm is not None:
            self.on_alarm(step, alarm)

    def _send(self, step: int, alarm: Alarm) -> None:
        if self.run.alarm_webhook is None:
            return
        self._unsent.discard(alarm.key)
        body = json.dumps({"step": step, "run": str(self.path.parent), **alarm.model_dump()}).encode()
        try:
            request = urllib.request.Request(self.run.alarm_webhook, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
        except (OSError, HTTPException, ValueError) as error:  # training does not end for want of a listener
            self._unsent.add(alarm.key)
            print_line(
                self.console,
                f"train.alarm_webhook={self.run.alarm_webhook!r} failed: {error}; retried after the next probe",
            )


def _gathered(config: Any, weights: dict[str, Any]) -> AtlasForCausalLM:
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


def _metrics(probe: ProbeRecord) -> dict[str, float]:
    """A probe, one number for each measure: "memory/model.layers.0.mixer/memory_contribution" and so on."""
    remembered = probe.effective_remembrance
    found = {} if remembered is None else {"memory/effective_remembrance": remembered}
    for memory in probe.memories:
        for name, values in memory.by_head(probe.lags).items():
            known = [x for x in values if x is not None]
            if known:
                found[f"memory/{memory.name}/{name}"] = sum(known) / len(known)
    return found
