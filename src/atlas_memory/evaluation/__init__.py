"""What a trained model does: bits per byte by position, its gates, what it writes."""

from atlas_memory.evaluation.gates import watch_gates
from atlas_memory.evaluation.perplexity import Score, bits_per_byte, memory_writes
from atlas_memory.evaluation.sampling import sample

__all__ = ["Score", "bits_per_byte", "memory_writes", "sample", "watch_gates"]
