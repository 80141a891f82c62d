"""One training run, on transformers' Trainer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from atlas_memory.console import print_line
from atlas_memory.data import Segments
from atlas_memory.layers.omega_memory import set_execution
from atlas_memory.models import PRESETS, AtlasForCausalLM
from atlas_memory.monitor.logs import LOG, cut_logs, so_far
from atlas_memory.train import callbacks, preflight, run_model
from atlas_memory.train import checkpoint as checkpoints
from atlas_memory.train.config import ConfigError, RunConfig
from atlas_memory.train.distributed import all_reduce_max, barrier, gather_weights, rank, shard, world_size
from atlas_memory.train.optim import make_optimizer
from atlas_memory.train.tbptt import TBPTTStates
from atlas_memory.train.training_data import Examples, TrainingData, batches_per_step


@dataclass(frozen=True)
class Outcome:
    """The result of `train`: the step reached, the last loss (nats a token) and the seconds in all."""

    folder: Path
    steps: int
    loss: float
    seconds: float
    interrupted: bool


def train(
    config: RunConfig, resume: bool = False, console: Console | None = None, on_alarm: callbacks.OnAlarm | None = None
) -> Outcome:
    """Train, and save model, tokenizer, `run.yaml`, `log.jsonl` and checkpoints into `output_dir`.

    With `resume` the newest intact checkpoint in the folder is continued (the beginning if there is none); otherwise
    the folder must be empty, or of a run that failed in its first step. All settings are checked before a file is
    written: ValueError. `on_alarm` is called with the step and the alarm; an exception from it ends the run.
    """
    console = console or Console(stderr=True, quiet=rank() > 0)
    folder = Path(config.output_dir)
    if rank() == 0:
        preflight.check_folder(folder, config, resume)
    preflight.check_environment(config)
    with ExitStack() as stack:
        if resume:
            stack.enter_context(preflight.locked(folder))
        arguments = _training_arguments(config, folder)
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        set_seed(config.train.seed)
        data = TrainingData.load(config, console)
        checkpoint = None
        if resume:
            data.check_same(folder, config)
            _ = arguments.device  # joins the other processes
            checkpoint = checkpoints.checkpoint_to_resume(folder)
        model, examples = _make_model(config, data, checkpoint, console)
        if not resume:
            with preflight.writable(folder):
                folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(preflight.locked(folder))
            if rank() == 0:
                preflight.clear_start(folder)
        if rank() == 0:
            preflight.write_settings(config, folder, data, checkpoint)
        return _run(config, arguments, model, data, examples, resume, checkpoint, console, on_alarm)


def _training_arguments(config: RunConfig, folder: Path) -> TrainingArguments:
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
        seed=run.seed,
        use_cpu=not cuda,  # and so never MPS, which lacks float64
        ddp_backend=("nccl" if cuda else "gloo") if world_size() > 1 else None,
        ddp_find_unused_parameters=False,
        bf16=preflight.has_bf16(config) if run.bf16 is None else run.bf16,
        dataloader_pin_memory=cuda,
        use_cache=True,  # for the saved configuration
        remove_unused_columns=False,
        report_to=run.report_to or "none",
    )
    if arguments.n_gpu > 1:  # several GPUs mean several processes here, never nn.DataParallel
        arguments._n_gpu = 1
    return arguments


def _make_model(
    config: RunConfig, data: TrainingData, checkpoint: Path | None, console: Console
) -> tuple[AtlasForCausalLM, Examples]:
    """The model, not yet with a checkpoint's weights, and the examples."""
    # To resume, the model in `model.init_from` is not needed.
    new = checkpoint is None or config.model.init_from is None
    if new:
        architecture = run_model.model_config(config, data.tokenizer)
    else:
        architecture = run_model.saved_config(cast(Path, checkpoint))
    data.check_ids(architecture.vocab_size)
    examples = data.examples(config)
    preflight.check_needs(config, architecture, console)
    model = run_model.first_model(config, architecture) if new else AtlasForCausalLM(architecture)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    _set_execution(config, model)
    preflight.check_model(config, model)
    print_line(console, data.about)
    begun, preset = config.model.init_from, config.model.preset
    what = preset if begun is None else f"{begun} (learning rate of preset {preset})"
    print_line(console, f"model: {what}, {model.num_parameters():,} parameters")
    if config.train.compile:
        takes = "minutes (its rule has a feature map)" if architecture.has_feature_map() else "a minute"
        print_line(console, f"the first step compiles the memories, which takes {takes}")
    return model, examples


