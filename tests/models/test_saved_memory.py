"""What a model has read: the same in one go and in parts, from a file and without; files that are refused."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_memory.data import byte_tokenizer
from atlas_memory.models import AtlasForCausalLM, Memory
from atlas_memory.models.saved_memory import read_memory_file

Make = Callable[..., AtlasForCausalLM]
LONG: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def ids(time: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 29, (1, time), generator=torch.Generator().manual_seed(seed))


def same(one: Memory, other: Memory) -> bool:
    tensors = [[t for state in m.states for t in state.tensors()] for m in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*tensors, strict=True)) and replace(one, states=()) == replace(
        other, states=()
    )


def test_answers_from_a_file_are_those_without_it(every_model: AtlasForCausalLM, tmp_path: Path) -> None:
    """Bitwise; and those of `generate` on the whole text."""
    memory, question = every_model.read(ids(13)), ids(4, 2)
    memory.save(tmp_path / "a.memory")
    loaded = Memory.load(tmp_path / "a.memory", every_model)
    assert same(loaded, memory)
    found = [every_model.generate(question, memory=m, **LONG) for m in (memory, loaded, memory)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])  # and it has not changed
    end = torch.tensor([[every_model.config.eos_token_id]])
    whole = every_model.generate(torch.cat([end, ids(13), question], 1), **LONG)
    assert torch.equal(whole[:, 14:], found[0])


def test_reading_on_is_reading_at_once(model: AtlasForCausalLM) -> None:
    model = model.double()
    parts = model.read(ids(13)[:, 6:], memory=model.read(ids(13)[:, :6]))
    whole = model.read(ids(13))
    assert (parts.tokens, parts.last_token) == (whole.tokens, whole.last_token) == (13, int(ids(13)[0, -1]))
    for a, b in zip(parts.states, whole.states, strict=True):
        for one, other in zip(a.tensors(), b.tensors(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_without_a_prompt_the_text_goes_on(make: Make) -> None:
    model = make(rule="titans", window=1)
    memory = model.read(ids(9))
    whole = model.generate(torch.cat([torch.tensor([[29]]), ids(9)], 1), **LONG)[:, 10:]
    assert torch.equal(model.generate(memory=memory, **LONG), whole)
    assert torch.equal(model.generate(torch.empty(1, 0, dtype=torch.long), memory=memory, **LONG), whole)
    found = model.generate(memory=memory, return_dict_in_generate=True, **LONG)
    assert torch.equal(found.sequences, whole)


def test_several_questions_and_beams(make: Make) -> None:
    model = make(rule="titans", window=1)
    memory, questions = model.read(ids(9)), torch.cat([ids(4), ids(4, 2)])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    together = model.generate(questions, attention_mask=mask, memory=memory, **LONG)
    assert torch.equal(together[:1, 4:], model.generate(questions[:1, 1:], memory=memory, **LONG)[:, 3:])
    assert torch.equal(together[1:], model.generate(questions[1:], memory=memory, **LONG))
    assert model.generate(questions, memory=memory, num_beams=2, **LONG).shape == (2, 10)


def test_an_empty_memory_has_read_the_end_of_text(make: Make, tmp_path: Path) -> None:
    model = make(rule="titans", window=1)
    empty = Memory.empty(model)
    assert (empty.tokens, empty.last_token, empty.nbytes) == (0, 29, 0)
    empty.save(tmp_path / "a.memory")
    loaded = Memory.load(tmp_path / "a.memory", model)
    question = ids(4)
    begun = model.generate(torch.cat([torch.tensor([[29]]), question], 1), **LONG)[:, 1:]
    assert torch.equal(model.generate(question, memory=loaded, **LONG), begun)
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match="end-of-text token"):
        model.read(question)


def test_what_it_tells(make: Make) -> None:
    model = make(rule="titans", window=1, vocab_size=258)
    model.config.eos_token_id = 256
    tokenizer = byte_tokenizer()
    memory = model.read("café <|endoftext|>", tokenizer, name="a.txt")
    assert memory.tokens == len("café <|endoftext|>".encode())
    (text,) = memory.texts
    assert (text.name, text.bytes) == ("a.txt", 19)
    assert model.read("more", tokenizer, memory).texts[0] == text
    first, second = memory.layers
    assert (first.name, second.name) == ("0.memory", "1.memory")
    assert first.norm > 0 and first.written > 0 and 0 < first.half_life[0] <= first.half_life[1]
    assert memory.model["rule"] == "titans"


def test_files_of_equal_memories_are_equal(make: Make, tmp_path: Path) -> None:
    model = make(rule="titans", window=1)
    for name in "abc":
        model.read(ids(9)).save(tmp_path / name)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


def test_the_state_has_a_constant_size(every_model: AtlasForCausalLM) -> None:
    """A fixed list of tensors of fixed sizes, which other engines ask for; but for states that grow."""
    short, long = every_model.read(ids(9)), every_model.read(ids(30))
    shapes = [[t.shape for state in memory.states for t in state.tensors()] for memory in (short, long)]
    grows = any(getattr(module, "grows", False) for module in every_model.modules())
    assert grows or shapes[0] == shapes[1]


def test_what_cannot_be_read(make: Make) -> None:
    model, other = make(rule="titans", window=1), make(rule="deltanet")
    memory = model.read(ids(5))
    with pytest.raises(ValueError, match="tokenizer"):
        model.read("a text")
    with pytest.raises(ValueError, match="at least one token"):
        model.read(torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        make(rule="titans", window=1, vocab_size=258).read("", byte_tokenizer())
    with pytest.raises(ValueError, match="one text"):
        model.read(torch.cat([ids(3), ids(3)]))
    with pytest.raises(ValueError, match="from 0 to 30"):
        model.read(torch.tensor([[31]]))
    with pytest.raises(ValueError, match="rule 'titans', and this one has 'deltanet'"):
        other.read(ids(5), memory=memory)
    with pytest.raises(ValueError, match=r"Memory\.load"):
        model.generate(ids(5), memory="a.memory")
    with pytest.raises(ValueError, match="leave past_key_values out"):
        model.generate(ids(5), memory=memory, past_key_values=memory.cache())
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(ValueError, match="other weights"):
        model.generate(ids(5), memory=memory)


def damaged(path: Path, name: str) -> None:
    """Change a saved memory."""
    data = bytearray(path.read_bytes())
    if name == "empty":
        path.write_bytes(b"")
    elif name == "cut":
        path.write_bytes(data[:-100])
    elif name == "a bit of a number":
        data[-9] ^= 1
        path.write_bytes(data)
    elif name == "a bit of the header":
        at = data.index(b"last_token") + 14
        data[at] ^= 1
        path.write_bytes(data)
    elif name == "pickle":
        path.write_bytes(pickle.dumps({"states": []}))
    elif name == "other tensors":
        save_file({"a": torch.ones(3)}, path)
    elif name == "no metadata":
        save_file(load_file(path), path, metadata={"atlas-memory": "{}"})
    elif name == "newer":
        save_file(load_file(path), path, metadata={"atlas-memory": '{"format": 9}'})


CASES = {
    "empty": "cut short",
    "cut": "cut short",
    "a bit of a number": "damaged",
    "a bit of the header": "damaged",
    "pickle": "cut short",
    "other tensors": "no memory",
    "no metadata": "damaged",
    "newer": "another version",
}


@pytest.mark.parametrize("name", CASES)
def test_damaged_files_are_refused(make: Make, tmp_path: Path, name: str) -> None:
    model = make(rule="titans", window=1)
    path = tmp_path / "a.memory"
    model.read(ids(5)).save(path)
    damaged(path, name)
    with pytest.raises(ValueError, match=CASES[name]):
        Memory.load(path, model)


def test_files_that_are_no_memory(make: Make, tmp_path: Path) -> None:
    model = make(rule="titans", window=1)
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match="no memory at"):
            Memory.load(place, model)
    model.read(ids(5)).save(tmp_path / "a.memory")
    about, tensors = read_memory_file(tmp_path / "a.memory")
    assert about["tokens"] == 5 and sum(t.nbytes for t in tensors.values()) == model.read(ids(5)).nbytes
    json.dumps(about["model"])


def test_a_full_disk_leaves_the_old_file(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(rule="titans", window=1)
    path, first = tmp_path / "a.memory", model.read(ids(5))
    first.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device; make room"):
        model.read(ids(7)).save(path)
    assert same(Memory.load(path, model), first)
    assert [p.name for p in tmp_path.iterdir()] == ["a.memory"]
    memory = model.read(ids(5))
    with pytest.raises(ValueError, match="not finite"):
        replace(memory, states=(memory.states[0].map(lambda t: t * torch.nan), memory.states[1])).save(path)
