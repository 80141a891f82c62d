"""One training run, on transformers' Trainer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import TrainingArguments, default_data_collator, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from atlas_memory.data import Segments
from atlas_memory.models import PRESETS, AtlasForCausalLM
from atlas_memory.training import sharded
from atlas_memory.training.callbacks import Clock, HeldOut, JsonLog, ProgressBar, Samples, StopOnInterrupt
from atlas_memory.training.card import write_card
from atlas_memory.training.carried import CarriedStates
from atlas_memory.training.checks import check_device, check_folder, has_bf16, only_run, warn_of_memory
from atlas_memory.training.config import ConfigError, RunConfig
from atlas_memory.training.examples import Examples, Text, batches
from atlas_memory.training.logs import LOG, MEMORY, SAMPLES, cut_logs, read_log
from atlas_memory.training.muon import MuonAndAdamW, muon_groups
from atlas_memory.training.optimisers import M3, m3_groups
from atlas_memory.training.periods import MultiPeriod, split_by_period
from atlas_memory.training.processes import process, processes
from atlas_memory.training.rates import split_by_rate
from atlas_memory.training.runs import (
    WEIGHTS,
    broken,
    check_fit,
    check_next,
    first_model,
    model_config,
    newest_checkpoint,
    saved_config,
    writing,
)
from atlas_memory.training.watching import MemoryWatch, OnAlarm


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

    A folder that holds anything is refused unless `resume`, which continues its newest intact checkpoint
    (from the beginning if there is none). Everything that can be wrong is checked before a file is written:
    ValueError. A run that `config.then` describes follows, and the outcome is the last one's. `on_alarm` is called
    with the step and the alarm when a memory has stopped to be of use; what it raises ends the run.
    """
    after = config.next()
    # Asked before the first of several processes can have begun it.
    begun = resume and after is not None and (Path(after.output_dir) / "run.yaml").is_file()
    outcome = _train(config, resume, console, on_alarm)
    return outcome if after is None or outcome.interrupted else train(after, begun, console, on_alarm)


def _train(config: RunConfig, resume: bool, console: Console | None, on_alarm: OnAlarm | None) -> Outcome:
    """`train` of one run."""
    console = console or Console(stderr=True, quiet=process() > 0)
    folder = Path(config.output_dir)
    if process() == 0:
        check_folder(folder, config, resume)
    check_device(config)
    sharded.check(config)
    config.check()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    set_seed(config.train.seed)

    text = Text.load(config)
    if resume:
        text.check_same(folder, config)
    # A run that goes on needs the model that it began with no more.
    checkpoint = newest_checkpoint(folder) if resume and config.model.init_from is not None else None
    architecture = model_config(config, text.tokenizer) if checkpoint is None else saved_config(checkpoint)
    check_next(config, text.tokenizer, architecture)
    sharded.check_model(config, architecture)
    examples = text.examples(config)
    warn_of_memory(config, architecture, console)
    model = first_model(config, architecture) if checkpoint is None else AtlasForCausalLM(architecture)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if config.data.order == "stream" and any(getattr(layer, "grows", False) for layer in model.modules()):
        raise ConfigError(
            "data.order='stream' keeps what rows remember, and the state of this model grows with what it reads: "
            "take data.order=packed or crops"
        )
    console.print(text.about, highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"model: {config.model.init_from or config.model.preset}, {model.num_parameters():,} parameters",
        highlight=False,
    )

    folder.mkdir(parents=True, exist_ok=True)
    with only_run(folder):
        if process() == 0:
            config.save(folder / "run.yaml")
            text.save(folder, config)
        return _run(config, folder, model, text, examples, resume, console, on_alarm)


