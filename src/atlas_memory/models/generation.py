"""`generate` of transformers with an Atlas cache, into which no padding is read; and `read`, which makes a `Memory`."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from .cache import CACHE, AtlasCache, FinishedRows, check_cache
from .inputs import check_ids
from .layer_facts import layer_facts, retention_gates
from .saved_memory import Memory, ReadText

PREFILL = 8192  # tokens that are read at a time
TEXT_PIECE = 2**16  # characters that are tokenised at a time
DOCUMENT_ARGUMENTS = ("document_starts", "cu_seq_lens_q")


class AtlasGenerationMixin(GenerationMixin):
    """`generate` of a model whose state is an `AtlasCache`, and `read`."""

    config: Any

    @torch.no_grad()
    def read(
        self,
        text: str | Tensor,
        tokenizer: Any = None,
        memory: Memory | None = None,
        name: str = "text",
    ) -> Memory:
        """What the model holds after reading a text, in a state of constant size.

        Args:
            text: Or its token ids, int64 `[1, time]`, of which `Memory.texts` does not tell.
            tokenizer: Of a text, which is tokenised in pieces, cut at ends of lines, as `atlas read` does. Special
                tokens in a text are read as plain text.
            memory: Read on from it; None: from `Memory.empty`. It stays as it is.
            name: Of the text, in `Memory.texts`.

        Raises:
            ValueError: No token, ids of several rows, a text without a tokenizer, or a memory of another model.
        """
        memory = Memory.empty(self) if memory is None else check_memory(memory, self)
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("a text is read with its tokenizer: give tokenizer=..., or token ids")
            before, encoded = memory, text.encode()
            for piece in _pieces(text):
                found = tokenizer(piece, add_special_tokens=False, split_special_tokens=True).input_ids
                memory = self.read(torch.tensor([found], dtype=torch.long), memory=memory)
            read = ReadText(name, len(encoded), hashlib.sha256(encoded).hexdigest())
            return replace(memory, texts=(*before.texts, read))
        check_ids("the ids given to read", text, self.config.vocab_size)
        if len(text) != 1 or not text.shape[1]:
            raise ValueError(f"one text with at least one token is read at a time, got ids of shape {list(text.shape)}")
        device = next(self.parameters()).device  # type: ignore[attr-defined]
        cache, model = memory.cache(), self.model  # type: ignore[attr-defined]
        ids = torch.cat([torch.tensor([[memory.last_token]]), text.long().cpu()], 1)
        with retention_gates(self) as gates:
            for piece in ids[:, :-1].split(PREFILL, 1):
                model(input_ids=piece.to(device), past_key_values=cache, use_cache=True)
        states = tuple(block.state for block in cache.blocks)
        tokens = memory.tokens + text.shape[1]
        return replace(
            memory,
            states=states,
            last_token=int(ids[0, -1]),
            tokens=tokens,
            layers=layer_facts(self, states, gates),
        )

    def generate(self, inputs: Any = None, *args: Any, memory: Memory | None = None, **kwargs: Any) -> Any:
        """As in transformers; and with a `memory` from what it has read, which does not change.

        The ids are then new ones, `[batch, time]`, behind what was read; none, or of no tokens: the model goes on from
        there. What is returned begins with them, as without a memory.

        Raises:
            ValueError: The memory is of another model, or a cache or embeddings are given beside it.
        """
        parent: Any = super()
        if memory is None:
            return parent.generate(inputs, *args, **kwargs)
        for other in ("past_key_values", "cache", "inputs_embeds"):
            if kwargs.get(other) is not None:
                raise ValueError(f"memory is what was read: leave {other} out")
        check_memory(memory, self)
        cache, model = memory.cache(), self.model  # type: ignore[attr-defined]
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        rows = 1 if ids is None else len(ids)
        last = torch.full((rows, 1), memory.last_token, device=next(model.parameters()).device)
        alone = ids is None or not ids.shape[1]
        if alone:
            kwargs.pop("attention_mask", None)
        else:
            with torch.no_grad():
                model(input_ids=last[:1], past_key_values=cache, use_cache=True)
            for block in cache.blocks:
                block.seen = 0
        cache.batch_repeat_interleave(rows)
        found = parent.generate(last if alone else ids, *args, **{CACHE: cache}, **kwargs)
        if alone and isinstance(found, Tensor):
            found = found[:, 1:]
        elif alone:
            found.sequences = found.sequences[:, 1:]
        return found

    def _prepare_model_inputs(self, inputs: Any = None, bos_token_id: Any = None, model_kwargs: Any = None) -> Any:
        """As in transformers, with the ids checked."""
        given = inputs if inputs is not None else (model_kwargs or {}).get("input_ids")
        if given is not None:
            check_ids("the ids given to generate", given, self.config.vocab_size)
        parent: Any = super()
        return parent._prepare_model_inputs(inputs, bos_token_id, model_kwargs)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: a memory needs no positions."""

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Make an Atlas cache instead of one for keys and values."""
        if generation_config.cache_implementation is not None:
            name = generation_config.cache_implementation
            raise ValueError(f"cache_implementation={name!r} is for keys and values: leave it out")
        given = model_kwargs.get(CACHE) is not None
        if given and generation_config.use_cache is False:
            raise ValueError("use_cache=False reads everything again at each token, past_key_values too: leave one out")
        if not given and generation_config.use_cache is not False:
            model_kwargs[CACHE] = AtlasCache(self.config.num_hidden_layers)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        for name in DOCUMENT_ARGUMENTS:
            if model_kwargs.pop(name, None) is not None and model_kwargs.get(CACHE) is None:
                raise ValueError(f"use_cache=False reads the prompt again at every token: leave it or {name} out")
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        cache = updated.get(CACHE)
        if not isinstance(cache, AtlasCache) or cache.finished is None:
            return updated
        rows = cache.finished.rows
        if rows is not None and len(rows) > 1 and bool(rows.any()):  # what comes next in these is padding
            if updated.get("attention_mask") is None:  # which transformers leaves out where all tokens are real
                updated["attention_mask"] = rows.new_ones(len(rows), cache.get_seq_length() + 1, dtype=torch.long)
            updated["attention_mask"][:, -1] *= ~rows
        return updated

    def _sample(self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but the cache does not read the padding behind rows that have ended. Without an
        end-of-text token transformers does not pad them."""
        parent: Any = super()
        cache = kwargs.get(CACHE)
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if not isinstance(cache, AtlasCache) or not pads:
            return parent._sample(input_ids, logits_processor, stopping_criteria, *args, **kwargs)
        cache.finished = FinishedRows(stopping_criteria)
        try:
            return parent._sample(input_ids, logits_processor, cache.finished, *args, **kwargs)
        finally:
            cache.finished = None

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the cache then holds the last beams, which are not the text returned."""
        parent: Any = super()
        try:
            return parent._beam_search(*args, **kwargs)
        finally:
            if isinstance(cache := kwargs.get(CACHE), AtlasCache):
                cache.after_beam_search = True

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: ValueError."""
        raise ValueError("continuous batching is for keys and values in pages; call generate, with padding on the left")

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> Any:
        """The first call of `generate`: new ids alone (see `AtlasCache`), `PREFILL` at a time to bound memory."""
        model: Any = self
        cache: Any = model_kwargs.get(CACHE)
        embedded = model_kwargs.get("inputs_embeds")
        time = (input_ids if embedded is None else embedded).shape[1]
        if not time:
            raise ValueError("generate was given no token to begin with: give one, such as the end-of-text token")
        marks = [name for name in DOCUMENT_ARGUMENTS if model_kwargs.get(name) is not None]
        if cache is None:
            inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
            return model(**inputs, return_dict=True)
        check_cache(cache, self.config.num_hidden_layers)
        cache.repeat_rows(len(input_ids), max(generation_config.num_beams, generation_config.num_return_sequences))
        new, mask = _new_tokens(input_ids, cache, model_kwargs, getattr(generation_config, "_mask_length", -1))
        if embedded is not None:
            pieces, length, left = [input_ids], new, 0
        else:
            whole = marks or generation_config.output_hidden_states
            size = new if whole else generation_config.prefill_chunk_size or PREFILL
            pieces, length, left = input_ids[:, time - new :].split(size, 1), None, new
        for ids in pieces:
            left = max(left - ids.shape[1], 0)
            if mask is not None:
                model_kwargs["attention_mask"] = mask[:, : mask.shape[1] - left]
            inputs = model.prepare_inputs_for_generation(ids, length, is_first_iteration=True, **model_kwargs)
            outputs = model(**inputs, return_dict=True)
        return outputs


