"""Folders of models that somebody has made or changed: refused in one line, or right numbers. Nothing in them runs,
nothing is asked, and no size in them makes a command hang."""

import json
import math
import os
import pickle
import random
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atlas_memory import NeuralMemory
from atlas_memory.cli import main
from atlas_memory.models import AtlasForCausalLM

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
HOSTILE = (
    "import pathlib\npathlib.Path({!r}).touch()\nclass Evil: from_pretrained = print\ndef generate(*a, **k): pass\n"
)
SECONDS = 5
Ended = Callable[..., tuple[int, str]]
CODE = ["evil.Evil", "evil.Evil"]
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 2**16, 2**31, 2**40, 2**63, -(2**70), 10**9, 10**400, 1e8, 1e308, -1.5, 0.5,
    math.nan, math.inf, "", "x", "\u202e\n\x1b[2J", "os.system", "someone/kernel", "x" * 50_000, "../../..",
    "/dev/zero", [], [1], [[]], CODE, [10**9] * 3, list(range(100)), {}, {"a": 1}, {"AutoTokenizer": CODE}, {"": 1},
    {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, {"kind": "Muon"},
]  # fmt: skip
WORDS = {
    "config.json": """
        attn_implementation _attn_implementation _attn_implementation_internal experts_implementation
        _experts_implementation quantization_config dtype torch_dtype auto_map torchscript pruned_heads use_kernels
        kernel_config gradient_checkpointing transformers_weights fusion_config configuration_files per_layer_config
        is_encoder_decoder return_dict output_attentions output_hidden_states architectures model_type tokenizer_class
        name_or_path _name_or_path _commit_hash id2label num_labels problem_type use_return_dict tie_encoder_decoder
        layer_types rope_scaling distributed_config base_model_tp_plan chunk_size_feed_forward transformers_version
        preset name check to_dict __class__ hierarchy continuum_periods rule_options
    """,
    "generation_config.json": """
        num_beams max_new_tokens max_length min_length num_return_sequences cache_implementation cache_config
        compile_config watermarking_config prompt_lookup_num_tokens assistant_early_exit custom_generate penalty_alpha
        stop_strings bad_words_ids sequence_bias do_sample temperature top_k eos_token_id pad_token_id guidance_scale
        low_memory constraints prefill_chunk_size
    """,
    "tokenizer_config.json": """
        auto_map tokenizer_class eos_token pad_token bos_token unk_token model_max_length padding_side truncation_side
        added_tokens_decoder extra_special_tokens additional_special_tokens chat_template tokenizer_file vocab_file
        fast_tokenizer_files _commit_hash name_or_path backend clean_up_tokenization_spaces split_special_tokens
        add_prefix_space processor_class special_tokens model_input_names init_inputs transformers_version use_fast
        legacy gguf_file model_type
    """,
    "tokenizer.json": """
        model added_tokens normalizer pre_tokenizer post_processor decoder truncation padding
    """,
}
"""Entries that transformers or tokenizers act upon, and some of ours."""
KEYS = {name: words.split() for name, words in WORDS.items()}
RULE = {
    "features": ["degree", "constant", "horizon"],
    "network": ["depth", "expansion", "bias", "activation", "norm", "residual"],
    "bias": ["p", "corner", "scale", "over", "threshold"],
    "retention": ["to_initial", "q", "lag", "scale", "threshold", "l1", "l2"],
    "optimiser": ["steps", "every", "limit", "normalised", "online", "read_pending", "precise", "after_decay"],
    "window": ["size", "chunk", "read"],
}
NAMES = """
    Identity Polynomial Exponential Linear MLP GatedMLP L2 DotProduct Huber Lp Decay Keep LqNorm RowNorm Softmax
    ElasticNet GradientDescent DeltaGradientDescent Momentum Muon
"""
KINDS = NAMES.split()


