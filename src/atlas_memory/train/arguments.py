"""A run's options, as transformers' Trainer has them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from atlas_memory.train.checks import has_bf16
from atlas_memory.train.config import RunConfig
from atlas_memory.train.processes import processes


def arguments_of(config: RunConfig, folder: Path) -> TrainingArguments:
    """The options of transformers' Trainer for a run in a folder."""
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