def _pieces(text: str) -> Iterator[str]:
    """A text in parts of about `TEXT_PIECE` characters, cut at ends of lines (`text_of` of the readers)."""
    begin = end = 0
    while len(text) - end >= TEXT_PIECE:
        end += TEXT_PIECE
        cut = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:cut]
        begin = cut
    if begin < len(text) or not text:
        yield text[begin:]


def check_memory(memory: Any, model: Any) -> Memory:
    """ValueError unless it is a `Memory` of this model."""
    if not isinstance(memory, Memory):
        raise ValueError(f"memory must be a Memory, got {type(memory).__name__}: Memory.load(path, model) reads a file")
    memory.check_model(model)
    return memory


def _new_tokens(
    input_ids: Tensor, cache: AtlasCache, model_kwargs: dict[str, Any], mask_length: int
) -> tuple[int, Tensor | None]:
    """How many of the last ids, or embeddings, the cache has not read, and the mask of all tokens up to them.
    `mask_length` is that of a mask of ones, which transformers drops."""
    embedded, mask, seen = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask"), cache.get_seq_length()
    what, time = ("ids", input_ids.shape[1]) if embedded is None else ("embeddings", embedded.shape[1])
    if (mask_length if mask is None else mask.shape[1]) > time:
        return time, mask
    if time > seen:
        return time - seen, mask
    if time == seen:
        raise ValueError(
            f"the {time} {what} given to generate are as many as past_key_values has read: give the whole text, new "
            f"tokens included, or new tokens alone with an attention_mask of {seen} + {time} entries"
        )
    return time, None if mask is None else nn.functional.pad(mask, (seen, 0), value=1)
