"""What happens beside the training step: the clock, evaluation, samples, logs, the progress bar, Ctrl-C; and the end
of a run that no longer computes with finite numbers."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atlas_memory.console import print_line
from atlas_memory.data import Document
from atlas_memory.data.tokenization import encode
from atlas_memory.eval.perplexity import bits_per_byte
from atlas_memory.eval.sampling import sample
from atlas_memory.monitor.hooks import eval_mode
from atlas_memory.monitor.logs import SAMPLES, Record, SampleRecord, StepRecord
from atlas_memory.train.checkpoint import newest_step, writing
from atlas_memory.train.config import RunConfig
from atlas_memory.train.distributed import all_reduce_max, rank, world_size
from atlas_memory.train.training_data import TrainingData


def check_finite(step: int, folder: Path, loss: float, norm: float) -> None:
    """ValueError in all processes, which all must call, unless loss and gradient norm are finite, before ``step``
    (counted from 1) changes the weights."""
    wrong = all_reduce_max(math.isnan(loss), math.isinf(loss), math.isnan(norm), math.isinf(norm))
    told = ("the loss is nan", "the loss is inf", "the norm of the gradient is nan", "the norm of the gradient is inf")
    for what, found in zip(told, wrong, strict=True):
        if found and step == 1:
            raise ValueError(
                f"{what} at step 1, before any weight has changed, so that train.learning_rate is not the cause: look "
                "at the rule (raw inner steps, or a part of your own whose memory diverges), at the weights that it "
                "began with, or for damaged text"
            )
        if found:
            raise not_finite(what, step, folder)


def not_finite(what: str, step: int, folder: Path) -> ValueError:
    """The error that ends a run, which cannot be resumed with another learning rate."""
    last = newest_step(folder)
    first = "" if last < 0 else f" (model.init_from={folder / f'checkpoint-{last}'} starts from the last good weights)"
    return ValueError(
        f"{what} at step {step}: lower train.learning_rate in a run with another output_dir{first}, or look for "
        "damaged text; nothing was saved of this step, and earlier checkpoints are kept"
    )


def append(path: Path, record: Record) -> None:
    """Append a line to a log."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(record.line())


class Clock(TrainerCallback):
    """How much of the run is done, by steps or by minutes, whichever is further. It stops the run at its end, and saves
    a checkpoint when the last one is `save_minutes` old."""

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
        """Seconds of training, those before a resume included; the same in all processes, if there are several."""
        return self._agreed if world_size() > 1 else self._own

    @property
    def _own(self) -> float:
        return self._before + (0.0 if self._start is None else time.monotonic() - self._start)

    def share(self, step: int, elapsed: float | None = None) -> float:
        """The share of the run that is done after a step (and so many seconds; None: now)."""
        return min(1.0, max(step / self.steps, (self.elapsed if elapsed is None else elapsed) / self.limit))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.monotonic()
        state.save_steps = int(args.save_steps)  # and not what it was when the run began

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        (self._agreed,) = all_reduce_max(self._own)
        if self.elapsed - self._saved >= self._save_after:
            control.should_save = True
        if self.share(state.global_step) >= 1:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = self.elapsed


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C or SIGTERM finishes the step, saves a checkpoint and stops; the second is an ordinary one."""

    def __init__(self) -> None:
        self.interrupted = False
        self.stopping = False
        """Whether the step that has just ended is the last one because of the interrupt."""
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
    """What is done with the model after a step; when the run is interrupted, its checkpoint is written first."""

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
        # The beginnings of the longest ones are enough for the streams, and soon tokenised.
        longest = sorted(data.held_out, key=lambda d: -len(d.text))[: self.streams]
        self.documents = [Document(d.name, d.text[: 64 * self.length]) for d in longest]
        self.bits: float | None = None
        """Of the step that has just ended; None if it was not evaluated."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bits = None

    def after_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        step, last = state.global_step, control.should_training_stop or state.global_step == args.max_steps
        if not self.every or not (last or step % self.every == 0):
            return
        if rank() == 0 or self.sharded:
            self.bits = bits_per_byte(
                self.model, self.tokenizer, self.documents, self.length, streams=self.streams
            ).overall
        (wrong,) = all_reduce_max(self.bits is not None and not math.isfinite(self.bits))
        if wrong:
            raise not_finite("held-out text is read with a loss that is nan or inf", step, Path(str(args.output_dir)))


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
            # A token is seldom more than 16 characters, and what a tokenizer makes of a cut word does no harm here.
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
        shown = " ".join(written.split())
        print_line(self.console, f"sample after step {state.global_step:,}: {shown[:100]}{' ...' * (len(shown) > 100)}")


