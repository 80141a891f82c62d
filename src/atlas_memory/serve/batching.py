"""Continuous batching: texts of many requests are written together, a token of each at a time, whatever each has read.

States have the same size wherever a text stands, so those of several texts are rows of one batch. A text joins it when
its prompt has been read, and leaves it when it ends. States that grow are rows of one batch where they are as long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from atlas_memory.eval.sampling import RaiseIfNotFinite
from atlas_memory.models import AtlasCache, Memory

PIECE = 1024  # tokens of a prompt that are read between two tokens of other texts


@dataclass(eq=False)
class Writing:
    """A text that is being written.

    Args:
        memory: What was read before.
        ids: The prompt, int64 `[1, time]`; then with what was written.
        tokens: How many are written at most.
        processors: Of logits, before a token is chosen.
        criteria: After which token the text ends.
        generator: Draws tokens; None: the likeliest is taken.
        on_token: Called with each token; what it raises ends the text.
        on_end: Called with what the memory holds then, before `result` is there.

    Attributes:
        result: The tokens that were written, or what was raised.
    """

    memory: Memory
    ids: Tensor
    tokens: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generator: torch.Generator | None
    on_token: Callable[[int], None]
    on_end: Callable[[Memory], None]
    result: Future[list[int]] = field(default_factory=Future)
    written: list[int] = field(default_factory=list)
    unread: deque[Tensor] = field(init=False)
    cache: AtlasCache = field(init=False)

    def __post_init__(self) -> None:
        self.result.set_running_or_notify_cancel()
        # The last token is read alone, as `generate` does: another cut may change the last bit.
        pieces = [torch.tensor([[self.memory.last_token]]), *self.ids.split(PIECE, 1)]
        self.unread = deque(piece for piece in pieces if piece.shape[1])
        self.cache = self.memory.cache()

    def write(self, logits: Tensor) -> bool:
        """Choose the next token by logits `[1, vocabulary]`; whether it is the last."""
        scores = self.processors(cast(Any, self.ids), cast(Any, logits))
        if self.generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        self.written.append(token)
        self.ids = torch.cat([self.ids, torch.tensor([[token]])], 1)
        self.on_token(token)
        return len(self.written) >= self.tokens or bool(self.criteria(self.ids, scores))

    def end(self) -> None:
        """Give the result."""
        try:
            states = tuple(block.state for block in self.cache.blocks)
            tokens = self.memory.tokens + self.ids.shape[1]
            self.on_end(replace(self.memory, states=states, last_token=self.written[-1], tokens=tokens, layers=()))
            self.result.set_result(self.written)
        except Exception as error:
            self.result.set_exception(error)


def writing(
    memory: Memory, ids: Tensor, config: GenerationConfig, tokenizer: Any, seed: int | None, **calls: Any
) -> Writing:
    """A text to be written as `config` says: `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`,
    `repetition_penalty`, `eos_token_id` and `stop_strings`. ValueError for values out of range."""
    processors = LogitsProcessorList([RaiseIfNotFinite()])
    if config.repetition_penalty not in (None, 1.0):
        processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    generator = None
    if config.do_sample:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        if config.temperature not in (None, 1.0):
            processors.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p not in (None, 1.0):
            processors.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            processors.append(MinPLogitsWarper(config.min_p))
    criteria = StoppingCriteriaList()
    if config.eos_token_id is not None:
        criteria.append(EosTokenCriteria(config.eos_token_id))
    if config.stop_strings:
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    if not isinstance(config.max_new_tokens, int) or config.max_new_tokens < 1:
        raise ValueError(f"max_tokens={config.max_new_tokens!r} must be at least 1")
    return Writing(memory, ids, config.max_new_tokens, processors, criteria, generator, **calls)


class Engine:
    """Writes texts with a model, up to `rows` at a time, on a thread of its own. The model has no gradients from then
    on: where two threads use a parameter that has one, PyTorch may wait for ever (a lock of it and Python's)."""

    def __init__(self, model: Any, rows: int = 16) -> None:
        self.model, self.rows = model.requires_grad_(False), rows
        self._device = next(model.parameters()).device
        self._waiting: SimpleQueue[Writing] = SimpleQueue()
        self._reading: deque[Writing] = deque()
        self._batches: list[tuple[list[Writing], AtlasCache]] = []
        # Disks may be slow, and others write meanwhile. One thread: what is saved later stands.
        self._ending = ThreadPoolExecutor(1, "ending")
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, text: Writing) -> Future[list[int]]:
        """Let a text be written; its `result`."""
        self._waiting.put(text)
        return text.result

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            self._accept()
            started = self._read()
            self._write(started)

    def _accept(self) -> None:
        """Take the texts that wait; wait for one if there is nothing to do."""
        while (busy := len(self._reading) + sum(len(texts) for texts, _ in self._batches)) < self.rows:
            try:
                self._reading.append(self._waiting.get(block=not busy))
            except Empty:
                return

    def _read(self) -> list[Writing]:
        """Read the next piece of the text whose turn it is; that text, if it has been read and has a first token."""
        if not self._reading:
            return []
        text = self._reading.popleft()
        try:
            logits = self._logits(text.unread.popleft(), text.cache)
            if text.unread:
                self._reading.append(text)
                return []
            if text.write(logits):
                self._ending.submit(text.end)
                return []
            return [text]
        except Exception as error:
            text.result.set_exception(error)
            return []

    def _write(self, started: list[Writing]) -> None:
        """Write one token of every text, and let those in that have `started`."""
        left: list[Writing] = []
        stays = True
        for texts, cache in self._batches:
            going, ended = self._step(texts, cache)
            left += going
            stays = stays and len(going) == len(texts)
            for text in ended:
                self._ending.submit(text.end)
        if started or not stays:
            self._batches = _batches([*left, *started])

    def _step(self, texts: list[Writing], cache: AtlasCache) -> tuple[list[Writing], list[Writing]]:
        """The texts that go on after one more token, and those that have ended."""
        going, ended = list[Writing](), list[Writing]()
        try:
            logits = self._logits(torch.tensor([text.written[-1:] for text in texts]), cache)
        except Exception as error:
            for text in texts:
                text.result.set_exception(error)
            return [], []
        for i, text in enumerate(texts):
            for block, whole in zip(text.cache.blocks, cache.blocks, strict=True):
                block.restore(whole.state.map(lambda t, i=i: t[i : i + 1]), 0)
            try:
                (ended if text.write(logits[i : i + 1]) else going).append(text)
            except Exception as error:  # also where nobody listens any more
                text.result.set_exception(error)
        return going, ended

    def _logits(self, ids: Tensor, cache: AtlasCache) -> Tensor:
        """Of the token after ids `[rows, time]`, `[rows, vocabulary]` on the CPU."""
        found = self.model(input_ids=ids.to(self._device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return found.logits[:, -1].float().cpu()


def _batches(texts: Sequence[Writing]) -> list[tuple[list[Writing], AtlasCache]]:
    """Texts whose states have the same shapes, and their states as rows of one cache."""
    alike: dict[Any, list[Writing]] = {}
    for text in texts:
        shapes = tuple(t.shape for block in text.cache.blocks for t in block.state.tensors())
        alike.setdefault(shapes, []).append(text)
    found = []
    for rows in alike.values():
        cache = AtlasCache(len(rows[0].cache.blocks))
        for i, layer in enumerate(cache.blocks):
            states = [text.cache.blocks[i].state for text in rows]
            parts = [iter(list(state.tensors())) for state in states]
            layer.restore(states[0].map(lambda _, parts=parts: torch.cat([next(part) for part in parts])), 0)
        found.append((rows, cache))
    return found