def options(draw: random.Random) -> dict[str, Any]:
    """Some of `rule_options`, a kind among them now and then."""
    found: dict[str, Any] = {}
    for part in draw.sample(sorted(RULE), draw.choice([1, 2])):
        found[part] = {draw.choice(RULE[part]): draw.choice(VALUES)}
        if draw.random() < 0.5:
            found[part]["kind"] = draw.choice(KINDS)
    return found


@pytest.fixture(scope="module")
def folder(six_steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with what an attacker may lay beside it."""
    made = tmp_path_factory.mktemp("hostile") / "model"
    made.mkdir()
    for name in FILES:
        shutil.copy(six_steps / name, made / name)
    ran = HOSTILE.format(str(made.parent / "ran"))
    for name in ("evil.py", "streamlit.py", "transformers.py", "custom_generate/generate.py"):
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(ran)
    (made / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/model", "peft_type": "LORA"}')
    (made.parent / "text.txt").write_text("a few words to read, and then a few more of them. " * 3)
    return made


@pytest.fixture
def ended(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """A command that is called ends in time with one line and runs nothing of others; its code, and what it printed."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail(f"it asked, or called the network: {args}")

    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)

    def call(*arguments: str) -> tuple[int, str]:
        begun = time.process_time()
        code = main(list(arguments))
        took = time.process_time() - begun
        out, err = capsys.readouterr()
        lines = err.strip().splitlines()
        assert took < SECONDS, took
        assert "Traceback" not in err and not (folder.parent / "ran").exists()
        if code:
            assert code in (1, 2) and lines[-1].startswith("atlas: ") and len(lines[-1]) < 2100, err[-3000:]
        return code, out if not code else lines[-1]

    return call


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def commands(folder: Path, model: Path) -> list[list[str]]:
    """Every command that reads a model, or its tokenizer."""
    text = str(folder.parent / "text.txt")
    settings = ["train.steps=1", "train.batch_size=1", "data.seq_len=16", "data.interleave=1", "train.device=cpu"]
    out = [*settings, f"data.path={text}", f"output_dir={model.parent / 'run'}"]
    return [
        ["evaluate", str(model), "--data", text, "--length", "16", "--streams", "1"],
        ["generate", str(model), "--max-new-tokens", "2"],
        ["report", str(model), "--data", text],
        ["train", *out, f"model.init_from={model}"],
        ["train", *out, f"data.tokenizer={model}", "model.preset=nano"],
    ]


