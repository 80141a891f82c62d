"""Tokenizers: raw bytes by default, or any tokenizer that transformers can load."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import constants, get_session
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atlas_memory.data.folders import first_line

logger = logging.getLogger(__name__)
END = "<|endoftext|>"
PAD = "<|pad|>"
WAIT = 5.0
"""Seconds in which the hub must answer."""
CONTEXT = 8
"""Tokens behind which others are decoded: what a tokenizer makes of the first token of all it does not make of later
ones, and a character may be of several tokens."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table) -> the byte's value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return table


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes of UTF-8; 256 is `<|endoftext|>` (bos and eos), 257
    `<|pad|>`.

    `decode(encode(text)) == text` for every text that UTF-8 can hold. The names of the special tokens inside a text are
    those tokens, as a chat template needs them; `encode`, which reads texts for training, takes them as plain bytes. It
    is an ordinary fast tokenizer (byte-level BPE without merges), so it saves beside a model.
    """
    backend = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def is_one_tokenizer(name: str, other: str) -> bool:
    """Whether two names, as `load_tokenizer` takes them, are of the same tokenizer: equal, or of the same folder."""
    folders = [Path(one).expanduser() for one in (name, other)]
    return name == other or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))


def hub_answers(what: str) -> bool:
    """Whether the hub can be reached, after a word that `what` is looked for there. Its own library asks for a minute
    before it says that there is no network."""
    logger.warning("looking for %s on the hub", what)
    try:
        get_session().head(constants.ENDPOINT, timeout=WAIT)
    except Exception as error:  # as many types as there are ways to be without a network
        logger.warning("the hub does not answer (%s): what has been downloaded before is taken", first_line(error))
        return False
    return True


def load_tokenizer(name: str) -> Any:
    """`"bytes"`, or the name or folder of a fast tokenizer with an end-of-text token; ValueError
    otherwise."""
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
    """A fast tokenizer with an end-of-text token, of a folder or by its name. Code that comes with one is never run.
    ValueError that says why there is none."""
    try:
        local = Path(name).is_dir() or not hub_answers(f"the tokenizer {str(name)!r}")
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


# A text that has the name of a special token in it, such as <|endoftext|>, has no end there.
_AS_IT_STANDS: dict[str, Any] = {
    "add_special_tokens": False,
    "split_special_tokens": True,
    "return_attention_mask": False,
    "verbose": False,
}


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """The ids of `text`, int32 `[tokens]`, without special tokens."""
    if is_byte_tokenizer(tokenizer):  # what the tokenizer returns too, a hundred times faster
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)
    ids = tokenizer(text, **_AS_IT_STANDS).input_ids
    return np.asarray(ids, dtype=np.int32)


def bytes_per_token(tokenizer: Any, text: str) -> np.ndarray:
    """How many bytes of `text` each token of `encode(tokenizer, text)` stands for, int64 `[tokens]`.

    A character spread over several tokens counts at the first of them; characters that the tokenizer drops
    count at the next token, so the sum is the length of the text in bytes.
    """
    if is_byte_tokenizer(tokenizer):
        return np.ones(len(text.encode("utf-8")), dtype=np.int64)
    offsets = tokenizer(text, return_offsets_mapping=True, **_AS_IT_STANDS).offset_mapping
    if not offsets:
        return np.zeros(0, dtype=np.int64)
    width = np.fromiter((len(char.encode("utf-8")) for char in text), dtype=np.int64, count=len(text))
    before = np.concatenate([[0], np.cumsum(width)])  # bytes before each character
    ends = np.maximum.accumulate(np.asarray([end for _, end in offsets], dtype=np.int64))
    ends[-1] = len(text)
    return np.diff(before[ends], prepend=0)


def share_lost(tokenizer: Any, texts: Iterable[str]) -> float:
    """Of the first 65,536 characters of texts, white space aside, the share that does not come back when what they are
    encoded to is decoded: characters that the tokenizer does not know, or makes others of."""
    if is_byte_tokenizer(tokenizer):
        return 0.0
    text = "".join(islice(chain.from_iterable(texts), 2**16))
    had = Counter("".join(text.split()))
    lost = had - Counter(tokenizer.decode(encode(tokenizer, text).tolist(), skip_special_tokens=True))
    return lost.total() / max(1, had.total())


def warn_of_loss(tokenizer: Any, texts: Iterable[str]) -> None:
    """A warning if the tokenizer loses more than a thousandth of the characters, which no prediction then pays for."""
    if (share := share_lost(tokenizer, texts)) > 1e-3:
        logger.warning(
            "warning: the tokenizer loses %.1f %% of the text's characters, which do not come back when it decodes "
            "what it encoded: bits per byte are too low by what they would cost. A byte-level tokenizer loses none",
            100 * share,
        )