def _run(
    config: RunConfig,
    folder: Path,
    model: Any,
    text: Text,
    examples: Examples,
    resume: bool,
    console: Console,
    on_alarm: OnAlarm | None,
) -> Outcome:
    checkpoint = newest_checkpoint(folder) if resume else None
    done = 0 if checkpoint is None else int(checkpoint.name.partition("-")[2])
    history = {int(entry["step"]): entry for entry in read_log(folder)} if done else {}
    elapsed = history[done]["elapsed"] if done in history else 0.0
    clock = Clock(config.train.last_step, config.train.max_minutes, elapsed)
    if done and clock.share(done) >= 1:
        console.print(
            f"nothing to do: {folder} is finished (step {done}); raise train.steps or train.max_minutes", markup=False
        )
        return Outcome(folder, done, history.get(done, {}).get("loss", math.nan), elapsed, False)
    if checkpoint is not None:
        check_fit(checkpoint, model, config.model.preset)
    if resume:
        console.print(f"resuming at step {done}", highlight=False)
        if process() == 0:
            cut_logs(folder, done)

    run = config.train
    reader = HeldOut(model, text.tokenizer, text.held_out, config.data.longest, run.evaluate_every, run.fsdp)
    log = JsonLog(folder / LOG, clock, reader)
    writer = Samples(folder / SAMPLES, reader, run.sample_tokens, run.prompt, console)
    tokens_per_step = run.batch_size * batches(config) * config.data.seq_len
    watch = MemoryWatch(
        folder / MEMORY,
        model,
        text.tokenizer,
        reader.documents,
        run.watch_every,
        tokens_per_step,
        console,
        run.alarm_webhook,
        run.fsdp,
        on_alarm,
    )
    bar = ProgressBar(clock, log, console, tokens_per_step)
    interrupt = StopOnInterrupt()
    trainer = _Trainer(
        config,
        clock,
        model,
        examples,
        args=_arguments(config, folder),
        processing_class=text.tokenizer,
        callbacks=[clock, interrupt, reader, writer, watch, log, bar],
    )
    trainer.told = lambda: watch.figures | ({} if reader.bits is None else {"held_out_bits_per_byte": reader.bits})
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    try:
        with interrupt:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    _save(trainer, model, folder, text, reader.bits)
    stopped = interrupt.interrupted and clock.share(trainer.state.global_step) < 1
    return Outcome(folder, trainer.state.global_step, log.last.get("loss", math.nan), clock.elapsed, stopped)


def _save(trainer: _Trainer, model: Any, folder: Path, text: Text, bits: float | None) -> None:
    """Leave the model at the end of a run in its folder; all processes must call, and return when it is there."""
    weights = sharded.whole_weights(model) if trainer.fsdp else None
    if process() == 0:
        with writing(folder / WEIGHTS):
            model.save_pretrained(folder, state_dict=weights)
            trainer.save_state()  # tells load_run how old the saved model is
            text.tokenizer.save_pretrained(folder)
            write_card(folder, model, text.about, trainer.state.global_step, bits)
    if processes() > 1:
        torch.distributed.barrier()


class _Trainer(sharded.ShardedTrainer):
    """The Trainer with our order of examples, our parameter groups and a schedule that knows the clock."""

    def __init__(self, run: RunConfig, clock: Clock, model: nn.Module, examples: Examples, **kwargs: Any) -> None:
        self.run, self.clock, self.examples = run.train, clock, examples
        self.peak = run.train.learning_rate or PRESETS[run.model.preset].learning_rate
        self.carried = None
        self.told: Callable[[], dict[str, float]] = dict  # what callbacks have found out of the step that ends
        if run.data.order == "stream" and isinstance(examples, Segments):
            rows, passes = self.run.batch_size, self.run.gradient_accumulation_steps
            self.carried = CarriedStates(model, rows, passes, examples.lanes, process(), processes())
        # Examples are of one length: nothing is padded, and the tokenizer needs no token for it.
        collate = default_data_collator
        super().__init__(model, self.run.fsdp, train_dataset=examples, data_collator=collate, **kwargs)

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

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        try:
            with writing(checkpoint):
                super()._save_checkpoint(model, trial)
        except OSError:
            if process() == 0 and broken(checkpoint):  # a part of one is of no use, and in the way
                shutil.rmtree(checkpoint, ignore_errors=True)
            raise

    def _save_rng_state(self, output_dir: str) -> None:  # of every process, before older checkpoints are deleted
        super()._save_rng_state(output_dir)
        if self.carried is not None:
            self.carried.save(Path(output_dir))
        if processes() > 1:
            torch.distributed.barrier()

    def _load_rng_state(self, checkpoint: str | None) -> None:
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


def _arguments(config: RunConfig, folder: Path) -> TrainingArguments:
    run = config.train
    cuda = run.device != "cpu" and torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=run.last_step,
        per_device_train_batch_size=run.batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        max_grad_norm=run.grad_clip,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=run.save_every,
        save_total_limit=run.keep_checkpoints,
        seed=run.seed,
        use_cpu=not cuda,  # and so never MPS, which lacks float64
        ddp_backend=("nccl" if cuda else "gloo") if processes() > 1 else None,
        ddp_find_unused_parameters=False,  # a layer leaves none without a gradient
        bf16=has_bf16(config) if run.bf16 is None else run.bf16,
        dataloader_pin_memory=cuda,
        use_cache=True,  # what the saved configuration says; no state is kept in training
        remove_unused_columns=False,
        report_to=run.report_to or "none",
    )
    if arguments.n_gpu > 1:  # several GPUs mean several processes here, never nn.DataParallel
        arguments._n_gpu = 1
    return arguments