@pytest.mark.parametrize("kind", ["TokenizersBackend", "EvilTokenizer", None])
def test_code_of_a_tokenizer_is_never_run_nor_asked_about(
    folder: Path, copied: Path, ended: Ended, kind: str | None
) -> None:
    """By every command; where the tokenizer needs none, it loads without."""
    refused = "asks for code of its own by auto_map, which is not run"
    edit(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": CODE}, tokenizer_class=kind)
    for command in commands(folder, copied)[:: 1 if kind else 2]:
        code, said = ended(*command)
        assert code == 0 if kind == "TokenizersBackend" else refused in said
        shutil.rmtree(copied.parent / "run", ignore_errors=True)


@pytest.mark.parametrize(
    "entries",
    [
        {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": CODE}},
        {"attn_implementation": "someone/kernel", "experts_implementation": "someone/kernel", "use_kernels": True},
        {"_attn_implementation": "someone/kernel", "_experts_implementation": "someone/kernel"},
        {"transformers_weights": "../evil.safetensors"},
        {"per_layer_config": {"0": {"hidden_size": 8}}, "is_encoder_decoder": True, "return_dict": False},
        {
            "tokenizer_class": "EvilTokenizer",
            "torchscript": True,
            "pruned_heads": {"0": [0]},
            "__class__": "x",
            "check": 1,
        },
        {"num_beams": 10**9, "max_length": 10**9, "num_labels": 10**9, "name_or_path": "someone/model"},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_what_no_layer_reads_is_left_out(folder: Path, copied: Path, ended: Ended, entries: dict[str, Any]) -> None:
    expected = ended(*commands(folder, folder)[0])
    edit(copied / "config.json", **entries)
    assert ended(*commands(folder, copied)[0]) == expected
    model = AutoModelForCausalLM.from_pretrained(copied)
    assert type(model) is AtlasForCausalLM and model.config._attn_implementation == "sdpa"
    model.save_pretrained(copied)
    assert "evil" not in (copied / "config.json").read_text()


def tree(**sizes: Any) -> dict[str, Any]:
    return {"global_chunk": 8, "local_chunks": [1], "shard": 8} | sizes


def atlas(part: str, **options: Any) -> dict[str, Any]:
    return {"rule": "atlas", "rule_options": {part: options}}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization_config of a file is not used",
        ),
        ({"dtype": "os.system"}, "dtype='os.system' is none of weights"),
        ({"dtype": None, "torch_dtype": "int8"}, "dtype='int8' is none of weights"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be at most 1,024, got 100000000"),
        ({"num_hidden_layers": 1000}, "do not fit its config.json: num_hidden_layers=1000 of 30 weights"),
        ({"hidden_size": 10**9}, "hidden_size must be at most 1,048,576, got 1000000000"),
        ({"vocab_size": 10**9}, "vocab_size must be at most 1,048,576, got 1000000000"),
        ({"num_attention_heads": 10**9}, "num_attention_heads must be at most"),
        ({"intermediate_size": 10**9}, "intermediate_size must be at most"),
        ({"conv_size": 10**9}, "conv_size must be at most 65,536, got 1000000000"),
        ({"window": 10**9}, "window must be at most 65,536, got 1000000000"),
        ({"chunk_size": 10**9}, "chunk_size must be at most 65,536, got 1000000000"),
        ({"block": "mac", "rule": "titans", "attention_window": 10**9}, "attention_window must be at most 65,536"),
        ({"persistent_tokens": 10**9}, "persistent_tokens must be at most 65,536, got 1000000000"),
        ({"continuum_periods": [1] * 1000}, "continuum_periods must list a number of steps"),
        ({"hidden_size": 2**18, "num_hidden_layers": 1024}, "parameters, and 1.1e+12 is the limit"),
        ({"rule": "tnt", "hierarchy": tree(global_chunk=10**9)}, "hierarchy global_chunk must be at most 65,536"),
        ({"rule": "tnt", "hierarchy": tree(shard=10**9)}, "hierarchy shard must be at most 65,536, got 1000000000"),
        ({"rule": "tnt", "hierarchy": tree(local_chunks=[1] * 99)}, "local_chunks must list"),
        (atlas("network", expansion=10**6), "MLP expansion must be at most 64, got 1000000"),
        (atlas("network", depth=10**6), "MLP depth must be at most 64, got 1000000"),
        (atlas("optimiser", steps=10**9), "Muon steps must be at most 64, got 1000000000"),
        (atlas("features", degree=10**9), "Polynomial degree must be at most 64, got 1000000000"),
        (atlas("features", degree=60), "the columns of a memory's matrix, for heads of 8"),
        (
            {"rule": "swdt", "rule_options": {"features": {"horizon": 10**9}}},
            "Exponential horizon, if not None, must be",
        ),
        (atlas("optimiser", limit=10**400), "optimiser Muon limit must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number above 0"),
    ],
    ids=str,
)
def test_what_no_model_can_have_is_named(
    folder: Path, copied: Path, ended: Ended, entries: dict[str, Any], says: str
) -> None:
    edit(copied / "config.json", **({"window": None} | entries))
    code, said = ended(*commands(folder, copied)[0])
    assert code == 1 and says in said


def test_what_generation_config_says_is_the_commands(folder: Path, copied: Path, ended: Ended) -> None:
    expected = ended(*commands(folder, folder)[1])
    many = {name: 10**9 for name in ("num_beams", "max_new_tokens", "min_length", "num_return_sequences")}
    others = {"cache_implementation": "static", "custom_generate": "evil", "compile_config": {"backend": "evil"}}
    edit(copied / "generation_config.json", **many, **others, stop_strings=["a"], prompt_lookup_num_tokens=3)
    assert ended(*commands(folder, copied)[1]) == expected


WEIGHT = "model.layers.1.mixer.out.weight"
IN_FILE = f"the weight {WEIGHT} in '{{}}model.safetensors'"
IN_FOLDER = f"the weight {WEIGHT} in "


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.fill_(math.nan),
            IN_FOLDER,
        ),
        (lambda w: w.index_fill(0, torch.tensor(3), -math.inf), IN_FOLDER),
        (
            lambda w: w.double() + 1e300,
            IN_FOLDER,
        ),
        (
            lambda w: (100 * w).int(),
            IN_FILE + " is I32: weights are floating-point",
        ),
        (lambda w: w.long(), IN_FILE + " is I64"),
        (lambda w: w > 0, IN_FILE + " is BOOL"),
        (lambda w: w.to(torch.float8_e4m3fn), IN_FILE + " is F8_E4M3"),
        (lambda w: w[:1].clone(), f"do not fit its config.json: {WEIGHT} is [1, 16] in them and [16, 16] in the model"),
        (lambda w: None, f"do not fit its config.json: {WEIGHT} is absent in them and [16, 16] in the model"),
        (lambda w: 3e38 * torch.ones_like(w), "the text is read with a loss that is nan or inf"),
    ],
)
def test_weights_that_are_none_are_named(
    folder: Path, copied: Path, ended: Ended, change: Callable[..., Any], says: str
) -> None:
    path = copied / "model.safetensors"
    weights = load_file(path)
    weights[WEIGHT] = change(weights[WEIGHT])
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path)
    code, said = ended(*commands(folder, copied)[0])
    assert code == 1 and says.format(f"{copied}/") in said
    code, said = ended(*commands(folder, copied)[1])
    assert code == 1 and (says.format(f"{copied}/") in said or "the next token is predicted with nan or inf" in said)


