"""Evaluation: bits per byte by position, the worth of the memory's writes, samples."""

from atlas_memory.eval.perplexity import Score, bits_per_byte
from atlas_memory.eval.sampling import sample
from atlas_memory.monitor.hooks import memory_writes

__all__ = ["Score", "bits_per_byte", "memory_writes", "sample"]
