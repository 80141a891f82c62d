"""The configuration of an Atlas model."""

import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import asdict, fields
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from ..layers.blocks import BLOCKS, build_mixer, check_blocks
from ..layers.mlp import check_periods
from ..layers.stateful import Stateful
from ..layers.tnt import Hierarchy
from ..memory import RULES, Rule
from ..rules import DEFAULT_RULE
from ..rules.validation import DEEPEST, LARGEST, LONGEST, check_positive, check_size, suggest
from .presets import PRESETS, fitting_options

logger = logging.get_logger(__name__)

AUTO_FILE = "modeling_atlas_memory.py"
AUTO_CODE = '''"""For `from_pretrained(..., trust_remote_code=True)`: the model's code is the package atlas-memory."""

from atlas_memory import AtlasConfig, AtlasForCausalLM, AtlasModel

__all__ = ["AtlasConfig", "AtlasForCausalLM", "AtlasModel"]
'''
"""Saved with every model, so that it opens without `import atlas_memory`."""
AUTO_MAP = {
    "AutoConfig": "modeling_atlas_memory.AtlasConfig",
    "AutoModel": "modeling_atlas_memory.AtlasModel",
    "AutoModelForCausalLM": "modeling_atlas_memory.AtlasForCausalLM",
}

_WIDTHS = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "gate_rank")
_LENGTHS = ("conv_size", "window", "chunk_size", "attention_window")
MAX_SIZES = dict.fromkeys(_WIDTHS, LARGEST) | dict.fromkeys(_LENGTHS, LONGEST)
MAX_SIZES |= {"num_hidden_layers": DEEPEST, "max_position_embeddings": 2**53}  # by which nothing is made
MAX_PARAMETERS = 2**40
DTYPES = ("float64", "float32", "bfloat16", "float16")
# Options of a memory.
_OF_MEMORY = ["rule", "rule_options", "window", "chunk_size", "hierarchy", "conv_size", "key_lag", "gate_rank"]
_OF_MEMORY += ["persistent_tokens"]
# Keyword arguments of transformers that are not fields.
_OF_TRANSFORMERS = {"torch_dtype", "num_labels", "name_or_path", "output_attentions", "attn_implementation"}
_OF_TRANSFORMERS |= {"experts_implementation", "model_type", "use_return_dict"}
# Entries of transformers that are read from a file, with their types.
_READ_OF_ALL_MODELS: dict[str, type] = {"dtype": object, "torch_dtype": object, "transformers_version": str}
_READ_OF_ALL_MODELS |= {"architectures": list, "output_hidden_states": bool, "id2label": dict, "label2id": dict}


