"""Text that a model writes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from atlas_memory.console import printable
from atlas_memory.data.tokenization import encode

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class RaiseIfNotFinite(LogitsProcessor):
    """ValueError for logits that are NaN or inf."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if (scores.isnan() | scores.isposinf()).any():
            raise ValueError(
                "the next token is predicted with nan or inf: weights of the model are damaged, or options of its rule "
                "let its memories diverge"
            )
        return scores


class TerminalStreamer(TextStreamer):
    """Prints text as it is written, on a terminal with control characters escaped."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
    greedy: bool = False,
    streamer: BaseStreamer | None = None,
) -> str:
    """`prompt` and up to `tokens` tokens that the model writes after it, as a document of its own. `streamer` is given
    tokens as they are made. PyTorch's random state is restored."""
    ids = [tokenizer.eos_token_id, *encode(tokenizer, prompt).tolist()]
    choice = {} if greedy else {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = model.generate(
            torch.tensor([ids], device=model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
            max_new_tokens=tokens,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            streamer=streamer,
            logits_processor=LogitsProcessorList([RaiseIfNotFinite()]),
            do_sample=not greedy,
            **choice,
        )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
