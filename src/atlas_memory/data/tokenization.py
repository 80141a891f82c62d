"""Tokenizers: raw bytes by default, any tokenizer that transformers can load, or one learned from text."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants, get_session
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atlas_memory.console import first_line
from atlas_memory.data.atomic_folder import check_new, new_folder
from atlas_memory.data.sources import Source

logger = logging.getLogger(__name__)
END = "<|endoftext|>"
PAD = "<|pad|>"
TIMEOUT = 5.0
"""Seconds in which the hub must answer."""
DECODING_CONTEXT = 8
"""Tokens decoded before others: the first one may be decoded differently, and characters span several."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers without one: a line for each message, as in a play."""
CHAT_STOP = "\nUser:"
"""What ends an answer by `CHAT_TEMPLATE`."""
SMALLEST_VOCABULARY = 258  # every byte, the end of text and padding
_LONG_WORD = re.compile(r"\S{1000}")
# <|endoftext|> inside a text is plain text.
_AS_PLAIN_TEXT: dict[str, Any] = {
    "add_special_tokens": False,
    "split_special_tokens": True,
    "return_attention_mask": False,
    "verbose": False,
}


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table) -> the byte's value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes of UTF-8; 256 is `<|endoftext|>` (bos and eos), 257 `<|pad|>`.

    `decode(encode(text)) == text` for every UTF-8 text. It is an ordinary fast tokenizer (byte-level BPE, no merges),
    which knows special tokens inside a text; `encode`, for training, takes those as plain bytes.
    """
    return _fast_tokenizer(_byte_level(models.BPE(vocab=_byte_alphabet(), merges=[])))


def _byte_level(model: models.BPE, words: bool = False) -> Tokenizer:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    if words:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    return backend


def learned_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from texts: every byte is a token, and so is every digit, alone."""
    backend = _byte_level(models.BPE(), words=True)
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END, PAD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return _fast_tokenizer(backend)