def _set_execution(config: RunConfig, model: AtlasForCausalLM) -> None:
    run = config.train
    cuda = run.device != "cpu" and torch.cuda.is_available()
    graphs = cuda and not (run.fsdp or run.gradient_checkpointing) if run.cuda_graphs is None else run.cuda_graphs
    try:
        set_execution(model, compiled=run.compile, graphed=graphs)
    except ValueError as error:
        if run.compile or run.cuda_graphs:
            name = "compile=true compiles" if run.compile else "cuda_graphs=true records"
            raise ConfigError(f"train.{name} memories, and {error}: leave it out") from error


def _run(
    config: RunConfig,
    arguments: TrainingArguments,
    model: Any,
    data: TrainingData,
    examples: Examples,
    resume: bool,
    checkpoint: Path | None,
    console: Console,
    on_alarm: callbacks.OnAlarm | None,
) -> Outcome:
    folder, run = Path(config.output_dir), config.train
    done = 0 if checkpoint is None else checkpoints.step_of(checkpoint)
    last, elapsed = so_far(folder, done)
    if done and last is None and run.max_minutes is not None:
        print_line(console, f"{folder / LOG} lacks step {done}: {elapsed / 60:.2f} minutes count as used")
    clock = callbacks.Clock(run.last_step, run.max_minutes, elapsed, run.save_minutes)
    if checkpoint is not None:
        if clock.progress(done) >= 1:
            run_model.save_final_model(folder, checkpoint, data, last.held_out_bits_per_byte if last else None)
            more = "raise train.steps or train.max_minutes to train longer"
            print_line(console, f"{folder} is finished (step {done}), and its model is that of the checkpoint; {more}")
            return Outcome(folder, done, last.loss if last else math.nan, elapsed, False)
        run_model.check_fit(checkpoint, model.config, config.model.preset)
        checkpoints.read_trainer_state(checkpoint)
    if resume:
        print_line(console, f"resuming at step {done}")
        if rank() == 0:
            with checkpoints.writing(folder / LOG):
                cut_logs(folder, done)

    interrupt = callbacks.StopOnInterrupt()
    evaluation = callbacks.Evaluation(config, model, data, interrupt)
    log = callbacks.JsonLog(folder / LOG, clock, evaluation)
    samples = callbacks.Samples(config, evaluation, interrupt, console)
    tokens_per_step = run.batch_size * batches_per_step(config) * config.data.seq_len
    probe = callbacks.MemoryProbe(config, evaluation, tokens_per_step, interrupt, console, on_alarm)
    bar = callbacks.ProgressBar(clock, log, console, tokens_per_step)
    hooks = [clock, interrupt, evaluation, samples, probe, log, bar]
    tokenizer = run_model.with_pad_token(data.tokenizer)
    trainer = _Trainer(config, clock, model, examples, args=arguments, processing_class=tokenizer, callbacks=hooks)
    trainer.extra_logs = lambda: (
        probe.metrics | ({} if evaluation.bits is None else {"held_out_bits_per_byte": evaluation.bits})
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    try:
        with interrupt:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    weights = gather_weights(model) if run.fsdp else None
    run_model.save_model(folder, model, trainer.state, data, evaluation.bits, weights)
    stopped = interrupt.interrupted and clock.progress(trainer.state.global_step) < 1
    return Outcome(folder, trainer.state.global_step, log.last.get("loss", math.nan), clock.elapsed, stopped)


class _Trainer(Trainer):
    """Trainer with our order of examples, optimizers, schedules by the clock, truncated BPTT, verified checkpoints and
    FSDP2 (accelerate's own leaves CPUs out and would gather M_0 in bfloat16: the model comes sharded)."""

    def __init__(
        self, config: RunConfig, clock: callbacks.Clock, model: nn.Module, examples: Examples, **kwargs: Any
    ) -> None:
        self.settings, self.clock, self.examples, self.folder = config.train, clock, examples, Path(config.output_dir)
        self.peak = config.train.learning_rate or PRESETS[config.model.preset].learning_rate
        self.network: Any = model  # without the wrappers of accelerate
        self.states = None
        self.losses: list[torch.Tensor] = []  # of the current step
        self.extra_logs: Callable[[], dict[str, float]] = dict
        if config.data.order == "stream" and isinstance(examples, Segments):
            rows, passes = self.settings.batch_size, self.settings.gradient_accumulation_steps
            self.states = TBPTTStates(model, rows, passes, examples.interleave, rank(), world_size())
        if self.settings.fsdp:
            shard(model, kwargs["args"].device)
        kwargs |= {"train_dataset": examples, "data_collator": default_data_collator}
        super().__init__(model, **kwargs)
        if self.settings.fsdp:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, **self.extra_logs()} if "loss" in logs else logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        return SequentialSampler(self.examples)  # they are shuffled already

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.examples, Segments):
            times = self.examples.times(self.state.global_step)
            inputs = {name: items.reshape(-1, times * items.shape[1]) for name, items in inputs.items()}
            if self.states is not None:
                self.states.lengthen(times)
                inputs["past_key_values"] = self.states.next_cache()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:  # before the optimizer takes the gradient
        norm = super()._get_grad_norm(*args, **kwargs)
        loss, self.losses = float(sum(self.losses)), []
        callbacks.check_finite(self.state.global_step + 1, self.folder, loss, float(norm))
        return norm

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder / checkpoints.SAVING)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        if not self._weights_are_finite():
            raise callbacks.not_finite("the weights are not finite numbers", step, self.folder)
        try:
            with checkpoints.writing(self.folder / f"checkpoint-{step}"):
                super()._save_checkpoint(model, trial)
                checkpoints.publish(self.folder, step, self.settings.keep_checkpoints)
        except OSError:
            if rank() == 0:
                shutil.rmtree(self.folder / checkpoints.SAVING, ignore_errors=True)
            raise

    def _weights_are_finite(self) -> bool:
        """All processes must call."""
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in self.network.parameters()]
        return not all_reduce_max(not torch.stack([part.detach().isfinite().all() for part in parts]).all())[0]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.settings.fsdp:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:  # the weights are written with the optimizer
            self.network.config.save_pretrained(output_dir)
            cast(Any, self.processing_class).save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.settings.fsdp:
            checkpoints.save_shards(Path(output_dir), self.network, cast(Any, self.optimizer).optimizer)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:  # of every process, before older checkpoints are deleted
        super()._save_rng_state(output_dir)
        if self.states is not None:
            self.states.save(Path(output_dir))
        barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.settings.fsdp:
            checkpoints.load_sharded_weights(Path(resume_from_checkpoint), self.network)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not self._weights_are_finite():
            raise ConfigError(
                f"the weights in {resume_from_checkpoint!r} are not finite: delete it, and --resume continues "
                "from the checkpoint before"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, optimizer, scheduler = Path(checkpoint), cast(Any, self.optimizer), cast(Any, self.lr_scheduler)
        if self.settings.fsdp:
            checkpoints.load_sharded_optimizer(folder, self.network, optimizer.optimizer)
        else:
            optimizer.load_state_dict(checkpoints.read_optimizer(folder, optimizer.optimizer, self.settings.optimizer))
        # The rate follows from the step; the checkpoint's own may be that of a shorter run.
        step = checkpoints.step_of(folder)
        scheduler.last_epoch, scheduler._step_count = step - 1, step + 1
        scheduler.step()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.restoring_random_state(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)
        if self.states is not None and isinstance(self.examples, Segments) and checkpoint is not None:
            self.states.lengthen(self.examples.times(self.state.global_step))
            self.states.load(Path(checkpoint))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        run, network = self.settings, self.network if model is None else model
        self.optimizer = make_optimizer(network, run.optimizer, self.peak, run.weight_decay, run.gate_lr_scale)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        def factor(step: int) -> float:
            warm, share = min(1.0, (step + 1) / (self.settings.warmup_steps + 1)), self.clock.progress(step)
            if self.settings.schedule == "wsd":
                return warm * min(1.0, 5 * (1 - share))
            return warm * 0.5 * (1 + math.cos(math.pi * share))

        scheduler = LambdaLR(cast(torch.optim.Optimizer, optimizer or self.optimizer), factor)
        self.lr_scheduler = scheduler
        self._created_lr_scheduler = True
        return scheduler
