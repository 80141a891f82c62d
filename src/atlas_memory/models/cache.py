"""The state of an Atlas model as a transformers cache."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class AtlasCacheLayer(CacheLayerMixin):
    """The state of one block: memory and window of attention; keys and values of every token in full attention only.

    Attributes:
        state: What the block returned, or None before the first token; without its graph, unless `keep_graph`.
        anchored: Whether the gradient that reaches the state goes on to M_0; see `AtlasCache`.
        seen: Columns of tokens read, padding included, as `generate` counts them.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, keep_graph: bool = False, anchored: bool = False) -> None:
        super().__init__()
        self.keep_graph, self.anchored = keep_graph, anchored
        self.state: Any = None
        self.seen = 0

    def write(self, state: Any, tokens: int) -> None:
        """Replace the state after reading `tokens` more columns."""
        self.state = state if self.keep_graph else state.detach()
        self.seen += tokens
        self.is_initialized = True

    def restore(self, state: Any, seen: int) -> None:
        """Put back a state that was kept elsewhere, and how many columns had been read."""
        self.state, self.seen, self.is_initialized = state, seen, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The state is made by the block itself, so nothing is done here."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError("an Atlas cache holds no keys and values; use write(state, tokens)")

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    # The name of get_max_length in the first releases of transformers 5.
    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """The state is small and used at once: it stays where it is."""

    def prefetch(self) -> None:
        """See `offload`."""

    def reset(self) -> None:
        self.state, self.seen, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.map(lambda x: x.index_select(0, indices.to(x.device)))

    def crop(self, *args: Any) -> None:
        raise ValueError("a memory cannot forget its last tokens: cropping an Atlas cache is impossible")


class AtlasCache(Cache):
    """One `AtlasCacheLayer` for each of `num_hidden_layers` blocks; pass it as `past_key_values`.

    Args:
        num_hidden_layers: Of the model.
        keep_graph: Let gradients flow from one call into those before it; `detach` ends that.
        anchored: Let gradients flow to M_0 from a state that is read on from, as if the state were M_0 and what was
            added since, nothing of it forgotten. For states without their graph: M_0 would be trained by fresh
            documents alone.
    """

    def __init__(self, num_hidden_layers: int, keep_graph: bool = False, anchored: bool = False) -> None:
        super().__init__(layers=[AtlasCacheLayer(keep_graph, anchored) for _ in range(num_hidden_layers)])

    def detach(self) -> None:
        """Keep what was read, and let go of the graph by which it was made."""
        for block in self.blocks:
            if block.state is not None:
                block.state = block.state.detach()

    @property
    def blocks(self) -> list[AtlasCacheLayer]:
        """The part of each block."""
        return check_cache(self, len(self.layers))


def check_cache(cache: Any, num_hidden_layers: int) -> list[AtlasCacheLayer]:
    """The layers of a cache given as `past_key_values`.

    Raises:
        ValueError: It is not an Atlas cache of so many blocks.
    """
    layers = getattr(cache, "layers", None)
    if not layers or not all(isinstance(layer, AtlasCacheLayer) for layer in layers):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but an Atlas model keeps "
            "states of its own; pass the past_key_values that it returned, or AtlasCache(config.num_hidden_layers)"
        )
    if len(layers) != num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(layers)} layers but the model has {num_hidden_layers}; "
            "pass the one that this model returned"
        )
    return layers