def _fast_tokenizer(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def same_tokenizer(name: str, other: str) -> bool:
    """Whether two names for `load_tokenizer` are equal or of the same folder."""
    folders = [Path(one).expanduser() for one in (name, other)]
    return name == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


def _hub_answers(what: str) -> bool:
    """Whether the hub can be reached; its own library tries for a minute without a network."""
    logger.warning("looking for %s on the hub", what)
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # of many types
        logger.warning("the hub does not answer (%s): what has been downloaded before is taken", first_line(error))
        return False
    return True


def load_tokenizer(name: str) -> Any:
    """`"bytes"`, or the name or folder of a fast tokenizer with an end-of-text token; ValueError otherwise."""
    if name == "bytes":
        return byte_tokenizer()
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    if name.startswith((".", "/")) and not Path(name).exists():
        raise ValueError(f'data.tokenizer={name!r} does not exist; "bytes" always works')
    try:
        return read_tokenizer(name)
    except ValueError as error:
        missing = "" if Path(name).exists() else "is no folder here and "
        raise ValueError(
            f"data.tokenizer={name!r} {missing}{error}; `atlas tokenizer train --out FOLDER` makes one, and "
            '"bytes" always works'
        ) from error


def read_tokenizer(name: str | Path) -> Any:
    """A fast tokenizer with an end-of-text token, from a folder or by name; code that comes with it is never run.
    ValueError otherwise."""
    try:
        local = Path(name).is_dir() or not _hub_answers(f"the tokenizer {str(name)!r}")
        found = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # the loader raises a dozen different types
        own_code = "trust_remote_code" in str(error)
        reason = "it asks for code of its own by auto_map, which is not run" if own_code else first_line(error)
        raise ValueError(f"could not be loaded ({reason})") from error
    if not found.is_fast:
        raise ValueError("has no fast (tokenizers) version, which is needed to count bytes")
    if found.eos_token_id is None:
        raise ValueError(
            "has no end-of-text token to put between documents: name one of its tokens as eos_token in its "
            "tokenizer_config.json"
        )
    return found


def is_byte_tokenizer(tokenizer: Any) -> bool:
    """Whether its ids are `byte_tokenizer`'s (also after saving and loading)."""
    return len(tokenizer) == 258 and tokenizer.get_vocab() == {**_byte_alphabet(), END: 256, PAD: 257}


def chat_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer with a chat template: its own, or else `CHAT_TEMPLATE`."""
    if not tokenizer.chat_template:
        tokenizer = deepcopy(tokenizer)
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """The ids of `text`, int32 `[tokens]`, without special tokens."""
    if is_byte_tokenizer(tokenizer):  # the same ids, a hundred times faster
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
    return np.asarray(tokenizer(text, **_AS_PLAIN_TEXT).input_ids, dtype=np.int32)


def encode_batch(tokenizer: Any, texts: list[str]) -> Iterator[np.ndarray]:
    """`encode` of each text, by as many threads as there are cores."""
    if is_byte_tokenizer(tokenizer) or not texts:
        yield from (encode(tokenizer, text) for text in texts)
        return
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        found = tokenizer(texts, **_AS_PLAIN_TEXT).input_ids
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM") if before is None else os.environ.update(TOKENIZERS_PARALLELISM=before)
    yield from (np.asarray(ids, dtype=np.int32) for ids in found)


def bytes_per_token(tokenizer: Any, text: str) -> np.ndarray:
    """How many bytes of `text` each token of `encode(tokenizer, text)` stands for, int64 `[tokens]`, all in sum:
    a character of several tokens counts at the first, characters that the tokenizer drops at the next."""
    if is_byte_tokenizer(tokenizer):
        return np.ones(len(text.encode("utf-8")), dtype=np.int64)
    offsets = tokenizer(text, return_offsets_mapping=True, **_AS_PLAIN_TEXT).offset_mapping
    if not offsets:
        return np.zeros(0, dtype=np.int64)
    width = np.fromiter((len(char.encode("utf-8")) for char in text), dtype=np.int64, count=len(text))
    before = np.concatenate([[0], np.cumsum(width)])  # bytes before each character
    ends = np.maximum.accumulate(np.asarray([end for _, end in offsets], dtype=np.int64))
    ends[-1] = len(text)
    return np.diff(before[ends], prepend=0)


def train_tokenizer(
    source: Source,
    folder: Path,
    vocab_size: int,
    held_out: float = 0.1,
    progress: Callable[[int, int], None] = lambda documents, characters: None,
) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE from the documents of `source` that are trained on, and write it to `folder`.

    Text is read once, in parts; memory grows with the number of distinct words. The result is deterministic. Every byte
    is a token, and so is every digit, alone. `progress` is called with how many documents and characters there were.

    Args:
        vocab_size: Tokens, at least 258; fewer are learned from a text with few distinct pairs.
        held_out: The share of documents to leave out, as `atlas train` and `atlas data prepare` do; but of a text of a
            few documents all may be read.

    Raises:
        ValueError: The folder is not empty; too small a vocabulary; no text; what `Source.documents` raises.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size={vocab_size} must be at least {SMALLEST_VOCABULARY}: every byte, {END} and {PAD}")
    folder = check_new(folder)
    source.chunk = 2**20
    documents = characters = 0

    def texts() -> Iterator[str]:
        nonlocal documents, characters
        holding = False
        for document in source.documents():
            if not document.continues:
                holding = documents > 0 and document.rank() < held_out
                documents += not holding
            if not holding:
                characters += len(document.text)
                progress(documents, characters)
                yield from _cut_long_words(document.text)

    tokenizer = learned_tokenizer(texts(), vocab_size)
    if not characters:
        raise ValueError(source.without_text())
    with new_folder(folder) as partial:
        tokenizer.save_pretrained(partial)
    return tokenizer


def _cut_long_words(text: str) -> Iterator[str]:
    """The text, cut within words of over 1,000 characters, whose time is quadratic."""
    start = 0
    for found in _LONG_WORD.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def padding_token(tokenizer: Any) -> int:
    """The token to pad with: the end of a text, where a tokenizer has none for it."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
