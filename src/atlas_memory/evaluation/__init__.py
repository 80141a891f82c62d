"""What a trained model does: bits per byte by position, its gates, a report with pictures."""

from atlas_memory.evaluation.gates import watch_gates
from atlas_memory.evaluation.perplexity import Score, bits_per_byte, memory_writes
from atlas_memory.evaluation.report import write_report

__all__ = ["Score", "bits_per_byte", "memory_writes", "watch_gates", "write_report"]
