"""Configurations: every wrong argument has its message, presets have their sizes."""

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atlas_memory import NeuralMemory, OmegaMemory
from atlas_memory.memory import KINDS, RULES, Huber, Softmax
from atlas_memory.models import PRESETS, AtlasConfig, AtlasForCausalLM

HIERARCHY = {"global_chunk": 8, "local_chunks": [4], "shard": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"hidden_size": 100, "num_attention_heads": 8},
            "hidden_size=100 must be a multiple of num_att",
        ),
        ({"hidden_size": "32"}, "hidden_size must be an integer >= 1, got '32'"),
        ({"vocab_size": 0}, "vocab_size must be an integer >= 1"),
        ({"persistent_tokens": None}, "persistent_tokens must be a whole number, 0 for none; got None"),
        (
            {"continuum_periods": [4, 1]},
            r"continuum_periods=\[4, 1\] must go from the fastest level to the slowest: sort them",
        ),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer >= 1"),
        ({"num_attention_heads": 2.0}, "num_attention_heads must be an integer >= 1"),
        ({"intermediate_size": -1}, "intermediate_size must be an integer >= 1"),
        ({"window": 0}, "window must be an integer >= 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
        ({"block": "mag", "attention_window": 0}, "attention_window must be an integer >= 1"),
        ({"attention_window": 8}, "attention_window=8 has no use in block='lmm'"),
        ({"block": "mag", "hidden_size": 24, "num_attention_heads": 8}, "needs dim to be a multiple"),
        ({"block": "attention", "attention_window": 8}, "attention_window=8 has no use in block='attention'.*'swa'"),
        (
            {"block": "attention", "hidden_size": 24, "num_attention_heads": 8},
            "block='attention': dim=24 with heads=8: rotary attention needs dim to be a multiple",
        ),
        ({"block": "swa", "rule": "titans"}, "rule='titans' has no use in block='swa', which has no memory"),
        ({"block": "swa", "window": 4}, "window=4 has no use in block='swa'"),
        ({"block": "attention", "chunk_size": 4}, "chunk_size=4 has no use"),
        ({"block": "attention", "conv_size": 2}, "conv_size=2 has no use"),
        ({"block": "swa", "key_lag": 1}, "key_lag=1 has no use in block='swa'"),
        ({"block": "hope", "rule": "hope", "key_lag": 4}, "key_lag must be an integer >= 0 and below conv_size=4"),
        ({"key_lag": 4}, "key_lag must be an integer >= 0 and below conv_size=4, got 4"),
        ({"key_lag": -1}, "key_lag must be an integer >= 0"),
        ({"key_lag": 1, "conv_size": 1}, "below conv_size=1"),
        ({"key_lag": "1"}, "key_lag must be an integer >= 0 and below conv_size=4, got '1'"),
        ({"block": "attention", "rule_options": {}}, "rule_options={} has no use"),
        ({"block": "swa", "persistent_tokens": 2}, "persistent_tokens=2 has no use"),
        ({"persistent_tokens": -1}, "persistent_tokens must be a whole number, 0 for none; got -1"),
        ({"persistent_tokens": 1.5}, "persistent_tokens must be a whole number, 0 for none; got 1.5"),
        ({"block": "mac?"}, "block='mac\\?' is unknown; did you mean mac"),
        ({"block": ["lmm"]}, "block=\\['lmm'\\] is unknown"),
        ({"use_cache": "no"}, "use_cache must be true or false, got 'no'"),
        ({"rule": "atlantis"}, "rule='atlantis' is unknown; did you mean atlas"),
        ({"rule": ["atlas"]}, "rule=\\['atlas'\\] is unknown"),
        ({"hierarchy": {"shard": 8}}, "hierarchy must map global_chunk, local_chunks, shard"),
        ({"hierarchy": HIERARCHY, "rule": "dot"}, "Exponential features"),
        ({"hierarchy": HIERARCHY, "chunk_size": 4}, "chunk_size=4 has no use beside a hierarchy"),
        ({"hierarchy": HIERARCHY, "block": "mac"}, "block='mac' with rule='[a-z-]*': mac copies .* no hierarchy"),
        ({"hierarchy": HIERARCHY, "block": "swa"}, "has no use in block='swa'"),
        ({"rule_options": {"optimizer": {"every": 2}}}, "optimizer"),
        ({"rule_options": {"optimiser": 3}}, "rule_options must map"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id=\[2, -1\] is no token id"),
        ({"pad_token_id": "0"}, "pad_token_id='0' is no token id"),
        ({"pad_token_id": [1]}, r"pad_token_id=\[1\] is no token id"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer >= 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0"),
        ({"initializer_range": "x"}, "initializer_range must be a finite number above 0"),
        ({"hiden_size": 64}, "AtlasConfig has no argument hiden_size; it has .*hidden_size"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtlasConfig(**arguments)


def test_a_vocabulary_that_was_cut_is_loaded_again(tmp_path) -> None:
    with pytest.warns(UserWarning, match="eos_token_id=300 is no token of a vocabulary of vocab_size=258"):
        AtlasConfig(eos_token_id=300, vocab_size=258).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is no token of a vocabulary"):
        assert AtlasConfig.from_pretrained(tmp_path).eos_token_id == 300


def test_rule_options_change_the_rule() -> None:
    config = AtlasConfig(rule="atlas", rule_options={"optimiser": {"every": 4}})
    assert config.memory_rule().optimiser.every == 4
    assert RULES["gated-deltanet"] == AtlasConfig().memory_rule() == NeuralMemory(8, 2).rule == OmegaMemory(8, 2).rule
    assert {AtlasConfig.preset(name).rule for name in PRESETS} == {"gated-deltanet"}


def test_defaults() -> None:
    assert AtlasConfig(hidden_size=768).intermediate_size == 2048
    assert [cast(NeuralMemory, AtlasConfig(conv_size=n).mixer()).key_lag for n in (1, 2, 4)] == [0, 1, 1]
    assert AtlasConfig(hidden_size=128).intermediate_size == 384
    assert AtlasConfig(block="mag").attention_window == 64
    assert AtlasConfig(block="mac").attention_window == 64
    assert AtlasConfig().attention_window is None and AtlasConfig(block="attention").attention_window is None


def test_the_rule_is_that_of_the_block_where_none_is_named() -> None:
    assert AtlasConfig().rule == "gated-deltanet" and AtlasConfig(block="hope").rule == "hope"
    for block in ("attention", "swa"):
        config = AtlasConfig(block=block)
        assert config.rule is None and AtlasConfig(**config.to_diff_dict()).rule is None
        with pytest.raises(ValueError, match="rule='titans' has no use in block"):
            AtlasConfig(block=block, rule="titans")


def test_saved_files_stay_readable(tmp_path: Path) -> None:
    options = {"optimiser": {"every": 4}}
    config = AtlasConfig(rule="atlas", rule_options=options, block="mag", eos_token_id=3, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    loaded = AtlasConfig.from_pretrained(tmp_path)
    ours = set(AtlasConfig.__annotations__)
    assert {k: v for k, v in loaded.to_dict().items() if k in ours} == {k: getattr(config, k) for k in ours}
    assert loaded.dtype == torch.bfloat16
    assert AtlasConfig.from_pretrained(tmp_path, use_cache=False).use_cache is False
    with pytest.raises(ValueError, match="window must be"):
        AtlasConfig(**(config.to_dict() | {"window": 0}))


def test_an_entry_of_a_later_version_is_left_out_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    AtlasConfig().save_pretrained(tmp_path)
    file.write_text(file.read_text().replace('"block"', '"of_a_later_version": 1, "auto_map": {}, "block"'))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("atlas_memory.models.configuration")
    logger.addHandler(handler)
    try:
        assert not hasattr(AtlasConfig.from_pretrained(tmp_path), "of_a_later_version")
    finally:
        logger.removeHandler(handler)
    assert records == ["the saved configuration has entries that AtlasConfig does not use: of_a_later_version"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_of_their_name(name: str) -> None:
    preset = PRESETS[name]
    with torch.device("meta"):
        model = AtlasForCausalLM(AtlasConfig.preset(name))
    # The initial memories depend on the rule and are not counted.
    count = sum(p.numel() for n, p in model.named_parameters() if ".memory.initial." not in n)
    named = {"small": "170m", "medium": "400m", "large": "760m"}.get(name, name)
    if named[-1] in "mb":
        expected = float(named[:-1]) * (1e9 if named[-1] == "b" else 1e6)
        assert 0.92 < count / expected < 1.08, f"{name} has {count / 1e6:.0f}M parameters"
    else:
        assert count < 8e6
    assert preset.learning_rate > 0


def test_rule_options_are_added_to_those_of_a_preset() -> None:
    config = AtlasConfig.preset("tiny", rule="atlas", rule_options={"optimiser": {"every": 4}})
    rule = config.memory_rule()
    assert (rule.optimiser.every, rule.optimiser.read_pending, rule.network.expansion) == (4, True, 1)
    assert AtlasConfig.preset("tiny", rule="atlas").memory_rule().every == 16
    other = AtlasConfig.preset("tiny", rule="titans", rule_options={"network": {"expansion": 2}})
    assert other.rule_options == {"network": {"expansion": 2}, "retention": {"to_initial": True}}
    assert other.memory_rule().window.size == 1
    assert AtlasConfig.preset("tiny", rule="deltanet").rule_options is None
    assert AtlasConfig.preset("tiny", rule="atlas++").memory_rule().every == 16
    assert AtlasConfig.preset("170m").rule_options is None


def test_preset_overrides_and_unknown_names() -> None:
    config = AtlasConfig.preset("tiny", rule="omeganet", block="mag")
    assert (config.hidden_size, config.rule, config.attention_window) == (128, "omeganet", 64)
    assert "block" not in PRESETS["tiny"].config, "an override leaves the table alone"
    assert AtlasConfig.preset("tiny", block="hope").rule == "hope"
    config = AtlasConfig.preset("tiny", block="attention")
    assert (config.hidden_size, config.rule_options, config.window, config.chunk_size) == (128, None, None, None)
    with pytest.raises(ValueError, match="window=4 has no use in block='attention'"):
        AtlasConfig.preset("tiny", block="attention", window=4)
    with pytest.raises(ValueError, match="preset 'huge' is unknown; choose one of nano, tiny"):
        AtlasConfig.preset("huge")
    with pytest.raises(ValueError, match="no argument with"):
        AtlasConfig.preset("tiny", with_=3)


def test_memories_on_lifted_keys_have_more_and_narrower_heads() -> None:
    def heads(preset: str, **options: Any) -> int:
        return AtlasConfig.preset(preset, **options).num_attention_heads

    assert [heads(name) for name in ("nano", "tiny", "mini")] == [1, 2, 4]
    assert [heads(name, rule="atlas") for name in ("nano", "tiny", "mini")] == [2, 4, 8]
    assert [heads("tiny", rule=rule) for rule in ("titans", "hope", "atlas-identity", "swdt", "ttt-mlp")] == [2] * 5
    assert heads("tiny", rule="titans", rule_options={"features": {"kind": "Polynomial"}}) == 4
    assert heads("tiny", rule="omeganet", num_attention_heads=2) == 2
    assert heads("tiny", block="attention") == 2
    assert heads("170m", rule="atlas") == heads("170m") == 16


def test_the_rule_of_every_memory_is_the_configurations() -> None:
    config = AtlasConfig(
        hidden_size=16,
        num_attention_heads=2,
        rule="atlas",
        window=3,
        chunk_size=6,
        rule_options={"optimiser": {"every": 6}},
    )
    rule = AtlasForCausalLM(config).model.layers[1].mixer.rule
    assert rule == config.memory_rule()
    assert (rule.window.size, rule.window.chunk, rule.optimiser.every) == (3, 6, 6)


def test_a_hierarchy_is_saved_whole_and_takes_the_place_of_the_presets_chunk(tmp_path) -> None:
    config = AtlasConfig.preset("tiny", rule="tnt", hierarchy=HIERARCHY)
    assert config.chunk_size is None and config.hierarchy == HIERARCHY | {"project": "shard"}
    config.save_pretrained(tmp_path)
    assert AtlasConfig.from_pretrained(tmp_path).hierarchy == config.hierarchy


def test_a_part_of_another_kind_is_free_of_the_presets_options() -> None:
    options = {"bias": {"kind": "Huber"}, "retention": {"kind": "Softmax"}, "window": {"size": 4, "chunk": 8}}
    config = AtlasConfig.preset("tiny", rule="titans", rule_options=options)
    rule = config.memory_rule()
    assert (rule.window.size, rule.window.chunk) == (4, 8) and rule.retention == Softmax() and rule.bias == Huber()
    assert rule.network.expansion == 1  # as far as a part is not replaced
    assert AtlasConfig.preset("nano", rule="lact").memory_rule().window.chunk == 64
    for rule_name in ("atlas", "titans"):
        for retention in KINDS["retention"]:
            AtlasConfig.preset(
                "tiny",
                rule=rule_name,
                rule_options={"retention": {"kind": retention.__name__}, "optimiser": {"kind": "GradientDescent"}},
            )


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"rule": "titans", "window": 2, "rule_options": {"window": {"size": 4}}},
            "window=2 contradicts rule_options' window",
        ),
        (
            {"rule": "hope", "rule_options": {"optimiser": {"normalised": "no"}}},
            "normalised must be true or false, got 'no'",
        ),
        ({"rule": "moneta", "rule_options": {"bias": {"p": "three"}}}, "Lp p must be a finite number, got 'three'"),
        ({"rule_options": {"bias": {"kind": ["Huber"]}}}, "bias has no kind"),
        (
            {"block": "mac", "rule": "dot"},
            "block='mac' with rule='[a-z]*': mac copies the memory .*Polynomial features",
        ),
        (
            {"rule": "atlas", "gate_rank": 4},
            "block='lmm' with rule='atlas': gate_rank=4 makes gates channel-wise, but Muon",
        ),
        (
            {"block": "hope", "rule": "titans"},
            "with rule='titans': .* the rule has Momentum",
        ),
        ({"block": "hope", "rule": "hope", "gate_rank": 4}, "gate_rank=4 has no use in block='hope'"),
    ],
)
def test_combinations_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AtlasConfig(**options)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_configuration(rule: str) -> None:
    """The mixer that it makes without weights, to be told what cannot be, needs none for any rule, printed or not."""
    hope = {"block": "hope"} if rule == "hope" else {}
    for normalised in (True, False):
        config = AtlasConfig(rule=rule, rule_options={"optimiser": {"normalised": normalised}}, **hope)
        assert config.memory_rule() == RULES[rule].vary(optimiser={"normalised": normalised})
