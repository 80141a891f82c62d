"""Text that a model writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from atlas_memory.console import printable
from atlas_memory.data.tokenization import CHAT_STOP, CHAT_TEMPLATE, encode, padding_token
from atlas_memory.models import Memory

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


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """A text up to the first of its `stops`, and the rest: from the stop on, or what may be the beginning of one."""
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    if cut is None:
        begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
        cut = len(text) - max(begun, default=0)
    return text[:cut], text[cut:]


class ReplyStreamer(TerminalStreamer):
    """Prints an answer without the stop that ends it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stops, self.held = stops, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text, self.held = split_at_stop(self.held + text, self.stops)
        if stream_end and not any(stop in self.held for stop in self.stops):
            text += self.held
        super().on_finalized_text(text, stream_end)


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
    memory: Memory | None = None,
) -> str:
    """`prompt` and up to `tokens` tokens that the model writes after it, as a document of its own, or behind what
    `memory` has read. `streamer` is given tokens as they are made. PyTorch's random state is restored."""
    ids = encode(tokenizer, prompt).tolist()
    if memory is None:
        ids = [tokenizer.eos_token_id, *ids]
    choice = {} if greedy else {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    out = _generate(model, tokenizer, ids, tokens, seed, memory, streamer=streamer, do_sample=not greedy, **choice)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def reply(
    model: Any,
    tokenizer: Any,
    memory: Memory,
    message: str,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Memory:
    """Print the answer to a message of the user, and return the memory that has read both. `tokenizer` has a chat
    template."""
    stops = [CHAT_STOP] if tokenizer.chat_template == CHAT_TEMPLATE else []
    said = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    memory = model.read(asked, memory=memory)
    streamer = ReplyStreamer(tokenizer, stops)
    choice = {"temperature": temperature, "top_k": top_k, "do_sample": True, "streamer": streamer}
    choice |= {"stop_strings": stops} if stops else {}
    out = _generate(model, tokenizer, [], tokens, seed, memory, **choice)
    if stops:  # the next message is told who speaks, and begins a line
        answer = split_at_stop(tokenizer.decode(out[0], skip_special_tokens=True), stops)[0]
        out = torch.from_numpy(encode(tokenizer, answer + "\n"))[None]
    return model.read(out, memory=memory) if out.shape[1] else memory


def _generate(
    model: Any, tokenizer: Any, ids: list[int], tokens: int, seed: int, memory: Memory | None, **options: Any
) -> torch.Tensor:
    """The ids, and those that the model writes after them, `[1, time]`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.generate(
            torch.tensor([ids], dtype=torch.long, device=model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
            max_new_tokens=tokens,
            pad_token_id=padding_token(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            logits_processor=LogitsProcessorList([RaiseIfNotFinite()]),
            memory=memory,
            tokenizer=tokenizer,
            **options,
        )
