"""Atlas models in vLLM: tokens of many requests in one flat row, states in the pages of vLLM's cache.

A request has one page a layer, with all tensors of the layer's state behind one another as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadata
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from atlas_memory.models.modeling import AtlasModel
from atlas_memory.rules.state import State

ALIGNMENT = 64  # bytes, a multiple of those of int64, as PyTorch aligns tensors


class StatePages(MambaBase):
    """The states of one layer in vLLM's cache; vLLM finds it in `static_forward_context`. `fresh`: of one row."""

    def __init__(self, fresh: State) -> None:
        self.template = fresh.map(lambda t: t[:0])  # structure and dtypes, without rows
        self.layout: list[tuple[int, int, torch.Size]] = []  # offset and bytes of each tensor, its shape of one row
        end = 0
        for t in fresh.tensors():
            size = prod(t.shape[1:]) * t.itemsize
            self.layout.append((end, size, t.shape[1:]))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self.kv_cache: tuple[Tensor, ...] = ()

    # What vLLM asks of a layer with a state:

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return ((self.nbytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR  # whose metadata are query_start_loc, seq_lens and pages

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self.words = self.kv_cache[0].view(torch.int64)  # rows of bytes are copied much slower

    def read(self, pages: Tensor) -> State:
        """The states in these pages `[rows]`, copied."""
        rows, layout = self.words.index_select(0, pages), iter(self.layout)

        def unpack(like: Tensor) -> Tensor:
            start, size, shape = next(layout)
            if not size:
                return like.new_empty(len(rows), *shape)
            numbers = _view(rows, like.dtype, start, size)
            return numbers.unflatten(1, shape) if shape else numbers[:, 0]

        return self.template.map(unpack)

    def write(self, pages: Tensor, state: State) -> None:
        """Put states into these pages `[rows]`."""
        rows = self.words.new_empty(len(pages), self.words.shape[1])
        for t, (start, size, _) in zip(state.tensors(), self.layout, strict=True):
            if size:
                _view(rows, t.dtype, start, size).copy_(t.reshape(len(t), -1))
        self.words.index_copy_(0, pages, rows)


def _view(rows: Tensor, dtype: torch.dtype, start: int, size: int) -> Tensor:
    """The bytes `start` to `start + size` of each row of int64 as numbers of another type, `[rows, numbers]`."""
    return rows.view(dtype)[:, start // dtype.itemsize : (start + size) // dtype.itemsize]


@dataclass(frozen=True)
class Part:
    """Requests that are read as one batch: rows `[rows, time]` of flat tokens, their pages, and whether they begin."""

    tokens: Tensor
    pages: Tensor
    begins: bool


def split_requests(meta: LinearAttentionMetadata) -> list[Part]:
    """Requests with one new token together, others one by one: they differ in length."""
    count = meta.num_decodes + meta.num_prefills
    starts = meta.query_start_loc[: count + 1]
    lengths = starts.diff()
    past = meta.seq_lens[:count] - lengths
    pages = meta.state_indices_tensor[:count].long()
    one = (lengths == 1) & (past > 0)
    parts = [Part(starts[:count][one].long()[:, None], pages[one], False)] if bool(one.any()) else []
    for i in (~one & (lengths > 0)).nonzero().flatten().tolist():
        tokens = torch.arange(int(starts[i]), int(starts[i + 1]), device=starts.device)
        parts.append(Part(tokens[None], pages[i : i + 1], not int(past[i])))
    return parts


class AtlasForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """`atlas_memory.AtlasForCausalLM` under vLLM. Its parameters have the same names."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise ValueError("Atlas models run on one device: leave tensor and pipeline parallelism out")
        if vllm_config.num_speculative_tokens:
            raise ValueError("a memory cannot forget its last tokens: leave speculative decoding out")
        self.config = config
        self.model = AtlasModel(config)
        if any(getattr(m, "grows", False) for m in self.model.modules()):
            raise ValueError(f"vLLM keeps states of fixed size, and those of block={config.block!r} grow")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.layer_names, self.pages = [], []
        known = vllm_config.compilation_config.static_forward_context
        blocks: Any = self.model.layers
        for i, block in enumerate(blocks):
            name = f"{prefix}{'.' if prefix else ''}model.layers.{i}.mixer"
            with torch.no_grad():
                pages = StatePages(block.mixer.initial_state(1))
            known[name] = pages
            self.layer_names.append(name)
            self.pages.append(pages)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        x = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        meta = get_forward_context().attn_metadata
        parts = None if meta is None else split_requests(meta[self.layer_names[0]])
        if parts is None:  # a run that measures memory
            y = x[None]
            for layer in self.model.layers:
                y, _ = layer(y)
            return self.model.norm(y[0])
        out = torch.zeros_like(x)
        for part in parts:
            y = x[part.tokens]
            for layer, pages in zip(self.model.layers, self.pages, strict=True):
                y, state = layer(y, None if part.begins else pages.read(part.pages))
                pages.write(part.pages, state)
            out[part.tokens] = self.model.norm(y)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)  # a page is copied whole

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        loaded = set()
        for name, value in weights:
            if name not in own:
                raise ValueError(f"the saved model has {name}, which this configuration does not: config.json differs")
            own[name].copy_(value)
            loaded.add(name)
        if self.config.tie_word_embeddings:
            loaded |= {"lm_head.weight"} if "model.embed_tokens.weight" in loaded else set()
        if missing := own.keys() - loaded:
            raise ValueError(f"the saved model lacks {', '.join(sorted(missing))}")
        return loaded
