"""One training run, on transformers' Trainer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from atlas_memory.console import print_line
from atlas_memory.data import Segments
from atlas_memory.layers.omega_memory import set_execution
from atlas_memory.models import PRESETS, AtlasForCausalLM
from atlas_memory.monitor.logs import LOG, MEMORY, SAMPLES, cut_logs, so_far
from atlas_memory.train import sharded
from atlas_memory.train.arguments import arguments_of
from atlas_memory.train.callbacks import Clock, HeldOut, JsonLog, ProgressBar, Samples, StopOnInterrupt
from atlas_memory.train.carried import CarriedStates
from atlas_memory.train.checkpoints import SAVING, checkpoint_to_resume, number, publish, writing
from atlas_memory.train.checks import check_folder, check_needs, check_run, clear_start, describe, only_run, usable
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.examples import Examples, Text, batches, collate
from atlas_memory.train.finished import padded, save_again, save_model
from atlas_memory.train.finite import check_finite, finite, not_finite
from atlas_memory.train.loaded import random_state, read_state
from atlas_memory.train.memory_probe import MemoryProbe, OnAlarm
from atlas_memory.train.muon import MuonAndAdamW, muon_groups
from atlas_memory.train.optimisers import M3, m3_groups
from atlas_memory.train.periods import MultiPeriod, split_by_period
from atlas_memory.train.processes import largest, process, processes
from atlas_memory.train.rates import split_by_rate
from atlas_memory.train.runs import (
    check_fit,
    check_gates,
    check_growth,
    first_model,
    model_config,
    saved_config,
)


@dataclass(frozen=True)
class Outcome:
    """What a call to `train` did: the step reached, the last loss (nats a token) and the seconds in all."""

    folder: Path
    steps: int
    loss: float
    seconds: float
    interrupted: bool


def train(
    config: RunConfig, resume: bool = False, console: Console | None = None, on_alarm: OnAlarm | None = None
) -> Outcome:
    """Train as `config` says and leave model, tokenizer, `run.yaml`, `log.jsonl` and checkpoints in
    `output_dir`.

    A folder that holds anything is refused, except for what a run leaves that fails in its first step: that is begun
    again. With `resume` the newest intact checkpoint in the folder is continued (the beginning if there is none).
    Everything that can be wrong is checked before a file is written:
    ValueError. `on_alarm` is called with the step and the alarm when a memory has stopped to be of use; what it raises
    ends the run.
    """
    console = console or Console(stderr=True, quiet=process() > 0)
    folder = Path(config.output_dir)
    if process() == 0:
        check_folder(folder, config, resume)
    check_run(config)
    with ExitStack() as held:
        if resume:
            held.enter_context(only_run(folder))
        return _locked(config, folder, resume, console, on_alarm, held)


def _locked(
    config: RunConfig, folder: Path, resume: bool, console: Console, on_alarm: OnAlarm | None, held: ExitStack
) -> Outcome:
    """`_train`, with the lock of the folder in `held` if it was there."""
    arguments = arguments_of(config, folder)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    set_seed(config.train.seed)

    text = Text.load(config, console)
    if resume:
        text.check_same(folder, config)
    checkpoint = None
    if resume:
        _ = arguments.device  # with which processes find each other
        checkpoint = checkpoint_to_resume(folder)
    # A run that goes on needs the model that it began with no more.
    begins = checkpoint is None or config.model.init_from is None
    architecture = model_config(config, text.tokenizer) if begins else saved_config(cast(Path, checkpoint))
    sharded.check_model(config, architecture)
    text.check_ids(architecture.vocab_size)
    examples = text.examples(config)
    check_needs(config, architecture, console)
    model = first_model(config, architecture) if begins else AtlasForCausalLM(architecture)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    _set_execution(config, model)
    check_growth(config, model)
    check_gates(config, model)
    print_line(console, text.about)
    begun, preset = config.model.init_from, config.model.preset
    what = preset if begun is None else f"{begun} (of preset {preset} no more than the learning rate)"
    print_line(console, f"model: {what}, {model.num_parameters():,} parameters")
    if config.train.compiled:
        takes = (
            "minutes, and steps are no faster: its rule has a feature map"
            if architecture.has_feature_map()
            else "a minute"
        )
        print_line(console, f"the first step compiles the memories, which takes {takes}")

    if not resume:
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(only_run(folder))
        if process() == 0:
            clear_start(folder)
    if process() == 0:
        describe(config, folder, text, checkpoint)
    return _run(config, arguments, model, text, examples, resume, checkpoint, console, on_alarm)


def _set_execution(config: RunConfig, model: AtlasForCausalLM) -> None:
    """How the memories compute. ConfigError where there are none to compile or to record."""
    run = config.train
    cuda = run.device != "cpu" and torch.cuda.is_available()
    graphed = cuda and not (run.fsdp or run.gradient_checkpointing) if run.graphed is None else run.graphed
    try:
        set_execution(model, compiled=run.compiled, graphed=graphed)
    except ValueError as error:
        if run.compiled or run.graphed:
            name = "compiled=true compiles" if run.compiled else "graphed=true records"
            raise ConfigError(f"train.{name} memories, and {error}: leave it out") from error


def _run(
    config: RunConfig,
    arguments: TrainingArguments,
    model: Any,
    text: Text,
    examples: Examples,
    resume: bool,
    checkpoint: Path | None,
    console: Console,
    on_alarm: OnAlarm | None,
) -> Outcome:
    folder = Path(config.output_dir)
    done = 0 if checkpoint is None else number(checkpoint)
    last, elapsed = so_far(folder, done)
    if done and last is None and config.train.max_minutes is not None:
        print_line(console, f"{folder / LOG} lacks step {done}: {elapsed / 60:.2f} minutes count as used")
    clock = Clock(config.train.last_step, config.train.max_minutes, elapsed, config.train.save_minutes)
    if checkpoint is not None and clock.share(done) >= 1:
        saved = save_again(folder, checkpoint, text, last.held_out_bits_per_byte if last else None)
        what = f"the model has been saved from {checkpoint.name}" if saved else "nothing to do"
        remedy = "raise train.steps or train.max_minutes to go on"
        print_line(console, f"{what}: {folder} is finished (step {done}); {remedy}")
        return Outcome(folder, done, last.loss if last else math.nan, elapsed, False)
    if checkpoint is not None:
        check_fit(checkpoint, model.config, config.model.preset)
        read_state(checkpoint)
    if resume:
        print_line(console, f"resuming at step {done}")
        if process() == 0:
            with writing(folder / LOG):
                cut_logs(folder, done)

    run = config.train
    interrupt = StopOnInterrupt()
    reader = HeldOut(model, text.tokenizer, text.held_out, config.data.longest, run.evaluate_every, interrupt, run.fsdp)
    log = JsonLog(folder / LOG, clock, reader)
    writer = Samples(folder / SAMPLES, reader, run.sample_tokens, run.prompt, console, interrupt)
    tokens_per_step = run.batch_size * batches(config) * config.data.seq_len
    probe = MemoryProbe(
        folder / MEMORY,
        model,
        text.tokenizer,
        reader.documents,
        run.watch_every,
        tokens_per_step,
        console,
        interrupt,
        run.alarm_webhook,
        run.fsdp,
        on_alarm,
    )
    bar = ProgressBar(clock, log, console, tokens_per_step)
    trainer = _Trainer(
        config,
        clock,
        model,
        examples,
        args=arguments,
        processing_class=padded(text.tokenizer),
        callbacks=[clock, interrupt, reader, writer, probe, log, bar],
    )
    trainer.told = lambda: probe.metrics | ({} if reader.bits is None else {"held_out_bits_per_byte": reader.bits})
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    try:
        with interrupt:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    weights = sharded.whole_weights(model) if trainer.fsdp else None
    save_model(folder, model, trainer.state, text, reader.bits, weights)
    stopped = interrupt.interrupted and clock.share(trainer.state.global_step) < 1
    return Outcome(folder, trainer.state.global_step, log.last.get("loss", math.nan), clock.elapsed, stopped)


class _Trainer(sharded.ShardedTrainer):
    """The Trainer with our order of examples, our parameter groups and a schedule that knows the clock."""

    def __init__(self, run: RunConfig, clock: Clock, model: nn.Module, examples: Examples, **kwargs: Any) -> None:
        self.run, self.clock, self.examples, self.folder = run.train, clock, examples, Path(run.output_dir)
        self.peak = run.train.learning_rate or PRESETS[run.model.preset].learning_rate
        self.carried = None
        self.losses: list[torch.Tensor] = []  # of the passes of the step
        self.told: Callable[[], dict[str, float]] = dict  # what callbacks have found out of the step that ends
        if run.data.order == "stream" and isinstance(examples, Segments):
            rows, passes = self.run.batch_size, self.run.gradient_accumulation_steps
            self.carried = CarriedStates(model, rows, passes, examples.interleave, process(), processes())
        kwargs |= {"data_collator": collate(cast(Any, model).config.vocab_size)}
        super().__init__(model, self.run.fsdp, self.run.optimizer, train_dataset=examples, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, **self.told()} if "loss" in logs else logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        return SequentialSampler(self.examples)  # which are in the order in which they are to be read

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.examples, Segments):
            times = self.examples.times(self.state.global_step)
            inputs = {name: items.reshape(-1, times * items.shape[1]) for name, items in inputs.items()}
            if self.carried is not None:
                self.carried.deal(times)
                inputs["past_key_values"] = self.carried.next()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:  # before the optimiser takes the gradient
        norm = super()._get_grad_norm(*args, **kwargs)
        loss, self.losses = float(sum(self.losses)), []
        check_finite(self.state.global_step + 1, self.folder, loss, float(norm))
        return norm

    def _get_output_dir(self, trial: Any) -> str:  # of checkpoints
        return str(self.folder / SAVING)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        if largest(not finite(self.network))[0]:
            raise not_finite("the weights are not finite numbers", step, self.folder)
        try:
            with writing(self.folder / f"checkpoint-{step}"):
                super()._save_checkpoint(model, trial)
                publish(self.folder, step, self.run.keep_checkpoints)
        except OSError:
            if process() == 0:  # a part of one is of no use
                shutil.rmtree(self.folder / SAVING, ignore_errors=True)
            raise

    def _save_rng_state(self, output_dir: str) -> None:  # of every process, before older checkpoints are deleted
        super()._save_rng_state(output_dir)
        if self.carried is not None:
            self.carried.save(Path(output_dir))
        if processes() > 1:
            torch.distributed.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if largest(not finite(self.network))[0]:
            raise ConfigError(
                f"the weights in {resume_from_checkpoint!r} are not finite numbers: delete it, and --resume goes on "
                "from the checkpoint before"
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with random_state(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)
        if self.carried is not None and isinstance(self.examples, Segments) and checkpoint is not None:
            self.carried.deal(self.examples.times(self.state.global_step))
            self.carried.load(Path(checkpoint))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        # Only weights of linear layers decay: not embeddings, norms, biases, gates, nor a memory's M_0 and a_i.
        network = self.network if model is None else model
        groups = (muon_groups if self.run.optimizer == "muon" else m3_groups)(network, self.run.weight_decay)
        groups = split_by_rate(network, split_by_period(network, groups), self.peak, self.run.gate_rate)
        optimizer: torch.optim.Optimizer
        if self.run.optimizer == "m3":
            optimizer = M3(groups, lr=self.peak)
        elif self.run.optimizer == "muon":
            optimizer = MuonAndAdamW(groups, self.peak)
        else:
            optimizer = torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, 0.95), fused=True)
        if any(group["period"] > 1 for group in optimizer.param_groups):
            optimizer = MultiPeriod(optimizer)
        self.optimizer = optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        def factor(step: int) -> float:
            warm, share = min(1.0, (step + 1) / (self.run.warmup_steps + 1)), self.clock.share(step)
            if self.run.schedule == "wsd":
                return warm * min(1.0, 5 * (1 - share))
            return warm * 0.5 * (1 + math.cos(math.pi * share))

        scheduler = LambdaLR(cast(torch.optim.Optimizer, optimizer or self.optimizer), factor)
        self.lr_scheduler = scheduler
        self._created_lr_scheduler = True
        return scheduler
