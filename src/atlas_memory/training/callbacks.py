"""What happens beside the training step: the clock, the log, the progress bar, Ctrl-C."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from atlas_memory.training.processes import largest, process, processes


class Clock(TrainerCallback):
    """How much of the run is done, by steps or by minutes, whichever is further; stops the run when all
    is."""

    def __init__(self, steps: int, max_minutes: float | None, elapsed: float = 0.0) -> None:
        self.steps = steps
        self.limit = math.inf if max_minutes is None else 60 * max_minutes
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
        return min(1.0, max(step / self.steps, self.elapsed / self.limit))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._start = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._share_time()
        if self.share(state.global_step) >= 1:
            control.should_training_stop = control.should_save = True


class StopOnInterrupt(TrainerCallback):
    """The first Ctrl-C or SIGTERM finishes the step, saves a checkpoint and stops; the second is an ordinary one."""

    def __init__(self) -> None:
        self.interrupted = False
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
        if self.interrupted:
            control.should_training_stop = control.should_save = True


class JsonLog(TrainerCallback):
    """Appends one line a step to a file: step, loss (nats a token), learning rate, gradient norm, seconds."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path, self.clock = path, clock
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
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"the loss is {logs['loss']} at step {state.global_step}: lower train.learning_rate, "
                "or look for damaged text; earlier checkpoints are kept"
            )
        self.last = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "elapsed": round(self.clock.elapsed, 3),
        }
        if process() > 0:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.last) + "\n")


class ProgressBar(TrainerCallback):
    """A bar over the share of the run that is done; without a terminal, a plain line at every tenth."""

    def __init__(self, clock: Clock, log: JsonLog, console: Console) -> None:
        self.clock, self.log, self.console = clock, log, console
        self._tenth = 0
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0, text="")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._tenth = int(10 * self.clock.share(state.global_step))
        self._bar.start()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.log.last.get("step") != state.global_step:
            return
        share = self.clock.share(state.global_step)
        text = f"step {state.global_step}  loss {self.log.last['loss']:.3f}"
        self._bar.update(self._task, completed=share, text=text)
        if not self.console.is_terminal and int(10 * share) > self._tenth:
            self._tenth = int(10 * share)
            self.console.print(f"training {share:4.0%}  {text}  {self.log.last['elapsed']:.0f} s", highlight=False)

    def close(self) -> None:
        self._bar.stop()
