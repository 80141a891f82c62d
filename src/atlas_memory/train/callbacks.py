"""Callbacks of the trainer: the clock, Ctrl-C, evaluation, samples, probes and alarms, logs, the progress bar."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atlas_memory.console import print_line
from atlas_memory.data import Document
from atlas_memory.data.tokenization import encode
from atlas_memory.eval.perplexity import bits_per_byte
from atlas_memory.eval.sampling import sample
from atlas_memory.models import AtlasForCausalLM
from atlas_memory.monitor import Alarm, alarms, effective_remembrance, summarise, trace
from atlas_memory.monitor.hooks import eval_mode, memory_layers
from atlas_memory.monitor.logs import MEMORY, SAMPLES, ProbeRecord, Record, SampleRecord, StepRecord, read_log
from atlas_memory.monitor.tracing import LAGS
from atlas_memory.train.checkpoint import newest_step, writing
from atlas_memory.train.config import RunConfig
from atlas_memory.train.distributed import all_reduce_max, gather_weights, rank, world_size
from atlas_memory.train.training_data import TrainingData


def check_finite(step: int, folder: Path, loss: float, norm: float) -> None:
    """ValueError unless loss and gradient norm are finite, before ``step`` (from 1) changes the weights. All processes
    must call."""
    names = ("loss is nan", "loss is inf", "norm of the gradient is nan", "norm of the gradient is inf")
    wrong = all_reduce_max(math.isnan(loss), math.isinf(loss), math.isnan(norm), math.isinf(norm))
    for name, found in zip(names, wrong, strict=True):
        if found and step == 1:
            raise ValueError(
                f"the {name} at step 1, before any weight has changed: check the rule (raw inner steps, or a part of "
                "your own that diverges), the first weights and the text"
            )
        if found:
            raise not_finite(f"the {name}", step, folder)


def not_finite(what: str, step: int, folder: Path) -> ValueError:
    """The error that ends a run with numbers that are not finite."""
    last = newest_step(folder)
    first = "" if last < 0 else f" (model.init_from={folder / f'checkpoint-{last}'} starts from the last good weights)"
    return ValueError(
        f"{what} at step {step}: lower train.learning_rate in a run with another output_dir{first}, or look for "
        "damaged text; nothing was saved of this step, and earlier checkpoints are kept"
    )


def append(path: Path, record: Record) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(record.line())


class Clock(TrainerCallback):
    """The progress of a run, by steps or by minutes, whichever is further. It stops the run at its end, and saves a
    checkpoint when the last one is `save_minutes` old."""

    def __init__(
        self, steps: int, max_minutes: float | None, elapsed: float = 0.0, save_minutes: float | None = None
    ) -> None:
        self.steps = steps
        self.limit = math.inf if max_minutes is None else 60 * max_minutes
        self._save_after = math.inf if save_minutes is None else 60 * save_minutes
        self._saved = self._before = self._agreed = elapsed
        self._start: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of training, earlier sessions included; equal in all processes."""
        return self._agreed if world_size() > 1 else self._own

    @property
    def _own(self) -> float:
        return self._before + (0.0 if self._start is None else time.monotonic() - self._start)

    def progress(self, step: int, elapsed: float | None = None) -> float:
        """The fraction of the run that is done after a step (and so many seconds; None: now)."""
        return min(1.0, max(step / self.steps, (self.elapsed if elapsed is None else elapsed) / self.limit))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.monotonic()
        state.save_steps = int(args.save_steps)  # a resumed run may have another

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        (self._agreed,) = all_reduce_max(self._own)
        if self.elapsed - self._saved >= self._save_after:
            control.should_save = True
        if self.progress(state.global_step) >= 1:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = self.elapsed


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C or SIGTERM finishes the step, saves a checkpoint and stops; the second is an ordinary one."""

    def __init__(self) -> None:
        self.interrupted = False
        self.stopping = False
        """Whether the step that has just ended is the last because of the interrupt."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        self.interrupted = True
        signal.signal(number, self._previous[number])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.interrupted = bool(all_reduce_max(self.interrupted)[0])
        self.stopping = self.interrupted
        if self.stopping:
            control.should_training_stop = control.should_save = True