def test_weights_are_read_from_safetensors_alone(folder: Path, copied: Path, ended: Ended) -> None:
    """A pickle beside them is not opened, nor are those of a sharded checkpoint run."""

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (folder.parent / "ran",)

    (copied / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "rng_state.pth"):
        (copied / name).write_bytes(pickle.dumps(Evil()))
    for command in commands(folder, copied)[:4]:
        code, said = ended(*command)
        assert code in (1, 2) and "it holds neither model.safetensors nor an intact checkpoint" in said
    (copied / "shards").mkdir()
    (copied / "shards" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for command in commands(folder, copied)[:4]:
        code, said = ended(*command)
        assert code in (1, 2) and "shards/.metadata is damaged" in said


def changed(draw: random.Random, tree: Any, keys: list[str]) -> Any:
    """JSON with an entry that is another, or new, or taken away; now and then one further in."""
    if (isinstance(tree, dict) and draw.random() < 0.75) or not tree:
        key = draw.choice([*(tree or {}), *keys])
        inner = (tree or {}).get(key)
        if isinstance(inner, dict | list) and inner and draw.random() < 0.6:
            return {**tree, key: changed(draw, inner, list(inner) if isinstance(inner, dict) else keys)}
        if draw.random() < 0.1:
            return {name: value for name, value in (tree or {}).items() if name != key}
        return {**(tree or {}), key: draw.choice(VALUES)}
    if isinstance(tree, list) and tree:
        at = draw.randrange(len(tree))
        return [
            *tree[:at],
            changed(draw, tree[at], keys) if isinstance(tree[at], dict | list) and tree[at] else draw.choice(VALUES),
            *tree[at + 1 :],
        ]
    return draw.choice(VALUES)


def change_text(draw: random.Random, path: Path) -> None:
    """A file that is cut short, that has other bytes, or that is none."""
    data = path.read_bytes()
    at = draw.randrange(len(data))
    kind = draw.randrange(8)
    if kind == 0:
        path.write_bytes(data[:at])
    elif kind == 1:
        path.write_bytes(data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :])
    elif kind == 2:
        path.write_bytes(b'{"model_type": ' + b"[" * 100_000)
    elif kind == 3:
        path.write_bytes(b"\xff\xfe" + data)
    elif kind == 4:
        path.unlink()
    elif kind == 5:
        path.unlink()
        path.mkdir()
    elif kind == 6:
        path.unlink()
        os.mkfifo(path)
    else:
        path.unlink()
        path.symlink_to(draw.choice(["/dev/zero", "/nowhere", path.name]))