class AtlasConfig(PreTrainedConfig):
    """Sizes and choices of an `AtlasModel`.

    Args:
        vocab_size: Number of tokens of the vocabulary.
        hidden_size: Width of the model; a multiple of `num_attention_heads`.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Heads of every memory and attention.
        intermediate_size: Channels of the MLPs; None takes 8/3 of `hidden_size`, rounded up to 64s.
        rule: Name of the memory's learning rule, a key of `RULES`. None: "gated-deltanet"; in block "hope", "hope".
        rule_options: Changes to the rule, as for `Rule.vary`: `{"optimiser": {"every": 16}}`.
        block: "lmm", a memory alone; "mag", sliding-window attention gated by it; "mal", memory, then sliding-window
            attention; "mac", attention within segments that reads and writes the memory; "hope", a memory whose
            projections and gates are memories too (`rule="hope"` or a variation, no `gate_rank`); without memory and
            its options, "swa", sliding-window attention, and "attention", full attention.
        window: Tokens that a write of the memory optimises over (c of the Omega rule); None keeps the rule's.
        chunk_size: Tokens whose gradients are taken at one state of the memory (b); None keeps the rule's.
        hierarchy: One global and N local memories (TNT), as the fields of `Hierarchy`:
            `{"global_chunk": 64, "local_chunks": [8, 16], "shard": 64}`. Excludes `chunk_size` and "mac".
        persistent_tokens: Learned tokens before the sequence, in "mac" before every segment (Titans, Eq. 19).
        attention_window: Tokens that "mag", "mal" and "swa" attend to, and the segment of "mac"; None takes 64.
        conv_size: Length of the memory's short convolution.
        key_lag: Tokens by which keys initially trail values (`NeuralMemory.reset_parameters`). None takes 1, so that a
            fresh memory recalls what came next; 0 where `conv_size` is 1.
        gate_rank: Make the memory's eta and alpha channel-wise, through a map of this rank (Miras: 32 or 64).
        continuum_periods: MLPs in sequence, the l-th updated every so many training steps (`ContinuumMLP`); None takes
            one MLP.
        rms_norm_eps: Epsilon of the norms.
        initializer_range: Standard deviation of the initial linear and embedding weights.
        max_position_embeddings: Not a limit; evaluation programs read the usable length here.
        tie_word_embeddings: Use the embedding as the output head.
        bos_token_id, eos_token_id, pad_token_id: Special tokens of the tokenizer.
        use_cache: Return the state by default, outside training.

    Raises:
        ValueError: A bad value or an unknown argument.
    """

    model_type = "atlas_memory"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    vocab_size: int = 258
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    rule: str | None = None
    rule_options: dict[str, dict[str, Any]] | None = None
    block: str = "lmm"
    window: int | None = None
    chunk_size: int | None = None
    hierarchy: dict[str, Any] | None = None
    persistent_tokens: int = 0
    attention_window: int | None = None
    conv_size: int = 4
    key_lag: int | None = None
    gate_rank: int | None = None
    continuum_periods: list[int] | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    max_position_embeddings: int = 1_048_576
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("auto_map", None)  # a file's is never used
        self.auto_map = dict(AUTO_MAP)
        import_module(".modeling", __package__)  # registers the models for AutoModel
        # transformers would keep others as attributes that nothing reads.
        if unknown := [k for k in kwargs if k not in _OF_TRANSFORMERS and not k.startswith("_")]:
            known = ", ".join(AtlasConfig.__annotations__)
            raise ValueError(f"AtlasConfig has no argument {', '.join(unknown)}; it has {known}")
        dtype = kwargs.get("torch_dtype") if self.dtype is None else self.dtype
        if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"dtype={str(dtype)!r} is none of weights: choose one of {', '.join(DTYPES)}")
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise ValueError for bad values and combinations, and fill in defaults. Models call it again, since fields
        can change."""
        self._check_values()
        self._check_tokens()
        check_blocks()
        if not isinstance(self.block, str) or self.block not in BLOCKS:
            raise ValueError(
                f"block={self.block!r} is unknown; {suggest(self.block, BLOCKS)} Register a block of your own first: "
                f"BLOCKS[{self.block!r}] = Mixer(...)"
            )
        self._check_block()
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 64)) * 64
        if self.hierarchy is not None:
            if self.chunk_size is not None:
                raise ValueError(f"chunk_size={self.chunk_size} has no use beside a hierarchy, which has chunks")
            hierarchy = Hierarchy.of(self.hierarchy)
            self.hierarchy = asdict(hierarchy) | {"local_chunks": list(hierarchy.local_chunks)}  # as JSON has it
        self.memory_rule()
        try:
            with torch.device("meta"):
                mixer = self.mixer()
        except ValueError as error:
            rule = f" with rule={self.rule!r}" if BLOCKS[self.block].memory else ""
            raise ValueError(f"block={self.block!r}{rule}: {error}") from error
        per_layer = sum(p.numel() for p in mixer.parameters())
        per_layer += 3 * self.hidden_size * self.intermediate_size * len(self.continuum_periods or [1])
        count = self.num_hidden_layers * per_layer + self.vocab_size * self.hidden_size
        if count > MAX_PARAMETERS:
            raise ValueError(
                f"the model would have {count:.1e} parameters, and {MAX_PARAMETERS:.1e} is the limit: lower "
                f"hidden_size={self.hidden_size}, num_hidden_layers={self.num_hidden_layers} or the size of memories"
            )

    def _check_values(self) -> None:
        for name, most in MAX_SIZES.items():
            value = getattr(self, name)
            if value is not None or getattr(type(self), name) is not None:
                check_size(name, value, most)
        for name in ("rms_norm_eps", "initializer_range"):
            check_positive(name, getattr(self, name))
        for name in ("tie_word_embeddings", "use_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.continuum_periods is not None:
            self.continuum_periods = list(check_periods("continuum_periods", self.continuum_periods))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={self.num_attention_heads}"
            )

    def _check_tokens(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            several = name == "eos_token_id" and isinstance(value, list | tuple)
            for number in value if several else [] if value is None else [value]:
                if type(number) is not int or number < 0:
                    raise ValueError(f"{name}={value!r} is no token id: give a whole number from 0 on, or None")
                if number >= self.vocab_size:  # a model with a smaller vocabulary is still loaded
                    warnings.warn(
                        f"{name}={value!r} is no token of a vocabulary of vocab_size={self.vocab_size}", stacklevel=5
                    )

    def _check_block(self) -> None:
        """Refuse options that the block does not use; fill in its window and rule."""
        kind = BLOCKS[self.block]
        if kind.window:
            self.attention_window = self.attention_window or 64
        elif self.attention_window is not None:
            others = ", ".join(repr(name) for name, other in BLOCKS.items() if other.window)
            raise ValueError(
                f"attention_window={self.attention_window} has no use in block={self.block!r}, but in {others}: drop it"
            )
        if kind.memory:
            self.rule = default_rule(self.block) if self.rule is None else self.rule
            return
        for name in _OF_MEMORY:
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"{name}={value!r} has no use in block={self.block!r}, which has no memory; drop it")

    def mixer(self) -> Stateful:
        """A mixer of the model, from `BLOCKS`."""
        kind = BLOCKS[self.block]
        options: dict[str, Any] = {"attention_window": self.attention_window} if kind.window else {}
        if kind.memory:
            options |= {
                "persistent_tokens": self.persistent_tokens,
                "eps": self.rms_norm_eps,
                "rule": self.memory_rule(),
                "conv_size": self.conv_size,
                "key_lag": min(1, self.conv_size - 1) if self.key_lag is None else self.key_lag,
                "gate_rank": self.gate_rank,
                "hierarchy": self.hierarchy,
            }
        return build_mixer(self.block, self.hidden_size, self.num_attention_heads, **options)

    def memory_rule(self) -> Rule:
        """The rule of every memory: `rule` with `rule_options`, `window` and `chunk_size` applied."""
        name = default_rule(self.block) if self.rule is None else self.rule
        if not isinstance(name, str) or name not in RULES:
            if isinstance(name, Rule):
                raise ValueError("rule must be a name, got a Rule: name it, RULES['mine'] = ..., or give rule_options")
            raise ValueError(
                f"rule={name!r} is unknown; {suggest(name, RULES)} Register a rule of your own first: "
                f"RULES[{name!r}] = Rule(...)"
            )
        options = self.rule_options or {}
        if not _is_rule_options(options):
            raise ValueError(
                f"rule_options must map parts to changes, {{'optimiser': {{'every': 16}}}}; got {options!r}"
            )
        window = dict(options.get("window", {}))
        if self.hierarchy is not None and window.keys() & {"chunk", "read"}:
            raise ValueError(f"rule_options' window {window!r} beside a hierarchy, which has chunks: give size alone")
        for argument, field, value in (("window", "size", self.window), ("chunk_size", "chunk", self.chunk_size)):
            if value is not None and window.setdefault(field, value) != value:
                raise ValueError(
                    f"{argument}={value} contradicts rule_options' window {field}={window[field]!r}: give one"
                )
        return RULES[name].vary(**options | {"window": window})

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the file by which `trust_remote_code=True` finds the package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / AUTO_FILE).write_text(AUTO_CODE, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: the source is not copied into saved folders."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A configuration from the entries of a `config.json` that models use; others are dropped with a warning."""
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        return super().from_dict(_entries_to_read(config_dict, own), **kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "AtlasConfig":
        """The configuration of a named size from `PRESETS`, with some arguments changed.

        `rule_options` are merged with the preset's, which apply where the rule has such fields. The preset's window is
        at most the rule's, its chunk at least; a block without memory takes no options of one, and a `hierarchy` no
        `chunk_size`. A rule with a feature map takes the preset's `feature_map_heads`.
        """
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; {suggest(name, PRESETS)}")
        base, given = deepcopy(PRESETS[name].config), overrides.get("rule_options")
        block = overrides.get("block", cls.block)
        if isinstance(block, str) and block in BLOCKS and not BLOCKS[block].memory:
            return cls(**{k: v for k, v in base.items() if k not in _OF_MEMORY} | overrides)
        values = base | overrides
        if overrides.get("hierarchy") is not None and "chunk_size" not in overrides:
            values.pop("chunk_size", None)
        chosen = values.get("rule")
        rule = RULES.get(default_rule(block) if chosen is None else chosen) if isinstance(chosen, str | None) else None
        if rule is not None and "rule_options" in base and (given is None or _is_rule_options(given)):
            in_options = (given or {}).get("window", {})
            if "window" not in overrides:
                values["window"] = None if "size" in in_options else min(base["window"], rule.window.size)
            if "chunk_size" not in overrides and ("chunk" in in_options or rule.window.chunk > base["chunk_size"]):
                values["chunk_size"] = None
            values["rule_options"] = fitting_options(base["rule_options"], rule, given or {}) or None
        config, heads = cls(**values), PRESETS[name].feature_map_heads
        if heads is None or "num_attention_heads" in overrides or not config.has_feature_map():
            return config
        return cls(**values | {"num_attention_heads": heads})

    def has_feature_map(self) -> bool:
        """Whether keys have many more features than entries (degree 1 adds one)."""
        width = self.hidden_size // self.num_attention_heads
        return self.memory_rule().features.size(width) > width + 1


def default_rule(block: Any) -> str:
    """The rule of a block where none is named."""
    return "hope" if block == "hope" else DEFAULT_RULE


def _is_rule_options(options: Any) -> bool:
    return isinstance(options, dict) and all(isinstance(part, dict) for part in options.values())


def _entries_to_read(said: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The entries of an untrusted `config.json` that a model uses, `own` among them. transformers would act on others:
    `attn_implementation` loads kernels from a hub, `transformers_weights` weights from elsewhere. ValueError for
    quantised weights."""
    if said.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config of a file is not used: give it to from_pretrained, or save before quantising"
        )
    types = _READ_OF_ALL_MODELS
    read = {name: said[name] for name in said if name in own or isinstance(said[name], types.get(name, ()))}
    if not all(isinstance(name, str) for name in read.get("architectures", ())):
        del read["architectures"]
    silent = (*read, "model_type", "auto_map")  # which say which classes are ours
    if unread := [name for name, value in said.items() if name not in silent and value is not None]:
        logger.warning_once(f"the saved configuration has entries that AtlasConfig does not use: {', '.join(unread)}")
    return read


AutoConfig.register(AtlasConfig.model_type, AtlasConfig)
