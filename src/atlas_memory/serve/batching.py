"""Continuous batching: a decoding step makes a token of every running request, whatever each has read before.

States have the same size wherever a request stands in its text, so those of several requests are rows of one batch. A
request joins after its prefill, and leaves when it ends. States that grow are batched where they are equally long.
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
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from atlas_memory.eval.sampling import RaiseIfNotFinite
from atlas_memory.models import AtlasCache, Memory
from atlas_memory.models.layer_facts import layer_facts

PREFILL = 1024  # tokens of a prompt that are read between two decoding steps of other requests


@dataclass(eq=False)
class Request:
    """A prompt, how it is continued, and how far that is.

    Args:
        memory: What was read before the prompt.
        ids: The prompt, int64 `[1, time]`; later with the new tokens.
        max_new_tokens: As in transformers.
        processors: Of logits, before a token is chosen.
        criteria: After which token it stops.
        generator: For sampling; None: the likeliest token is taken.
        on_token: Called with each new token; what it raises ends the request.
        on_end: Called with what the memory holds then, before `result` is there; None: nobody asks for it.

    Attributes:
        result: The new tokens, or what was raised.
    """

    memory: Memory
    ids: Tensor
    max_new_tokens: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generator: torch.Generator | None
    on_token: Callable[[int], None]
    on_end: Callable[[Memory], None] | None
    result: Future[list[int]] = field(default_factory=Future)
    new: list[int] = field(default_factory=list)
    prefill: deque[Tensor] = field(init=False)
    cache: AtlasCache = field(init=False)

    def __post_init__(self) -> None:
        self.result.set_running_or_notify_cancel()
        # The last token is read alone, as `generate` does: another cut may change the last bit.
        pieces = [torch.tensor([[self.memory.last_token]]), *self.ids.split(PREFILL, 1)]
        self.prefill = deque(piece for piece in pieces if piece.shape[1])
        self.cache = self.memory.cache()

    def add_token(self, logits: Tensor) -> bool:
        """Choose the next token by logits `[1, vocabulary]`; whether it is the last."""
        scores = self.processors(cast(Any, self.ids), cast(Any, logits))
        if self.generator is None:
            token = int(scores.argmax())
        else:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self.generator))
        self.new.append(token)
        self.ids = torch.cat([self.ids, torch.tensor([[token]])], 1)
        self.on_token(token)
        return len(self.new) >= self.max_new_tokens or bool(self.criteria(self.ids, scores))

    def now(self, model: Any) -> Memory:
        """What the memory holds. The half-lives are those of what it held before the prompt."""
        states = tuple(block.state for block in self.cache.blocks)
        before = {layer.name: layer.half_life for layer in self.memory.layers}
        layers = (replace(layer, half_life=before.get(layer.name)) for layer in layer_facts(model, states, {}))
        return replace(
            self.memory,
            states=states,
            last_token=self.new[-1],
            tokens=self.memory.tokens + self.ids.shape[1],
            layers=tuple(layers),
        )

    def end(self, memory: Memory | None) -> None:
        """Hand over what the memory holds, if it is asked for, and give the result."""
        try:
            if self.on_end is not None and memory is not None:
                self.on_end(memory)
            self.result.set_result(self.new)
        except Exception as error:
            self.result.set_exception(error)


def make_request(
    memory: Memory, ids: Tensor, config: GenerationConfig, tokenizer: Any, seed: int | None, **calls: Any
) -> Request:
    """A request with the fields of `config`: `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`,
    `repetition_penalty`, `eos_token_id` and `stop_strings`; others have no effect. ValueError for values out of range.
    """
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
    criteria = StoppingCriteriaList()
    if config.eos_token_id is not None:
        criteria.append(EosTokenCriteria(config.eos_token_id))
    if config.stop_strings:
        criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    if not isinstance(config.max_new_tokens, int) or config.max_new_tokens < 1:
        raise ValueError(f"max_tokens={config.max_new_tokens!r} must be at least 1")
    return Request(memory, ids, config.max_new_tokens, processors, criteria, generator, **calls)


class Engine:
    """Continues requests with a model, up to `max_batch_size` at a time, on a thread of its own.

    The model has no gradients from then on: where two threads use a parameter that has one, each may wait for ever, the
    one for a lock of PyTorch's and the other for Python's.
    """

    def __init__(self, model: Any, max_batch_size: int = 16) -> None:
        self.model, self.max_batch_size = model.requires_grad_(False), max_batch_size
        self._device = next(model.parameters()).device
        self._waiting: SimpleQueue[Request] = SimpleQueue()
        self._prefilling: deque[Request] = deque()
        self._batches: list[tuple[list[Request], AtlasCache]] = []
        # Disks may be slow, and others go on meanwhile. One thread: what ends later is saved later.
        self._ending = ThreadPoolExecutor(1, "ending")
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, request: Request) -> Future[list[int]]:
        """Begin a request as soon as there is room; its `result`."""
        self._waiting.put(request)
        return request.result

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            self._admit()
            self._decode(self._prefill())

    def _admit(self) -> None:
        """Take requests that wait; wait for one if there is nothing to do."""
        while (busy := len(self._prefilling) + sum(len(rows) for rows, _ in self._batches)) < self.max_batch_size:
            try:
                self._prefilling.append(self._waiting.get(block=not busy))
            except Empty:
                return

    def _prefill(self) -> list[Request]:
        """Read the next piece of the prompt whose turn it is; the request, if it has its first token and goes on."""
        if not self._prefilling:
            return []
        request = self._prefilling.popleft()
        try:
            logits = self._logits(request.prefill.popleft(), request.cache)
            if request.prefill:
                self._prefilling.append(request)
            elif not request.add_token(logits):
                return [request]
            else:
                self._end(request)
        except Exception as error:
            request.result.set_exception(error)
        return []

    def _decode(self, joining: list[Request]) -> None:
        """A step of every request; then let in those that are `joining`."""
        going: list[Request] = []
        for rows, cache in self._batches:
            going += self._step(rows, cache)
        if joining or len(going) < sum(len(rows) for rows, _ in self._batches):
            self._batches = _batches([*going, *joining])

    def _step(self, rows: list[Request], cache: AtlasCache) -> list[Request]:
        """The requests that go on after one more token."""
        going: list[Request] = []
        try:
            logits = self._logits(torch.tensor([request.new[-1:] for request in rows]), cache)
        except Exception as error:
            for request in rows:
                request.result.set_exception(error)
            return []
        for i, request in enumerate(rows):
            for block, whole in zip(request.cache.blocks, cache.blocks, strict=True):
                block.restore(whole.state.map(lambda t, i=i: t[i : i + 1]), 0)
            try:
                if request.add_token(logits[i : i + 1]):
                    self._end(request)
                else:
                    going.append(request)
            except Exception as error:  # also where nobody listens any more
                request.result.set_exception(error)
        return going

    def _end(self, request: Request) -> None:
        # Here, on the thread that reads with the model.
        self._ending.submit(request.end, None if request.on_end is None else request.now(self.model))

    def _logits(self, ids: Tensor, cache: AtlasCache) -> Tensor:
        """Of the token after ids `[rows, time]`, `[rows, vocabulary]` on the CPU."""
        found = self.model(input_ids=ids.to(self._device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return found.logits[:, -1].float().cpu()


def _batches(requests: Sequence[Request]) -> list[tuple[list[Request], AtlasCache]]:
    """Requests whose states have the same shapes, and these states as rows of one cache."""
    alike: dict[Any, list[Request]] = {}
    for request in requests:
        shapes = tuple(t.shape for block in request.cache.blocks for t in block.state.tensors())
        alike.setdefault(shapes, []).append(request)
    found = []
    for rows in alike.values():
        cache = AtlasCache(len(rows[0].cache.blocks))
        for i, layer in enumerate(cache.blocks):
            states = [request.cache.blocks[i].state for request in rows]
            parts = [iter(list(state.tensors())) for state in states]
            layer.restore(states[0].map(lambda _, parts=parts: torch.cat([next(part) for part in parts])), 0)
        found.append((rows, cache))
    return found