class AfterStep(TrainerCallback):
    """Work after a step; when the run is interrupted, its checkpoint is written first."""

    def __init__(self, interrupt: StopOnInterrupt) -> None:
        self._interrupt = interrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._interrupt.stopping:
            self.after_step(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._interrupt.stopping:
            self.after_step(args, state, control)

    def after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None: ...


class Evaluation(AfterStep):
    """Bits per byte of held-out text every so many steps, and at the end: of `streams` streams, always the same,
    `segments` times as long as a training example. The first process evaluates; with FSDP, all of them."""

    streams, segments = 8, 8

    def __init__(self, config: RunConfig, model: Any, data: TrainingData, interrupt: StopOnInterrupt) -> None:
        super().__init__(interrupt)
        self.model, self.tokenizer, self.length = model, data.tokenizer, self.segments * config.data.longest
        self.every, self.sharded = config.train.evaluate_every, config.train.fsdp
        longest = sorted(data.held_out, key=lambda d: -len(d.text))[: self.streams]
        self.documents = [Document(d.name, d.text[: 64 * self.length]) for d in longest]
        self.bits: float | None = None
        """Of the last step; None if it was not evaluated."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bits = None

    def after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        step, last = state.global_step, control.should_training_stop or state.global_step == args.max_steps
        if not self.every or not (last or step % self.every == 0):
            return
        if rank() == 0 or self.sharded:
            score = bits_per_byte(self.model, self.tokenizer, self.documents, self.length, streams=self.streams)
            self.bits = score.overall
        (wrong,) = all_reduce_max(self.bits is not None and not math.isfinite(self.bits))
        if wrong:
            raise not_finite("the loss of held-out text is not finite", step, Path(str(args.output_dir)))


class Samples(AfterStep):
    """Generates `train.sample_tokens` tokens after each evaluation: a line of `samples.jsonl`, and its beginning on the
    console. Without `train.prompt` they follow the first `given` tokens of the held-out text."""

    given = 32

    def __init__(self, config: RunConfig, evaluation: Evaluation, interrupt: StopOnInterrupt, console: Console) -> None:
        super().__init__(interrupt)
        self.path, self.tokens = Path(config.output_dir) / SAMPLES, config.train.sample_tokens
        self.evaluation, self.console = evaluation, console
        prompt, tokenizer = config.train.prompt, evaluation.tokenizer
        if prompt is None and self.tokens:
            text = next((document.text for document in evaluation.documents), "")
            # A token has seldom more than 16 characters.
            ids = encode(tokenizer, text[: 16 * self.given])[: self.given]
            prompt = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        self.prompt = prompt or ""

    def after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not self.tokens or self.evaluation.bits is None:
            return
        model = self.evaluation.model
        with eval_mode(model):  # in training mode, with activations recomputed, transformers generates without a cache
            text = sample(model, self.evaluation.tokenizer, self.prompt, self.tokens)
        if rank() > 0:
            return
        written = text.removeprefix(self.prompt)
        append(self.path, SampleRecord(step=state.global_step, prompt=self.prompt, text=written))
        line = " ".join(written.split())
        print_line(self.console, f"sample after step {state.global_step:,}: {line[:100]}{' ...' * (len(line) > 100)}")


OnAlarm = Callable[[int, Alarm], None]
"""Called with the step and the alarm."""


class MemoryProbe(AfterStep):
    """Probes every memory on held-out text every `train.probe_every` steps: a line of ``memory.jsonl``.

    What is wrong in two probes in a row is an alarm: a line on the console, a POST to `train.alarm_webhook` (JSON with
    ``step``, ``run``, ``kind``, ``memory`` and ``text``) and a call of ``on_alarm``, once until it is over. The first
    process probes; of a sharded model all gather the weights, and it probes a copy. A probe reads half as many tokens
    as a training step, and at most ``rows`` x ``length``.
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
        self.metrics: dict[str, float] = {}
        """Of the last step, for `train.report_to`."""

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
        self._suspected, self._raised = {a.key for a in probe.suspected}, {a.key for a in probe.alarms}

    def _probe(self, step: int, model: Any) -> ProbeRecord:
        assert self.ids is not None
        memories = summarise(trace(model, self.ids, piece=self.piece))
        suspected = alarms(memories)
        return ProbeRecord(
            step=step,
            seconds=0.0,
            effective_remembrance=effective_remembrance(model, self.ids, self.recent, self.piece)
            if self.ids.shape[1] > 2 * self.recent
            else None,
            recent=self.recent,
            lags=list(LAGS),
            memories=memories,
            suspected=suspected,
            alarms=[alarm for alarm in suspected if alarm.key in self._suspected],
        )

    def _raise(self, step: int, alarm: Alarm) -> None:
        print_line(self.console, f"memory alarm after step {step:,}: {alarm.text}", style="bold red")
        if self.run.alarm_webhook is not None:
            self._send(self.run.alarm_webhook, step, alarm)
        if self.on_alarm is not None:
            self.on_alarm(step, alarm)

    def _send(self, url: str, step: int, alarm: Alarm) -> None:
        body = json.dumps({"step": step, "run": str(self.path.parent), **alarm.model_dump()}).encode()
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=10).close()
        except (OSError, HTTPException, ValueError) as error:  # training goes on without a listener
            print_line(self.console, f"train.alarm_webhook={url!r} failed: {error}")


