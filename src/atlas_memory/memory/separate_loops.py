"""The pass of compiling.py, in a file of its own: what it imports takes seconds."""

from __future__ import annotations

from typing import Any

from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.custom_graph_pass import CustomSchedulerPass


class SeparateLoops(CustomSchedulerPass):
    """Takes loops apart again whose outer loops were fused."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """``nodes`` are what the compiler makes a kernel of, each; so is what is returned."""
        parts = (n.get_outer_nodes() if isinstance(n, OuterLoopFusedSchedulerNode) else [n] for n in nodes)
        return [node for group in parts for node in group]

    def uuid(self) -> str:
        """Of this pass, for the compiler's cache."""
        return "atlas_memory: outer loops are not fused"