def change_weights(draw: random.Random, path: Path) -> None:
    """safetensors whose header says something else, or with numbers that are none."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    name = draw.choice([key for key in header if key != "__metadata__"])
    kind = draw.randrange(7)
    if kind == 0:
        header[name]["dtype"] = draw.choice(["I32", "I64", "BOOL", "U8", "F16", "F8_E4M3", "C64", "x", None, 1])
    elif kind == 1:
        header[name]["shape"] = draw.choice(
            [[], [1], [-1], [2**62, 2**62], header[name]["shape"][::-1], ["x"], None, [1e9]]
        )
    elif kind == 2:
        header[name]["data_offsets"] = draw.choice([[0, 0], [0, 2**63], [-4, 4], [4, 0], None, [0, len(body)]])
    elif kind == 3:
        header[draw.choice(["more", "", "x" * 10_000, "\x1b[2J"])] = header.pop(name)
    elif kind == 4:
        start = header[name]["data_offsets"][0]
        body[start : start + 4] = struct.pack("<f", draw.choice([math.nan, math.inf, -math.inf, 3e38]))
    elif kind == 5:
        body[:] = struct.pack("<f", draw.choice([math.nan, 1e38, 0.0])) * (len(body) // 4)
    else:
        header = changed(draw, header, ["__metadata__", "x"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", draw.choice([len(text)] * 9 + [2**63])) + text + body)


def hostile(draw: random.Random, folder: Path, place: Path) -> str:
    """A copy of the folder at `place` with a change or two; what was changed."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    said = []
    for name in {draw.choice([*FILES[:1] * 4, *FILES[1:]]): None for _ in range(draw.choice([1, 1, 1, 2]))}:
        path, kind = place / name, draw.random()
        if kind < 0.2:
            change_text(draw, path)
        elif name == "model.safetensors":
            change_weights(draw, path)
        else:
            tree = changed(draw, json.loads(path.read_text()), KEYS[name])
            if name == "config.json" and isinstance(tree, dict) and draw.random() < 0.3:
                tree = tree | {"rule_options": options(draw)}
            path.write_text(json.dumps(tree))
        said.append(name)
    return ", ".join(said)


def is_finite(found: Any) -> bool:
    """Whether all numbers in what JSON says are such."""
    if isinstance(found, dict | list):
        return all(map(is_finite, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, float) or math.isfinite(found)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10))
def test_fuzz(folder: Path, ended: Callable[..., tuple[int, str]], tmp_path: Path, seed: int) -> None:
    """Fifty folders a seed, each a sound one with a change or two."""
    draw = random.Random(seed)
    text = str(folder.parent / "text.txt")
    for _ in range(50):
        hostile(draw, folder, tmp_path / "model")
        command = draw.choice(
            [
                ["evaluate", "--data", text, "--length", "32", "--streams", "1", "--json"],
                ["generate", "--max-new-tokens", "3", "--prompt", "a word"],
            ]
        )
        code, said = ended(*command, str(tmp_path / "model"))
        if code == 0 and command[0] == "evaluate":
            assert is_finite(json.loads(said))


@pytest.mark.extended
def test_fuzz_of_states(tmp_path: Path) -> None:
    """Three hundred files of a state: refused, or read on from."""
    memory, x, path, draw = NeuralMemory(16, 2, "titans"), torch.randn(2, 9, 16), tmp_path / "s", random.Random(0)
    _, state = memory(x)
    for _ in range(300):
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        memory.save_state(state, path)
        (change_text if draw.random() < 0.3 else change_weights)(draw, path)
        try:
            held = memory.load_state(path)
        except (ValueError, FileNotFoundError):
            continue
        assert all(t.isfinite().all() for t in held.tensors()) and memory(x, held)[0].shape == x.shape
