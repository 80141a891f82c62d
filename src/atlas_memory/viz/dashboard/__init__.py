"""The dashboard: pages that show runs while they train (`atlas dashboard RUNS`)."""

from atlas_memory.viz.dashboard.serve import serve

__all__ = ["serve"]
