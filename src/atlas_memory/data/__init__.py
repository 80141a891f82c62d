"""Text in, token arrays out: the byte tokenizer, corpora with a held-out split, training crops."""

from atlas_memory.data.crops import RandomCrops
from atlas_memory.data.streams import Segments, Tokens
from atlas_memory.data.text import Corpus, Document
from atlas_memory.data.tokens import byte_tokenizer, encode, load_tokenizer

__all__ = ["Corpus", "Document", "RandomCrops", "Segments", "Tokens", "byte_tokenizer", "encode", "load_tokenizer"]
