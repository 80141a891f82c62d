"""What happens beside the training step: the clock, held-out text, the log, the progress bar, Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
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
from atlas_memory.monitor.logs import SampleRecord, StepRecord
from atlas_memory.train.checkpoints import writing
from atlas_memory.train.finite import not_finite
from atlas_memory.train.processes import largest, process, processes


class Clock(TrainerCallback):
    """How much of the run is done, by steps or by minutes, whichever is further; stops the run when all
    is, and saves a checkpoint when the last one is `save_minutes` old."""

    def __init__(
        self, steps: int, max_minutes: float | None, elapsed: float = 0.0, save_minutes: float | None = None
    ) -> None:
        self.steps = steps
        self.limit = math.inf if max_minutes is None else 60 * max_minutes
        self._save_after = math.inf if save_minutes is None else 60 * save_minutes
        self._saved = elapsed
        self._before, self._start = elapsed, None
        self._shared = elapsed

    _start: float | None

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a resume included; the same in all processes, if there are several."""
        if processes() > 1:
            return self._shared
        return self._before + (0.0 if self._start is None else time.monotonic() - self._start)

    def _share_time(self) -> None:
        passed = 0.0 if self._start is None else time.monotonic() - self._start
        (self._shared,) = largest(self._before + passed)

    def share(self, step: int) -> float:
        return self.share_at(step, self.elapsed)

    def share_at(self, step: int, elapsed: float) -> float:
        return min(1.0, max(step / self.steps, elapsed / self.limit))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.monotonic()
        state.save_steps = int(args.save_steps)  # and not what it was when the run began

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._share_time()
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
        """Whether the step that has just ended is the last one for that."""
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
        self.interrupted = bool(largest(self.interrupted)[0])
        self.stopping = self.interrupted
        if self.stopping:
            control.should_training_stop = control.should_save = True


class AtStepEnd(TrainerCallback):
    """A look at the model when a step has ended; when the run is told to stop, its checkpoint is written first."""

    def __init__(self, interrupt: StopOnInterrupt) -> None:
        self._interrupt = interrupt

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._interrupt.stopping:
            self.look(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._interrupt.stopping:
            self.look(args, state, control)

    def look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        raise NotImplementedError


class HeldOut(AtStepEnd):
    """Reads held-out text every so many steps, and at the end: bits per byte of `streams` streams, always the same,
    `segments` times as long as a training example. The first process reads; all of them, if the model is `sharded`."""

    streams, segments = 8, 8

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        documents: Sequence[Document],
        seq_len: int,
        every: int,
        interrupt: StopOnInterrupt,
        sharded: bool = False,
    ) -> None:
        super().__init__(interrupt)
        self.model, self.tokenizer, self.length, self.every = model, tokenizer, self.segments * seq_len, every
        self.sharded = sharded
        # The beginnings of the longest ones are enough for the streams, and soon tokenised.
        longest = sorted(documents, key=lambda d: -len(d.text))[: self.streams]
        self.documents = [Document(d.name, d.text[: 64 * self.length]) for d in longest]
        self.bits: float | None = None
        """Of the step that has just ended; None where nothing was read."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bits = None

    def look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        step, last = state.global_step, control.should_training_stop or state.global_step == args.max_steps
        if not self.every or not (last or step % self.every == 0):
            return
        if process() == 0 or self.sharded:
            self.bits = bits_per_byte(
                self.model, self.tokenizer, self.documents, self.length, streams=self.streams
            ).overall
        (wrong,) = largest(self.bits is not None and not math.isfinite(self.bits))
        if wrong:
            raise not_finite("held-out text is read with a loss that is nan or inf", step, Path(str(args.output_dir)))


class Samples(AtStepEnd):
    """Writes `tokens` tokens with the model whenever held-out text was read: a line of `samples.jsonl` with step,
    prompt and text, and its beginning on the console.

    `prompt`: what the text begins with; None: the first `given` tokens of the held-out text.
    """

    given = 32

    def __init__(
        self,
        path: Path,
        held_out: HeldOut,
        tokens: int,
        prompt: str | None,
        console: Console,
        interrupt: StopOnInterrupt,
    ) -> None:
        super().__init__(interrupt)
        self.path, self.held_out, self.tokens, self.console = path, held_out, tokens, console
        tokenizer = held_out.tokenizer
        if prompt is None and tokens:
            text = next((document.text for document in held_out.documents), "")
            # A token is seldom more than 16 characters, and what a tokenizer makes of a cut word does no harm here.
            ids = encode(tokenizer, text[: 16 * self.given])[: self.given]
            prompt = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        self.prompt = prompt or ""

    def look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not self.tokens or self.held_out.bits is None:
            return
        model = self.held_out.model
        with eval_mode(model):  # in training mode, with activations recomputed, transformers generates without a cache
            text = sample(model, self.held_out.tokenizer, self.prompt, self.tokens)
        if process() > 0:
            return
        written = text.removeprefix(self.prompt)
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(SampleRecord(step=state.global_step, prompt=self.prompt, text=written).line())
        shown = " ".join(written.split())
        shown = shown if len(shown) <= 100 else f"{shown[:100]} ..."
        print_line(self.console, f"sample after step {state.global_step:,}: {shown}")


class JsonLog(TrainerCallback):
    """Appends one line a step to a file: step, loss (nats a token), learning rate, gradient norm, seconds; and bits per
    byte of held-out text where it was read."""

    def __init__(self, path: Path, clock: Clock, held_out: HeldOut) -> None:
        self.path, self.clock, self.held_out = path, clock, held_out
        self.last: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if not logs or "loss" not in logs:  # the summary at the end
            return
        self.last = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "elapsed": round(self.clock.elapsed, 3),
        }
        if self.held_out.bits is not None:
            self.last["held_out_bits_per_byte"] = self.held_out.bits
        self._write()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.held_out.bits is not None and "held_out_bits_per_byte" not in self.last:  # read after the checkpoint
            self.last["held_out_bits_per_byte"] = self.held_out.bits
            self._write()

    def _write(self) -> None:
        if process() == 0:
            with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(StepRecord.model_construct(**self.last).line())


class ProgressBar(TrainerCallback):
    """A bar over the share of the run that is done: steps, loss, tokens a second and the time that is left, and where
    there is room held-out bits a byte, time and learning rate; without a terminal a line of all that for the first
    step, every tenth of the run and every minute."""

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
        """The first of the parts, the most important ones, as many as the terminal has room for behind the bar."""
        room = self.console.width - self._bar_width - len(" 100%  ")
        text = parts[0]
        for part in filter(None, parts[1:]):
            if len(text) + 2 + len(part) > room:
                break
            text += f"  {part}"
        return text

    def _parts(self, step: int, share: float, now: float) -> tuple[str, ...]:
        """What is said, the most important first: step, loss, speed, time left, held-out text, time passed, rate."""
        last, (first, before) = self.log.last, self._began
        if "held_out_bits_per_byte" in last:
            self._held_out = f"held out {last['held_out_bits_per_byte']:.3f} bits/byte"
        speed = (step - first) * self.tokens_per_step / max(now - before, 1e-9)
        start = self.clock.share_at(first, before)
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
