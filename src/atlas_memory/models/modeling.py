"""Atlas language models for transformers: embeddings, memory blocks, a head."""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple

from ..layers.blocks import MemoryBlock
from ..layers.varlen import PackedRows
from .cache import CACHE, AtlasCache, check_cache, one_cache
from .configuration import AtlasConfig
from .generation import AtlasGenerationMixin
from .inputs import (
    IGNORE_INDEX,
    check_embeds,
    check_ids,
    check_labels,
    find_document_starts,
    mask_labels,
    mask_of_call,
    one_mask,
    refuse_unknown,
)


@dataclass
class AtlasModelOutput(BaseModelOutputWithPast):
    """Of `AtlasModel`; the cache is both `past_key_values` and `cache`."""


@dataclass
class AtlasCausalLMOutput(CausalLMOutputWithPast):
    """Of `AtlasForCausalLM`; see `AtlasModelOutput`."""


for _output in (AtlasModelOutput, AtlasCausalLMOutput):
    _other = "past_key_values" if CACHE == "cache" else "cache"
    setattr(_output, _other, property(lambda output: getattr(output, CACHE)))


class AtlasBlock(GradientCheckpointingLayer, MemoryBlock):
    """A `MemoryBlock` made from a configuration, whose activations transformers can recompute."""

    def __init__(self, config: AtlasConfig) -> None:
        hidden, mixer = cast(int, config.intermediate_size), config.mixer()
        if unsaved := {name for name, _ in mixer.named_buffers()} - mixer.state_dict().keys():
            raise ValueError(
                f"block={config.block!r} has buffers that are not saved with the model, {', '.join(sorted(unsaved))}: "
                "register_buffer(..., persistent=True)"
            )
        super().__init__(config.hidden_size, mixer, hidden, config.rms_norm_eps, config.continuum_periods)


class AtlasPreTrainedModel(PreTrainedModel):
    """Initialisation, and what transformers may do with the models."""

    config_class = AtlasConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AtlasBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    # A memory cannot be rewound, so assisted decoding is refused.
    _is_stateful = True

    def __init__(self, config: AtlasConfig) -> None:
        config.check()  # `from_pretrained` changes fields that it is given
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing, as for `AtlasConfig`."""

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # Custom code would be skipped where a module's own weights were loaded, although its M_0, in a parameter list,
        # may be missing.
        super()._initialize_weights(module, False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not _has_own_initialisation(module):
            super()._init_weights(module)
            return
        # A checkpoint may lack some of the parameters: those it has must survive.
        parameters = list(module.parameters())
        loaded = {p: p.clone() for p in parameters if getattr(p, "_is_hf_initialized", False)}
        if len(loaded) < len(parameters):
            module.reset_parameters()  # type: ignore[operator]
            for parameter, value in loaded.items():
                parameter.copy_(value)


def _has_own_initialisation(module: nn.Module) -> bool:
    """Whether it has a `reset_parameters` that is not PyTorch's."""
    own = getattr(type(module), "reset_parameters", None)
    return own is not None and own.__module__.partition(".")[0] not in ("torch", "transformers")


