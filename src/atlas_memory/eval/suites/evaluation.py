"""A suite's run: every answer of a model, kept in a file from which an interrupted run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas_memory.data.tokenization import encode, padding_token
from atlas_memory.models import AtlasForCausalLM, Memory
from atlas_memory.monitor.hooks import eval_mode

from .needle import NOISE
from .suite import Item, Sources, Suite, cached_items
from .suite_result import begin_result, summary, write_result

ROWS = 2**15  # tokens of a batch
CHECKED = 48  # tokens by which causality is checked


@torch.inference_mode()
def check_causal(model: Any) -> None:
    """ValueError if the logits of a token change when tokens after it do: such a model sees the answers."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (1, CHECKED), generator=torch.Generator().manual_seed(0)).to(model.device)
    other = ids.clone()
    other[:, CHECKED // 2 :] = (other[:, CHECKED // 2 :] + 1) % size
    with eval_mode(model):
        one, two = (model(input_ids=x, use_cache=False).logits[:, : CHECKED // 2].float() for x in (ids, other))
    if not one.isfinite().all():
        raise ValueError("the model predicts nan or inf: its weights are damaged")
    if (gap := float((one - two).abs().max())) > 1e-3 * max(1.0, float(one.abs().max())):
        raise ValueError(f"the model is not causal: what follows a token changes its logits by {gap:.3g}")


def evaluate_suite(
    model: Any,
    tokenizer: Any,
    suite: Suite,
    path: Path,
    lengths: Sequence[int] | None = None,
    count: int = 100,
    seed: int = 42,
    sources: Sources = Sources(),  # noqa: B008 - a value
    strict: bool = False,
    about: dict[str, Any] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """The result of a suite, written to `path` after every batch; a result that is there already is gone on with.

    Args:
        lengths: In tokens, answers included.
        count: Items of each length.
        strict: The context is read and then gone: caches of attention are emptied, windows have passed, and only a
            memory can answer. Of models without one the question alone is left.
        about: Of the model and the run, kept with the result.

    Raises:
        ValueError: The model is not causal, a source is missing, a length is too short, or `path` has a result of
            another model, seed or version.
    """
    check_causal(model)
    lengths = list(lengths or suite.lengths)
    items = {length: cached_items(suite, tokenizer, length, count, seed, sources) for length in lengths}
    data = hashlib.sha256(repr([items[length] for length in lengths]).encode()).hexdigest()
    settings = {"strict": strict, "seed": seed, "count": count, "lengths": lengths, "data": data}
    result = begin_result(path, suite.name, suite.version, suite.source, model, settings, about)
    done = {(item["length"], item["name"]) for item in result["items"]}
    for length in lengths:
        todo = [item for item in items[length] if (length, item.name) not in done]
        rows = max(1, ROWS // length)
        for first in range(0, len(todo), rows):
            if progress is not None:
                progress(f"{suite.name}, {length:,} tokens", (len(items[length]) - len(todo) + first) / count)
            batch = todo[first : first + rows]
            for item, answer in zip(batch, answers(model, tokenizer, batch, suite.max_new_tokens, strict), strict=True):
                scored = {name: score(item, answer) for name, score in suite.scores.items()}
                outcome = {"length": length, "name": item.name, "answers": list(item.answers), "answer": answer}
                result["items"].append(outcome | {"scores": scored})
            result["summary"] = list(summary(result, list(suite.scores)))
            write_result(path, result)
    result["summary"] = list(summary(result, list(suite.scores)))
    write_result(path, result)
    return result


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, items: Sequence[Item], tokens: int, strict: bool = False) -> list[str]:
    """What the model writes after each question, the likeliest token each time."""
    with eval_mode(model):
        if strict:
            return [_from_memory(model, tokenizer, item, tokens) for item in items]
        begins = _begins(tokenizer)
        prompts = [[*begins, *encode(tokenizer, item.context + item.question).tolist()] for item in items]
        longest, pad = max(map(len, prompts)), padding_token(tokenizer)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = _generate(model, tokenizer, ids, tokens, attention_mask=mask.to(model.device))
        return tokenizer.batch_decode(found[:, longest:], skip_special_tokens=True)


def _from_memory(model: Any, tokenizer: Any, item: Item, tokens: int) -> str:
    question = torch.from_numpy(encode(tokenizer, item.question).astype("int64"))[None]
    if not isinstance(model, AtlasForCausalLM) or model.config.block in ("attention", "swa"):
        ids = torch.cat([torch.tensor([_begins(tokenizer)], dtype=torch.long), question], 1)
        mask = torch.ones_like(ids).to(model.device)
        found = _generate(model, tokenizer, ids, tokens, attention_mask=mask)[:, ids.shape[1] :]
    else:
        memory: Memory = model.read(item.context, tokenizer)
        if window := model.config.attention_window:  # what a window has seen, the window of the next layer sees
            passed = NOISE
            while len(noise := encode(tokenizer, passed)) < window * model.config.num_hidden_layers:
                passed += f" {passed}"
            memory = model.read(torch.from_numpy(noise.astype("int64"))[None], memory=memory)
        found = _generate(model, tokenizer, question, tokens, memory=memory)[:, question.shape[1] :]
    return str(tokenizer.decode(found[0], skip_special_tokens=True))


def _generate(model: Any, tokenizer: Any, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    ends, pad = tokenizer.eos_token_id, padding_token(tokenizer)
    choice = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": ends, "pad_token_id": pad}
    return model.generate(ids.to(model.device), **choice, **options)


def _begins(tokenizer: Any) -> list[int]:
    """The tokens with which a text begins: those that the tokenizer adds, or else the one before every text."""
    begins = tokenizer("").input_ids
    return begins or [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
