"""Benchmarks of long context that any causal language model of transformers can take."""

from .babilong import BABILONG
from .needle import NEEDLES
from .suite import Suite

SUITES: dict[str, Suite] = {suite.name: suite for suite in (*NEEDLES, *BABILONG)}
"""By name."""
