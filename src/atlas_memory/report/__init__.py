"""A run on one page: numbers, pictures and a sample of text."""

from atlas_memory.report.report import write_report

__all__ = ["write_report"]