def _gathered(config: Any, weights: dict[str, Any]) -> AtlasForCausalLM:
    with torch.device("meta"):
        model = AtlasForCausalLM(config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):  # buffers that are not saved
        with torch.random.fork_rng(devices=[]):
            model = AtlasForCausalLM(config)
        model.load_state_dict(weights, strict=False)
    return model


def _metrics(probe: ProbeRecord) -> dict[str, float]:
    """Means over heads, such as "memory/model.layers.0.mixer/memory_contribution"."""
    remembered = probe.effective_remembrance
    found = {} if remembered is None else {"memory/effective_remembrance": remembered}
    for memory in probe.memories:
        for name, values in memory.by_head(probe.lags).items():
            known = [x for x in values if x is not None]
            if known:
                found[f"memory/{memory.name}/{name}"] = sum(known) / len(known)
    return found


class JsonLog(TrainerCallback):
    """Writes log.jsonl: a `StepRecord` for each step."""

    def __init__(self, path: Path, clock: Clock, evaluation: Evaluation) -> None:
        self.path, self.clock, self.evaluation = path, clock, evaluation
        self.last: dict[str, Any] = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if not logs or "loss" not in logs:  # Trainer's summary at the end
            return
        self.last = {"step": state.global_step} | {name: logs[name] for name in ("loss", "learning_rate", "grad_norm")}
        self.last["elapsed"] = round(self.clock.elapsed, 3)
        if self.evaluation.bits is not None:
            self.last["held_out_bits_per_byte"] = self.evaluation.bits
        self._write()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.evaluation.bits is not None and "held_out_bits_per_byte" not in self.last:  # evaluated after saving
            self.last["held_out_bits_per_byte"] = self.evaluation.bits
            self._write()

    def _write(self) -> None:
        if rank() == 0:
            append(self.path, StepRecord.model_construct(None, **self.last))


class ProgressBar(TrainerCallback):
    """A progress bar with as many figures as the terminal has room for; without a terminal a line of all figures for
    the first step, every tenth of the run, every minute and every evaluation."""

    def __init__(self, clock: Clock, log: JsonLog, console: Console, tokens_per_step: int) -> None:
        self.clock, self.log, self.console, self.tokens_per_step = clock, log, console, tokens_per_step
        self._tenth, self._printed, self._logged, self._held_out = 0, -math.inf, -1, ""
        self._began = (0, 0.0)
        self._bar = Progress(
            BarColumn(4 if console.width < 100 else 20),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0, text="")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._tenth = int(10 * self.clock.progress(state.global_step))
        self._began = (state.global_step, self.clock.elapsed)
        self._bar.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.log.last.get("step") != state.global_step or self._logged == state.global_step:
            return
        self._logged = state.global_step
        share, now = self.clock.progress(state.global_step), self.clock.elapsed
        figures = self._figures(state.global_step, share, now)
        if self.console.is_terminal:
            self._bar.update(self._task, completed=share, text="  ".join(filter(None, figures)))
        elif int(10 * share) > self._tenth or now - self._printed >= 60 or "held_out_bits_per_byte" in self.log.last:
            self._tenth, self._printed = int(10 * share), now
            step, loss, speed, left, held_out, passed, rate = figures
            text = "  ".join(filter(None, (step, f"{loss} nats/token", held_out, speed, rate, f"{passed}, {left}")))
            print_line(self.console, f"training {share:4.0%}  {text}")

    def _figures(self, step: int, share: float, now: float) -> tuple[str, ...]:
        """The most important first: a narrow terminal cuts the others off."""
        last, (first, before) = self.log.last, self._began
        if "held_out_bits_per_byte" in last:
            self._held_out = f"held out {last['held_out_bits_per_byte']:.3f} bits/byte"
        speed = (step - first) * self.tokens_per_step / max(now - before, 1e-9)
        start = self.clock.progress(first, before)
        left = (now - before) * (1 - share) / max(share - start, 1e-9)
        return (
            f"step {step:,}{'' if self.clock.limit < math.inf else f' of {self.clock.steps:,}'}",
            f"loss {last['loss']:.3f}",
            f"{speed:,.0f} tokens/s",
            f"{_time(left)} left",
            self._held_out,
            f"{_time(now)} passed",
            f"rate {last['learning_rate']:.1e}",
        )

    def close(self) -> None:
        self._bar.stop()


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
