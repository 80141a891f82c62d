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

# The name of the cache in outputs and in `generate`: transformers renamed it in 5.24.
CACHE = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else "past_key_values"


class AtlasCacheLayer(CacheLayerMixin):
    """The state of one block (None before the first token; detached unless `keep_graph`) and `seen`, the columns of
    tokens read, padding included."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "AtlasCacheLayer":
        if self.state is not None and not all(tensor.is_leaf for tensor in self.state.tensors()):
            raise ValueError("past_key_values keeps its graph, which cannot be copied: detach() it first")
        memo[id(self)] = copied = type(self)()
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __init__(self, keep_graph: bool = False, straight_through: bool = False) -> None:
        super().__init__()
        self.keep_graph, self.straight_through = keep_graph, straight_through
        self.state: Any = None
        self.seen = 0

    def check(self, where: str) -> None:
        """ValueError unless a layer that was loaded from a file holds a count and a state."""
        if type(self.seen) is not int or not 0 <= self.seen <= MAX_TOKENS:
            raise ValueError(f"{where} has seen={self.seen!r}, which counts tokens, from 0 to {MAX_TOKENS:,}")
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
        """Set a saved state and its count of columns."""
        self.state, self.seen, self.is_initialized = state, seen, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the block makes the state."""

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
        """Nothing: the state is small."""

    prefetch = offload

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
    """Stopping criteria of `generate` that remember which rows have ended: `rows`, bool `[batch]`, None at first."""

    rows: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        done = super().__call__(*args, **kwargs)
        self.rows = done if self.rows is None else self.rows | done
        return done


class AtlasCache(Cache):
    """One `AtlasCacheLayer` for each of `num_hidden_layers` blocks; pass it as `past_key_values`.

    A call of the model reads all of its ids. `generate` reads the new ones: more ids than the cache has read are the
    whole text, of which the first are skipped; fewer are new ones, and so are all ids beside a longer attention mask.

    Args:
        num_hidden_layers: Of the model.
        keep_graph: Let gradients flow into earlier calls, until `detach`.
        straight_through: Let gradients flow to M_0 from a detached state, as if nothing of M_0 were forgotten;
            otherwise only fresh documents train M_0.
    """

    def __init__(self, num_hidden_layers: int, keep_graph: bool = False, straight_through: bool = False) -> None:
        super().__init__(layers=[AtlasCacheLayer(keep_graph, straight_through) for _ in range(num_hidden_layers)])
        self.finished: FinishedRows | None = None  # while `generate` writes
        self.after_beam_search = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "AtlasCache":
        memo[id(self)] = copied = type(self)(0)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Called by `torch.load`: ValueError unless the file holds what a cache can."""
        AtlasCache.__init__(self, 0)
        self.layers = layers if isinstance(layers := saved.get("layers"), list) else []
        self.after_beam_search = saved.get("after_beam_search", False)
        for i, layer in enumerate(self.layers):
            if isinstance(layer, AtlasCacheLayer):
                layer.check(f"layer {i} of the cache")
        check_cache(self, len(self.layers))

    def repeat_rows(self, rows: int, times: int) -> None:
        """Repeat every row `times` where that makes the `rows` to be read, as in beam search."""
        state = self.blocks[0].state
        first = None if state is None else next(state.tensors(), None)
        if times > 1 and first is not None and first.shape[0] * times == rows:
            self.batch_repeat_interleave(times)

    def reset(self) -> None:
        super().reset()
        self.after_beam_search = False

    def detach(self) -> None:
        """Keep the states, without their graph."""
        for block in self.blocks:
            if block.state is not None:
                block.state = block.state.detach()

    @property
    def blocks(self) -> list[AtlasCacheLayer]:
        """The layers, checked."""
        return check_cache(self, len(self.layers))


# so that torch.load reads them with weights_only=True
torch.serialization.add_safe_globals([AtlasCache, AtlasCacheLayer])


def one_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache given under either name; ValueError for two different ones."""
    if past_key_values is not None and cache is not None and cache is not past_key_values:
        raise ValueError("past_key_values and cache are two names of one argument: give one of them")
    return cache if past_key_values is None else past_key_values


def check_cache(cache: Any, num_hidden_layers: int) -> list[AtlasCacheLayer]:
    """The layers of `past_key_values`; ValueError unless it is a whole Atlas cache of so many blocks."""
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(layer, AtlasCacheLayer) for layer in layers):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but an Atlas model keeps states of its own: pass what it "
            "returned, or AtlasCache(config.num_hidden_layers)"
        )
    if getattr(cache, "after_beam_search", False):
        raise ValueError(
            "past_key_values was left by beam search, with its last beams: begin with a new one, or a copy from before"
        )
    if len(layers) != num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(layers)} layers but the model has {num_hidden_layers}: pass what it returned"
        )
    if len(read := {layer.seen for layer in layers}) > 1:
        raise ValueError(
            f"past_key_values was left by a call that failed: its layers have read {sorted(read)} tokens; begin with a "
            "new one, or a copy from before"
        )
    return layers
