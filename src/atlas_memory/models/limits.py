"""What a configuration may ask for, and what is read of one in a file that anybody may have written."""

from collections.abc import Collection, Mapping
from typing import Any

from transformers.utils import logging

from ..rules.validation import DEEPEST, LARGEST, LONGEST, check_size

logger = logging.get_logger(__name__)
SIZES = {
    "vocab_size": LARGEST,
    "hidden_size": LARGEST,
    "num_hidden_layers": DEEPEST,
    "num_attention_heads": LARGEST,
    "intermediate_size": LARGEST,
    "conv_size": LONGEST,
    "window": LONGEST,
    "chunk_size": LONGEST,
    "attention_window": LONGEST,
    "gate_rank": LARGEST,
    "max_position_embeddings": 2**53,  # by which nothing is made
}
"""The sizes of a configuration, and what each is at most."""
PARAMETERS = 2**40
"""Of a model, at most."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Those that weights may have."""
_BESIDE: dict[str, type] = {
    "dtype": object,
    "torch_dtype": object,
    "transformers_version": str,
    "architectures": list,
    "output_hidden_states": bool,
    "id2label": dict,
    "label2id": dict,
}
"""Entries of every model's configuration that are read, and of which type they are."""
_UNSAID = ("model_type", "auto_map")
"""Those that are left out without a word: they say which classes are ours."""


def check_sizes(config: Any) -> None:
    """ValueError unless the sizes of an `AtlasConfig` are whole numbers within their bounds, or None where that is the
    default."""
    for name, most in SIZES.items():
        value = getattr(config, name)
        if value is not None or getattr(type(config), name) is not None:
            check_size(name, value, most)


def check_parameters(config: Any, of_mixer: int) -> None:
    """ValueError for a model that no machine holds, where a mixer has so many parameters."""
    of_mlps = 3 * config.hidden_size * config.intermediate_size * len(config.continuum_periods or [1])
    count = config.num_hidden_layers * (of_mixer + of_mlps) + config.vocab_size * config.hidden_size
    if count > PARAMETERS:
        raise ValueError(
            f"the model would have {count:.1e} parameters, and {PARAMETERS:.1e} is the limit: lower "
            f"hidden_size={config.hidden_size}, num_hidden_layers={config.num_hidden_layers} or what makes its "
            "memories large"
        )


def check_dtype(dtype: Any) -> None:
    """ValueError unless weights may have it; None: as in the file."""
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        raise ValueError(f"dtype={str(dtype)!r} is none of weights: choose one of {', '.join(DTYPES)}")


def readable(said: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The entries of a `config.json` that are read: those that a model uses, `own` among them. transformers would act
    upon others: it loads kernels from a hub that `attn_implementation` names, and weights from where
    `transformers_weights` says. What is left out is told in a warning; ValueError where that would change what weights
    mean.
    """
    if said.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config: weights are read as they are, and none are unpacked as a file says. Give "
            "quantization_config to from_pretrained, or save the model before it is quantised"
        )
    read = {name: said[name] for name in said if name in own or isinstance(said[name], _BESIDE.get(name, ()))}
    if not all(isinstance(name, str) for name in read.get("architectures", ())):
        del read["architectures"]
    if unread := [name for name in said if name not in read and name not in _UNSAID and said[name] is not None]:
        logger.warning_once(f"the saved configuration has entries that AtlasConfig does not use: {', '.join(unread)}")
    return read
