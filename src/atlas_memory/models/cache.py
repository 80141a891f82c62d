"""The state of an Atlas model as a transformers cache."""

import copy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..rules.state import MAX_TOKENS, check_numbers

CACHE = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else "past_key_values"
"""The name of the cache in outputs and in `generate`: transformers renamed past_key_values to cache in 5.24."""


class AtlasCacheLayer(CacheLayerMixin):
    """The state of one block, or None before the first token, without its graph unless `keep_graph`; and `seen`, the
    columns of tokens that were read, padding included, as `generate` counts them."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "AtlasCacheLayer":
        if self.state is not None and not all(tensor.is_leaf for tensor in self.state.tensors()):
            raise ValueError(
                "past_key_values keeps the graph of what was read, which cannot be copied: detach() it first"
            )
        memo[id(self)] = copied = type(self)()
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __init__(self, keep_graph: bool = False, straight_through: bool = False) -> None:
        super().__init__()
        self.keep_graph, self.straight_through = keep_graph, straight_through
        self.state: Any = None
        self.seen = 0

    def check(self, where: str) -> None:
        """ValueError unless it holds what the layer of a cache can that was kept `where`."""
        if not _is_count(self.seen):
            raise ValueError(
                f"{where} has seen={self.seen!r}, which counts tokens: it must be from 0 to {MAX_TOKENS:,}"
            )
        if self.state is not None:
            try:
                tensors = list(self.state.named_tensors())
            except AttributeError as error:
                raise ValueError(f"{where} has no state, but {self.state!r}: begin with a new cache") from error
            check_numbers(tensors, where)

    def write(self, state: Any, tokens: int) -> None:
        """Replace the state after reading `tokens` more columns."""
        self.state = state if self.keep_graph else state.detach()
        self.seen += tokens
        self.is_initialized = True

    def restore(self, state: Any, seen: int) -> None:
        """Put back a state that was kept elsewhere, and how many columns had been read."""
        self.state, self.seen, self.is_initialized = state, seen, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the block makes its state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("an Atlas cache holds no keys and values; use write(state, tokens)")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no limit

    get_max_cache_shape = get_max_length  # its name in the first releases of transformers 5

    def offload(self) -> None:
        """Nothing: the state is small and used at once."""

    def prefetch(self) -> None:
        """Nothing, as `offload`."""

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x[torch.as_tensor(indices, device=x.device)])

    def crop(self, *args: Any) -> None:
        raise ValueError("a memory cannot forget its last tokens: cropping an Atlas cache is impossible")


class FinishedRows(StoppingCriteriaList):
    """The stopping criteria of `generate`, and which rows have ended by them: `rows`, bool `[batch]`, or None before
    the first token."""

    rows: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        self.rows = done if self.rows is None else self.rows | done
        return done


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS


def _hash_ids(ids: Tensor, before: Tensor) -> Tensor:
    """A hash of the ids of each row, int64 `[batch]`: a polynomial of them with Knuth's factor, modulo 2^64. `before`:
    that of the ids before these `[batch, time]`."""
    factor = 6364136223846793005
    if ids.shape[1] == 1:  # in decoding, at the least cost
        return before * factor + ids[:, 0]
    powers = torch.full((ids.shape[1] + 1,), factor, device=ids.device)
    powers[0] = 1
    powers = powers.cumprod(0).flip(0)
    return before * powers[0] + (ids * powers[1:]).sum(1)


class AtlasCache(Cache):
    """One `AtlasCacheLayer` for each of `num_hidden_layers` blocks; pass it as `past_key_values`.

    A call of the model reads all the ids beside it. `generate` reads what is new of them: ids longer than what the
    cache has read are the whole text, and begin with that; fewer ids are new ones. An attention mask longer than
    the ids says that all of them are new.

    Args:
        num_hidden_layers: Of the model.
        keep_graph: Let gradients flow from one call into those before it; `detach` ends that.
        straight_through: Let gradients flow to M_0 from a state that is read on from, as if the state were M_0 and what
            was added since, nothing of it forgotten. For states without their graph: M_0 would be trained by fresh
            documents alone.
    """

    def __init__(self, num_hidden_layers: int, keep_graph: bool = False, straight_through: bool = False) -> None:
        super().__init__(layers=[AtlasCacheLayer(keep_graph, straight_through) for _ in range(num_hidden_layers)])
        self._ids: Tensor | None = None  # the hash of those that were read, [batch]; None where they are not known
        self._first = 0  # the place where they begin
        self.finished: FinishedRows | None = None  # while `generate` writes
        self.after_beam_search = False  # what was read is of its last beams

    def __deepcopy__(self, memo: dict[int, Any]) -> "AtlasCache":
        memo[id(self)] = copied = type(self)(0)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, held: dict[str, Any]) -> None:
        """Take what a file holds, as `torch.load` reads it. ValueError unless it is what a cache can hold."""
        AtlasCache.__init__(self, 0)
        self.layers = layers if isinstance(layers := held.get("layers"), list) else []
        self._ids, self._first = held.get("_ids"), held.get("_first", 0)
        self.after_beam_search = held.get("after_beam_search", False)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, AtlasCacheLayer):
                layer.check(f"layer {i} of the cache")
        check_cache(self, len(self.layers))
        if not _is_count(self._first) or not isinstance(self._ids, Tensor | None):
            raise ValueError("the cache does not say what it has read: begin with a new one")

    def add_ids(self, ids: Tensor | None) -> None:
        """Remember the hash of the ids that were read last, int64 `[batch, time]`; None after embeddings."""
        if ids is None:
            self._ids = None
            return
        if self._ids is None:
            self._ids = ids.new_zeros(len(ids), dtype=torch.int64)
            self._first = self.get_seq_length() - ids.shape[1]
        self._ids = _hash_ids(ids, self._ids.to(ids.device))

    def is_read_in(self, ids: Tensor) -> bool:
        """Whether ids `[batch, time]` for `generate` begin with what was read, and are not new ones alone; ValueError
        where they are longer and begin otherwise, or are just what was read."""
        seen, time = self.get_seq_length(), ids.shape[1]
        read = self._ids
        if not seen or time < seen or read is None or len(read) != len(ids):
            return time > seen
        read = read.to(ids.device)
        known = bool((_hash_ids(ids[:, self._first : seen], torch.zeros_like(read)) == read).all())
        if known == (time > seen):
            return known
        what = "are what past_key_values has read" if known else f"do not begin with the {seen} that it has read"
        raise ValueError(
            f"the {time} ids given to generate {what}: give the whole text, new tokens included, or new tokens alone "
            f"with an attention_mask of {seen} + {time} entries, or begin with a new cache"
        )

    def repeat_rows(self, rows: int, times: int) -> None:
        """Repeat every row where each is the past of `times` of the `rows` that are to be read, as in beam search."""
        state = self.blocks[0].state
        first = None if state is None else next(state.tensors(), None)
        if times > 1 and first is not None and first.shape[0] * times == rows:
            self.batch_repeat_interleave(times)

    def reset(self) -> None:
        super().reset()
        self._ids, self.after_beam_search = None, False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._ids is not None:
            self._ids = self._ids.repeat_interleave(repeats)

    def _take_rows(self, rows: Tensor) -> None:
        if self._ids is not None:
            self._ids = self._ids[torch.as_tensor(rows, device=self._ids.device)]

    def detach(self) -> None:
        """Keep what was read, and let go of the graph by which it was made."""
        for block in self.blocks:
            if block.state is not None:
                block.state = block.state.detach()

    @property
    def blocks(self) -> list[AtlasCacheLayer]:
        """The part of each block."""
        return check_cache(self, len(self.layers))


# torch.load then reads them with weights_only=True, as it reads states.
torch.serialization.add_safe_globals([AtlasCache, AtlasCacheLayer])


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache given under either name; ValueError for two different ones."""
    if past_key_values is not None and cache is not None and cache is not past_key_values:
        raise ValueError("past_key_values and cache are two names of one argument: give one of them")
    return cache if past_key_values is None else past_key_values


def check_cache(cache: Any, num_hidden_layers: int) -> list[AtlasCacheLayer]:
    """The layers of a cache given as `past_key_values`; ValueError where it is not an Atlas cache of so many blocks, or
    some of them have read on in a call that failed."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(layer, AtlasCacheLayer) for layer in layers):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but an Atlas model keeps "
            "states of its own; pass the past_key_values that it returned, or AtlasCache(config.num_hidden_layers)"
        )
    if getattr(cache, "after_beam_search", False):
        raise ValueError(
            "past_key_values was left by beam search, and has read its last beams, which are not the text that was "
            "returned: begin with a new one, or with a copy from before (copy.deepcopy)"
        )
    if len(layers) != num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(layers)} layers but the model has {num_hidden_layers}; "
            "pass the one that this model returned"
        )
    if len(read := {layer.seen for layer in layers}) > 1:
        raise ValueError(
            f"past_key_values was left by a call that failed in the middle: its layers have read {sorted(read)} "
            "tokens; begin with a new one, or with a copy from before that call"
        )
    return layers