class JsonLog(TrainerCallback):
    """A line a step: step, loss (nats a token), learning rate, gradient norm, seconds; and bits per byte of held-out
    text after an evaluation."""

    def __init__(self, path: Path, clock: Clock, evaluation: Evaluation) -> None:
        self.path, self.clock, self.evaluation = path, clock, evaluation
        self.last: dict[str, Any] = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if not logs or "loss" not in logs:  # the summary at the end
            return
        self.last = {"step": state.global_step} | {name: logs[name] for name in ("loss", "learning_rate", "grad_norm")}
        self.last["elapsed"] = round(self.clock.elapsed, 3)
        if self.evaluation.bits is not None:
            self.last["held_out_bits_per_byte"] = self.evaluation.bits
        self._write()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if (
            self.evaluation.bits is not None and "held_out_bits_per_byte" not in self.last
        ):  # evaluated after the checkpoint
            self.last["held_out_bits_per_byte"] = self.evaluation.bits
            self._write()

    def _write(self) -> None:
        if rank() == 0:
            append(self.path, StepRecord.model_construct(None, **self.last))


class ProgressBar(TrainerCallback):
    """A bar over the share of the run that is done, with as many figures as the terminal has room for; without a
    terminal a line of all figures for the first step, every tenth of the run, every minute and every evaluation."""

    def __init__(self, clock: Clock, log: JsonLog, console: Console, tokens_per_step: int) -> None:
        self.clock, self.log, self.console, self.tokens_per_step = clock, log, console, tokens_per_step
        self._tenth, self._printed, self._shown, self._held_out = 0, -math.inf, -1, ""
        self._began = (0, 0.0)
        self._bar_width = 4 if console.width < 100 else 20
        self._bar = Progress(
            BarColumn(self._bar_width),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}", table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0, text="")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._tenth = int(10 * self.clock.share(state.global_step))
        self._began = (state.global_step, self.clock.elapsed)
        self._bar.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.log.last.get("step") != state.global_step or self._shown == state.global_step:
            return
        self._shown = state.global_step
        share, now = self.clock.share(state.global_step), self.clock.elapsed
        parts = self._parts(state.global_step, share, now)
        if self.console.is_terminal:
            self._bar.update(self._task, completed=share, text=self._fitting(parts))
            return
        if int(10 * share) > self._tenth or now - self._printed >= 60 or "held_out_bits_per_byte" in self.log.last:
            self._tenth, self._printed = int(10 * share), now
            step, loss, speed, left, held_out, passed, rate = parts
            text = "  ".join(filter(None, (step, f"{loss} nats/token", held_out, speed, rate, f"{passed}, {left}")))
            print_line(self.console, f"training {share:4.0%}  {text}")

    def _fitting(self, parts: tuple[str, ...]) -> str:
        kept, room = list(filter(None, parts)), self.console.width - self._bar_width - len(" 100%  ")
        while len("  ".join(kept)) > room and len(kept) > 1:
            kept.pop()
        return "  ".join(kept)

    def _parts(self, step: int, share: float, now: float) -> tuple[str, ...]:
        """The most important first."""
        last, (first, before) = self.log.last, self._began
        if "held_out_bits_per_byte" in last:
            self._held_out = f"held out {last['held_out_bits_per_byte']:.3f} bits/byte"
        speed = (step - first) * self.tokens_per_step / max(now - before, 1e-9)
        start = self.clock.share(first, before)
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
