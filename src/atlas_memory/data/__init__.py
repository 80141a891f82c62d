"""Text in, token arrays out: documents of files and datasets, tokenizers, a held-out split, training examples."""

from atlas_memory.data.corpus import Corpus
from atlas_memory.data.segments import RandomCrops, Segments, Tokens
from atlas_memory.data.sources import Document, Source
from atlas_memory.data.tokenization import byte_tokenizer, encode, load_tokenizer, train_tokenizer

__all__ = [
    "Corpus",
    "Document",
    "RandomCrops",
    "Segments",
    "Source",
    "Tokens",
    "byte_tokenizer",
    "encode",
    "load_tokenizer",
    "train_tokenizer",
]
