"""The needs of a run, found without making its weights: parameters, tokens, operations and memory."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from atlas_memory.data import load_tokenizer
from atlas_memory.data.prepared import Prepared
from atlas_memory.layers.omega_memory import OmegaMemory
from atlas_memory.models import AtlasConfig, AtlasForCausalLM
from atlas_memory.train.config import RunConfig
from atlas_memory.train.run_model import model_config
from atlas_memory.train.training_data import INTERLEAVE

MEASURED = 128
"""Tokens of a row on which a block is measured, or twice an attention's window: the needs of a block whose state has a
constant size are proportional to the length."""
OPTIMIZER_BYTES = {"adamw": 8, "muon": 8, "m3": 16}
"""Bytes of state a parameter, at most."""
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, by version of Linux's control groups."""
LOGITS = 12
"""Bytes an entry: float32 logits, their softmax and their gradient. Under autocast it is 16."""


@dataclass(frozen=True)
class Plan:
    """The needs of one process of a run."""

    parameters: int
    embeddings: int  # parameters of embeddings and output head
    initial: int  # parameters of the memories' M_0
    tokens: int | None  # of all processes; None: the clock decides
    flops_per_token: float  # of matrix products, forward and backward; a multiply-add is two
    weights: int  # bytes of weights, gradients and the optimizer's state
    activations: int  # bytes that a pass keeps for the backward pass, and about half a block's for temporaries
    logits: int  # bytes of logits and their gradient
    states: int  # bytes of the memory states that rows keep from step to step, at most

    @property
    def memory(self) -> int:
        """Bytes in all, without the program's own."""
        return self.weights + self.activations + self.logits + self.states

    @property
    def flops(self) -> float | None:
        """Of the whole run."""
        return None if self.tokens is None else self.tokens * self.flops_per_token

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"memory": self.memory, "flops": self.flops}


def plan(config: RunConfig, processes: int = 1) -> Plan:
    """The needs of `config` on so many processes; ConfigError if it cannot be run. Its text is not read.

    A block of the full size is measured with shapes alone (PyTorch's fake tensors), as a CPU computes it.
    """
    prepared = Prepared.open(config.data.path)
    tokenizer = load_tokenizer(prepared.tokenizer if prepared else config.data.tokens)
    return plan_model(config, model_config(config, tokenizer), processes)


def without_weights(architecture: AtlasConfig) -> AtlasForCausalLM:
    """A model on PyTorch's meta device; no random numbers are drawn."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return AtlasForCausalLM(architecture)


def plan_model(config: RunConfig, architecture: AtlasConfig, processes: int = 1) -> Plan:
    """`plan` of a known model."""
    data, run = config.data, config.train
    model = without_weights(architecture)
    parameters = model.num_parameters()
    embeddings = sum(p.numel() for p in {model.model.embed_tokens.weight, model.lm_head.weight})  # one, if tied
    initial = sum(p.numel() for m in model.modules() if isinstance(m, OmegaMemory) for p in m.initial)
    grows = any(getattr(module, "grows", False) for module in model.modules())
    length = data.seq_len if grows else min(data.seq_len, max(MEASURED, 2 * (architecture.attention_window or 0)))
    saved, state, flops = _measure_block(model, run.batch_size, length)
    block = saved * data.seq_len // length
    blocks, width = architecture.num_hidden_layers, architecture.hidden_size
    tokens = run.batch_size * data.seq_len  # of a pass
    inputs = 4 * width * tokens * blocks
    groups = (data.interleave or INTERLEAVE) if data.order == "stream" else 0
    rows = run.batch_size * run.gradient_accumulation_steps
    head = 2 * width * architecture.vocab_size
    passes = 4 if run.gradient_checkpointing else 3  # a backward pass is two forward ones
    ends = run.steps is not None or run.max_minutes is None
    return Plan(
        parameters=parameters,
        embeddings=embeddings,
        initial=initial,
        tokens=run.last_step * rows * data.seq_len * processes if ends else None,
        flops_per_token=passes * flops * blocks / length + 3 * head,
        weights=parameters * (8 + OPTIMIZER_BYTES[run.optimizer]) // (processes if run.fsdp else 1),
        activations=29 * block // 20 + inputs if run.gradient_checkpointing else (2 * blocks + 1) * block // 2,
        logits=LOGITS * architecture.vocab_size * tokens,
        states=groups * rows * state * blocks,
    )


def _measure_block(model: Any, rows: int, length: int) -> tuple[int, int, float]:
    """Bytes that one block saves for backward; and for each row, bytes of the state and forward operations."""
    saved: dict[int, tuple[Any, int]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        block: nn.Module = model.model.layers[0].to_empty(device="cpu").train()
        own = {p.untyped_storage()._cdata for p in block.parameters()}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage, storage.nbytes()  # alive, so that its address is not reused
            return t

        x = torch.empty(rows, length, model.config.hidden_size, device="cpu", requires_grad=True)
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            _, state = block(x)
    state_bytes = sum(t.numel() * t.element_size() for t in state.tensors())
    return sum(size for _, size in saved.values()), state_bytes // rows, counter.get_total_flops() / rows


def available_memory(config: RunConfig) -> int:
    """Bytes of memory of the run's device."""
    if config.train.device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [file.read_text().strip() for file in CONTAINER_LIMITS if file.is_file()]
    return min([there, *(int(limit) for limit in limits if limit.isdigit())])  # "max": no limit
