"""Tokenizers: nothing is lost, every byte is counted once."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atlas_memory.data import tokenization
from atlas_memory.data.tokenization import (
    byte_tokenizer,
    bytes_per_token,
    encode,
    is_byte_tokenizer,
    load_tokenizer,
)

BYTES = byte_tokenizer()
PIECES = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["<|endoftext|>", "<|pad|>", "\r\n"])
TEXTS = st.lists(PIECES).map("".join)


@given(TEXTS)
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES(text, split_special_tokens=True).input_ids
    assert ids == list(text.encode()) == encode(BYTES, text).tolist()
    assert BYTES.decode(ids) == text


def test_special_tokens() -> None:
    assert len(BYTES) == 258
    assert (BYTES.bos_token_id, BYTES.eos_token_id, BYTES.pad_token_id) == (256, 256, 257)
    assert BYTES.decode([256, 97, 257], skip_special_tokens=True) == "a"
    assert BYTES(["a", "abc"], padding=True).input_ids == [[257, 257, 97], [97, 98, 99]]


def test_names_of_special_tokens_in_a_text() -> None:
    """They are the tokens in a chat, and plain bytes in a text that is read for training."""
    assert BYTES("a<|endoftext|>").input_ids == [97, 256]
    assert encode(BYTES, "a<|endoftext|>").tolist() == list(b"a<|endoftext|>")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    chat = BYTES.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=template)
    assert chat["input_ids"] == [*b"user: hi", 256]


def test_saved_and_loaded(tmp_path) -> None:
    BYTES.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "déjà\t<|endoftext|> 漢字\n"
    assert is_byte_tokenizer(loaded)
    assert loaded(text).input_ids == BYTES(text).input_ids
    assert loaded.padding_side == "left"


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Words and a word for the unknown; spaces are dropped."""
    backend = Tokenizer(models.WordLevel({"<u>": 0, "one": 1, "deux": 2, "<e>": 3}, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<u>", **special)


@given(st.text(st.sampled_from("onedux é漢 \n"), min_size=1))
def test_bytes_of_words_add_up(text: str) -> None:
    tokenizer = word_tokenizer()
    counts = bytes_per_token(tokenizer, text)
    assert len(counts) == len(encode(tokenizer, text))
    assert (counts >= 0).all()
    assert counts.sum() == (len(text.encode()) if len(counts) else 0)


def test_bytes_per_token() -> None:
    assert bytes_per_token(word_tokenizer(), "one  déux one\n").tolist() == [3, 7, 5]
    assert np.array_equal(bytes_per_token(BYTES, "é!"), [1, 1, 1])


def test_load_tokenizer(tmp_path) -> None:
    assert is_byte_tokenizer(load_tokenizer("bytes"))
    word_tokenizer(eos_token="<e>").save_pretrained(tmp_path / "words")
    assert load_tokenizer(str(tmp_path / "words")).eos_token_id == 3
    word_tokenizer().save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path / "endless"))
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="could not be loaded"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch, caplog) -> None:
    def no_network() -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(tokenization, "get_session", no_network)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="tokenizer='gpt3' is no folder here and could not be loaded"):
        load_tokenizer("gpt3")
    assert (
        "looking for the tokenizer 'gpt3' on the hub" in caplog.text and "does not answer (no network)" in caplog.text
    )
    assert time.monotonic() - begun < 20
