"""Byte-level BPE learned from a user's own text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from atlas_memory.data.folders import check_new, new_folder
from atlas_memory.data.sources import Source
from atlas_memory.data.text import rank
from atlas_memory.data.tokens import END, PAD

SMALLEST = 258  # every byte, the end of text and padding
_LONG = re.compile(r"\S{1000}")


def train_tokenizer(
    source: Source,
    folder: Path,
    vocab_size: int,
    held_out: float = 0.1,
    progress: Callable[[int, int], None] = lambda documents, characters: None,
) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE from the documents of `source` that are trained on, and write it to `folder`.

    Text is read once, in parts of bounded size; what is kept is the count of every distinct word. The same text makes
    the same tokenizer. Every byte is a token, so that any text can be written; `<|endoftext|>` begins and ends
    documents. `progress` is told how many documents and characters have been read.

    Args:
        vocab_size: Tokens, at least 258. Fewer are learned if the text has too few different pairs.
        held_out: The share of documents that is left out, those that `atlas train` and `atlas data prepare` hold out of
            the same text at the same share. The first document is read in any case; and where no name's hash is low
            enough, as in a text of a few documents, so is what is held out instead, one of them or the end of one.

    Raises:
        ValueError: The folder is not empty; too small a vocabulary; there is no text; what `Source.documents` raises.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size={vocab_size} must be at least {SMALLEST}: every byte, {END} and {PAD}")
    folder = check_new(folder)
    source.largest = 2**20
    read = [0, 0]

    def texts() -> Iterator[str]:
        holding = False
        for document in source.documents():
            if not document.continues:
                holding = read[0] > 0 and rank(document) < held_out
                read[0] += not holding
            if not holding:
                read[1] += len(document.text)
                progress(*read)
                yield from _without_long_words(document.text)

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END, PAD], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    if not read[1]:
        raise ValueError(source.without_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    with new_folder(folder) as partial:
        tokenizer.save_pretrained(partial)
    return tokenizer


def _without_long_words(text: str) -> Iterator[str]:
    """The text, cut within words of more than 1,000 characters: the time that a word takes grows with the square of its
    length."""
    start = 0
    for found in _LONG.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]