class AtlasModel(AtlasPreTrainedModel):
    """The model without a head: tokens to hidden states.

    Args:
        config: Its configuration.
    """

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([AtlasBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: AtlasCache | None = None,
        **kwargs: Any,
    ) -> AtlasModelOutput:
        """Read tokens.

        Args:
            input_ids: `[batch, time]` int64; or give `inputs_embeds` `[batch, time, hidden_size]`.
            attention_mask: `[batch, past + time]`, nonzero for real tokens; the past is not read again. Or a dict of
                such masks.
            past_key_values: The state to continue from, which is updated.
            use_cache: Return the state; by default `config.use_cache`, and not in training. False leaves
                `past_key_values` unchanged.
            output_hidden_states: Also return the embeddings and each block's output, the last one normed.
            document_starts: `[batch, time]`, nonzero at the first token of every document of a row, each of which is
                read as if alone; a row whose first token is not marked continues `past_key_values`.
            position_ids, cu_seq_lens_q: The same, in the form of transformers' collators (`find_document_starts`).
            cache: Another name of past_key_values, that of transformers since 5.24.
            kwargs: What transformers passes to every model; not used.

        Raises:
            ValueError: Not exactly one input, bad ids, a mask or cache that does not fit, or an unknown argument that
                would change the result.
        """
        refuse_unknown(kwargs)
        past_key_values = one_cache(past_key_values, cache)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is not None:
            check_ids("input_ids", input_ids, self.config.vocab_size)
        else:
            check_embeds(inputs_embeds, self.config.hidden_size)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        time, mask = x.shape[1], mask_of_call(attention_mask, x, past_key_values is not None)
        writes = use_cache is not False
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = AtlasCache(len(self.layers))
        caches = None if past_key_values is None else check_cache(past_key_values, len(self.layers))
        if caches and caches[0].keep_graph and self.training:
            _check_checkpointing(cast(AtlasBlock, self.layers[0]))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if position_ids is not None or cu_seq_lens_q is not None:
            has_read = _has_read(attention_mask, past_key_values, time)
            document_starts = find_document_starts(x, mask, has_read, document_starts, position_ids, cu_seq_lens_q)
        documents = PackedRows.from_starts(document_starts, x, self, mask)  # once for all layers

        hidden_states = [x] if output_hidden_states else None
        for i, layer in enumerate(self.layers):
            before = caches[i].state if caches else None
            x, state = layer(x, before, mask, documents, bool(caches and caches[i].straight_through))
            if caches and writes:
                caches[i].write(state, time)
            if hidden_states is not None:
                hidden_states.append(x)
        x = self.norm(x)
        if hidden_states is not None:
            hidden_states[-1] = x
        kept: dict[str, Any] = {CACHE: past_key_values if writes else None}
        return AtlasModelOutput(x, hidden_states=None if hidden_states is None else tuple(hidden_states), **kept)


class AtlasForCausalLM(AtlasPreTrainedModel, AtlasGenerationMixin):
    """The language model: `AtlasModel` and a head over the vocabulary.

    Args:
        config: Its configuration.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AtlasConfig) -> None:
        super().__init__(config)
        self.model = AtlasModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: AtlasCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_starts: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: AtlasCache | None = None,
        **kwargs: Any,
    ) -> AtlasCausalLMOutput:
        """Predict next tokens; arguments as for `AtlasModel.forward`, and these.

        Args:
            labels: `[batch, time]` int64, the inputs themselves (they are shifted here); -100 does not count, nor does
                the first token after padding. The first token of a document counts.
            logits_to_keep: Compute logits of the last so many positions (0: of all), or of these positions.
            kwargs: `shift_labels`, `[batch, time]` int64, the token after each, in place of labels; and
                `num_items_in_batch`, the labels of the whole step, by which the summed loss is divided
                (`mask_labels`). Here because Trainer expects every named argument with "labels" in a batch.
        """
        shift_labels = kwargs.pop("shift_labels", None)
        refuse_unknown(kwargs)
        past_key_values = one_cache(past_key_values, cache)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            document_starts=document_starts,
            position_ids=position_ids,
            cu_seq_lens_q=cu_seq_lens_q,
            return_dict=True,
        )
        ignore = kwargs.get("ignore_index", IGNORE_INDEX)
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None:
                check_labels(name, given, outputs.last_hidden_state, self.config.vocab_size, ignore)
                if not isinstance(logits_to_keep, int) or logits_to_keep:
                    raise ValueError(f"{name} need the logits of all tokens: leave logits_to_keep out")
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss = None
        if labels is not None or shift_labels is not None:
            real = mask_of_call(attention_mask, logits, past_key_values is not None)
            if real is not None:  # what follows padding is predicted from nothing
                if shift_labels is not None:
                    shift_labels = mask_labels(shift_labels, ~real, ignore, kwargs)
                elif labels is not None:
                    labels = F.pad(mask_labels(labels[:, 1:], ~real[:, :-1], ignore, kwargs), (1, 0), value=ignore)
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels.contiguous()
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return AtlasCausalLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )


def _check_checkpointing(layer: AtlasBlock) -> None:
    """ValueError for reentrant checkpointing, which passes no gradient to states."""
    if layer.gradient_checkpointing and cast(Any, layer)._gradient_checkpointing_func.keywords.get("use_reentrant"):
        raise ValueError(
            "a cache with keep_graph=True gets no gradient with use_reentrant=True: enable gradient checkpointing with "
            '{"use_reentrant": False}'
        )


def _has_read(mask: Tensor | dict[str, Tensor | None] | None, cache: AtlasCache | None, time: int) -> Tensor | bool:
    """Whether each row has read a real token before this call, bool `[batch]` or one for all."""
    mask = one_mask(mask)
    if cache is None or not cache.get_seq_length():
        return False
    return True if mask is None or mask.shape[1] <= time else mask[:, : mask.shape[1] - time].bool().any(1)


AutoModel.register(AtlasConfig, AtlasModel)
AutoModelForCausalLM.register(AtlasConfig, AtlasForCausalLM)
# Trainer looks here whether labels are to be shifted where it smooths them itself.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AtlasConfig.model_type] = AtlasForCausalLM.__name__
