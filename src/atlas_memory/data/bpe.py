"""Byte-level BPE learned from a user's own text."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from atlas_memory.data.sources import Source
from atlas_memory.data.text import rank
from atlas_memory.data.tokens import END

SMALLEST = 257  # every byte, and the end of text


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
        vocab_size: Tokens, at least 257. Fewer are learned if the text has too few different pairs.
        held_out: The share of documents that is left out, those that `atlas train` and `atlas data prepare` hold out of
            the same text at the same share; the first document is read in any case.

    Raises:
        ValueError: The folder is not empty; too small a vocabulary; there is no text; what `Source.documents` raises.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size={vocab_size} must be at least {SMALLEST}: every byte and {END}")
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not empty: choose another folder to write to")
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
                yield document.text

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    if not read[1]:
        raise ValueError(f"no text in {str(source)!r}: {source.skipped} files, none non-empty UTF-8 text")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(partial)
        if folder.is_dir():
            folder.rmdir()
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tokenizer
