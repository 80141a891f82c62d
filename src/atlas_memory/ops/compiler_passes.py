"""The compiler passes that compiling.py adds, in a file of their own: what they import takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomSchedulerPass
from torch.utils.checkpoint import CheckpointPolicy


class SeparateLoops(CustomSchedulerPass):
    """Takes loops apart again whose outer loops were fused."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The compiler makes one kernel of each of ``nodes``, and of each node that is returned."""
        parts = (n.get_outer_nodes() if isinstance(n, OuterLoopFusedSchedulerNode) else [n] for n in nodes)
        return [node for group in parts for node in group]

    def uuid(self) -> str:
        """The name of this pass in the compiler's cache."""
        return "atlas_memory: outer loops are not fused"


class KeepActivations(CustomGraphPass):
    """Keeps for the backward pass what an activation's forward pass computed. The compiler would compute it again, to
    read less memory. That pays on a GPU; on a CPU it takes longer to compute an error function than to read one."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Marks nodes of ``graph``, which has both the forward and the backward pass."""
        for target in (torch.ops.aten.erf.default, torch.ops.aten.exp.default, torch.ops.aten.sigmoid.default):
            for node in graph.find_nodes(op="call_function", target=target):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> str:
        """The name of this pass in the compiler's cache."""
        return "atlas_memory: activations are kept"
