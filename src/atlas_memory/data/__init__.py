"""Text in, token arrays out: the byte tokenizer, corpora with a held-out split, training crops."""

from atlas_memory.data.crops import RandomCrops
from atlas_memory.data.sources import Document, Source
from atlas_memory.data.streams import Segments, Tokens
from atlas_memory.data.text import Corpus
from atlas_memory.data.tokens import byte_tokenizer, encode, load_tokenizer

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
]
