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
"""What every saved folder has, so that it can be opened without `import atlas_memory`; where the package is missing,
transformers says to install it."""
AUTO_MAP = {
    "AutoConfig": "modeling_atlas_memory.AtlasConfig",
    "AutoModel": "modeling_atlas_memory.AtlasModel",
    "AutoModelForCausalLM": "modeling_atlas_memory.AtlasForCausalLM",
}
"""Of each Auto class, what that file has for it."""

_WIDTHS = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "gate_rank")
_LENGTHS = ("conv_size", "window", "chunk_size", "attention_window")
MAX_SIZES = dict.fromkeys(_WIDTHS, LARGEST) | dict.fromkeys(_LENGTHS, LONGEST)
MAX_SIZES |= {"num_hidden_layers": DEEPEST, "max_position_embeddings": 2**53}  # by which nothing is made
MAX_PARAMETERS = 2**40
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Those that weights may have."""
# Options of a memory: no use in a block without one.
_OF_MEMORY = ["rule", "rule_options", "window", "chunk_size", "hierarchy", "conv_size", "key_lag", "gate_rank"]
_OF_MEMORY += ["persistent_tokens"]
# Keyword arguments that transformers itself understands although they are no fields.
_OF_TRANSFORMERS = {"torch_dtype", "num_labels", "name_or_path", "output_attentions", "attn_implementation"}
_OF_TRANSFORMERS |= {"experts_implementation", "model_type", "use_return_dict"}
# Entries of every model's configuration that are read from a file, and of which type they are.
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
        rule: Name of the memory's learning rule, a key of `RULES`. None takes "gated-deltanet", in block "hope" "hope".
        rule_options: Changes to that rule, as `Rule.vary` takes them: `{"optimiser": {"every": 16}}`.
        block: What mixes over time: "lmm", the memory alone; "mag", sliding-window attention gated by it; "mal", the
            memory and then sliding-window attention; "mac", attention within segments that reads from the memory and
            is written to it; "hope", a memory whose projections and gates are memories too, with `rule="hope"` or a
            variation of it, and without `gate_rank`; and without memory, "swa", sliding-window attention, and
            "attention", full attention. A block without memory takes no option of one: `rule` to
            `persistent_tokens`, `conv_size`, `key_lag` and `gate_rank`.
        window: Tokens that a write of the memory optimises over (c of the Omega rule); None keeps the rule's.
        chunk_size: Tokens whose gradients are taken at one state of the memory (b); None keeps the rule's.
        hierarchy: One global and N local memories of the rule instead of one (TNT), as the fields of `Hierarchy`:
            `{"global_chunk": 64, "local_chunks": [8, 16], "shard": 64}`. Then `chunk_size` has no use. Not in "mac".
        persistent_tokens: Learned tokens in front of the sequence, in "mac" of every segment (Titans, Eq. 19).
        attention_window: Tokens that the attention of "mag", "mal" and "swa" sees, and the length of a segment in
            "mac"; None takes 64. No use in "lmm", "hope" and "attention".
        conv_size: Length of the memory's short convolution.
        key_lag: Tokens by which keys begin behind values (`NeuralMemory.reset_parameters`). None takes 1, so that a
            fresh memory answers with what came next, as a language model needs; 0 where `conv_size` is 1.
        gate_rank: Make the memory's eta and alpha channel-wise, through a map of this rank (Miras: 32 or 64).
        continuum_periods: One MLP after another in each block instead of one, the l-th with new weights only every so
            many steps of training (Hope's continuum memory system; `ContinuumMLP`). None takes one MLP.
        rms_norm_eps: Epsilon of the norms.
        initializer_range: Standard deviation of the initial linear and embedding weights.
        max_position_embeddings: Nothing is limited by it; evaluation programs read the usable length here.
        tie_word_embeddings: Use the embedding as the output head.
        bos_token_id, eos_token_id, pad_token_id: Special tokens of the tokenizer.
        use_cache: Return the state by default, outside training.

    Raises:
        ValueError: A bad value or an unknown argument; the message names it.
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
        kwargs.pop("auto_map", None)  # whatever a file says, the code is ours
        self.auto_map = dict(AUTO_MAP)
        import_module(".modeling", __package__)  # a configuration by name may be followed by AutoModel
        # Others would be kept by transformers as attributes that nothing reads.
        if unknown := [k for k in kwargs if k not in _OF_TRANSFORMERS and not k.startswith("_")]:
            raise ValueError(
                f"AtlasConfig has no argument {', '.join(unknown)}; it has {', '.join(AtlasConfig.__annotations__)}"
            )
        dtype = kwargs.get("torch_dtype") if self.dtype is None else self.dtype
        if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"dtype={str(dtype)!r} is none of weights: choose one of {', '.join(DTYPES)}")
        self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Raise ValueError for values that are none or do not go together, and fill in what follows from others. A
        model checks again what it is given: a field may have been changed since."""
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
            with torch.device("meta"):  # without weights: a layer refuses what it cannot be
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
                f"hidden_size={self.hidden_size}, num_hidden_layers={self.num_hidden_layers} or what makes its "
                "memories large"
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
                f"hidden_size={self.hidden_size} does not divide into num_attention_heads="
                f"{self.num_attention_heads}; make hidden_size a multiple of num_attention_heads"
            )

    def _check_tokens(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            several = name == "eos_token_id" and isinstance(value, list | tuple)
            for number in value if several else [] if value is None else [value]:
                if type(number) is not int or number < 0:
                    raise ValueError(f"{name}={value!r} is no token id: give a whole number from 0 on, or None")
                if number >= self.vocab_size:  # no error: a model whose vocabulary was cut is loaded again
                    warnings.warn(
                        f"{name}={value!r} is no token of a vocabulary of vocab_size={self.vocab_size}", stacklevel=5
                    )

    def _check_block(self) -> None:
        """Refuse options that the block does not read, and fill in the window and the rule of one that has them."""
        kind = BLOCKS[self.block]
        if kind.window:
            self.attention_window = self.attention_window or 64
        elif self.attention_window is not None:
            others = ", ".join(repr(name) for name, other in BLOCKS.items() if other.window)
            raise ValueError(
                f"attention_window={self.attention_window} has no use in block={self.block!r}; drop it or take one of "
                f"{others}"
            )
        if kind.memory:
            self.rule = default_rule(self.block) if self.rule is None else self.rule
            return
        for name in _OF_MEMORY:
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ValueError(f"{name}={value!r} has no use in block={self.block!r}, which has no memory; drop it")

    def mixer(self) -> Stateful:
        """A mixer of the model, as `BLOCKS` makes it. ValueError where the options do not go together, or what is made
        of them is no mixer."""
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
        """The rule of every memory: `rule` with `rule_options`, `window` and `chunk_size` applied; ValueError where one
        of them is unknown."""
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
                f"rule_options must map parts of a rule to changes, as {{'optimiser': {{'every': 16}}}}; "
                f"got {options!r}"
            )
        window = dict(options.get("window", {}))
        if self.hierarchy is not None and window.keys() & {"chunk", "read"}:
            raise ValueError(
                f"rule_options' window {window!r} has no use beside a hierarchy, which has chunks and reads of its "
                "own; give its size alone"
            )
        for argument, field, value in (("window", "size", self.window), ("chunk_size", "chunk", self.chunk_size)):
            if value is not None and window.setdefault(field, value) != value:
                raise ValueError(
                    f"{argument}={value} and rule_options' window {field}={window[field]!r} contradict each other: "
                    "give one"
                )
        return RULES[name].vary(**options | {"window": window})

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As transformers has it, with the file by which `trust_remote_code=True` finds the package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / AUTO_FILE).write_text(AUTO_CODE, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: the class is registered, and its source is not to be copied into what is saved."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A configuration of what a `config.json` says; `kwargs`, of `from_pretrained`, are put on top. Of the file it
        takes what a model reads, and drops the rest with a warning. ValueError for a bad value, which is named."""
        own = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        return super().from_dict(_entries_to_read(config_dict, own), **kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "AtlasConfig":
        """The configuration of a named size from `PRESETS`, with some arguments changed.

        `rule_options` are added to the preset's, option by option. With another `rule`, the preset's options apply as
        far as that rule has such fields and `rule_options` put no other kind in place, its window as far as that rule
        looks back, and its chunk unless the rule's is longer; with a `block` without memory, the preset's options of a
        memory do not apply; with a `hierarchy`, its `chunk_size` does not. A rule with a feature map takes the preset's
        `feature_map_heads`.

        Raises:
            ValueError: No such preset, or a bad override.
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
        """Whether a key has many more features than entries: degree 1 adds a single one."""
        width = self.hidden_size // self.num_attention_heads
        return self.memory_rule().features.size(width) > width + 1


def default_rule(block: Any) -> str:
    """The rule of a block where none is named."""
    return "hope" if block == "hope" else DEFAULT_RULE


def _is_rule_options(options: Any) -> bool:
    return isinstance(options, dict) and all(isinstance(part, dict) for part in options.values())


def _entries_to_read(said: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The entries of a `config.json`, which anybody may have written, that a model uses, `own` among them. transformers
    would act upon others: it loads kernels from a hub that `attn_implementation` names, and weights from where
    `transformers_weights` says. ValueError where to leave one out would change what weights mean."""
    if said.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config: weights are read as they are, and none are unpacked as a file says. Give "
            "quantization_config to from_pretrained, or save the model before it is quantised"
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
