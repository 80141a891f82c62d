"""On what kinds of operation a call spends its time, by torch.profiler."""

from __future__ import annotations

import time

from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import Call

KINDS: dict[str, str] = {
    "matrix products": "mm bmm addmm baddbmm mkl mkldnn convolution thnn attention triangular",
    "reductions": "sum mean amax amin max cumsum cumprod norm softmax prod argmax",
    "copies": "copy clone cat fill zero pad gather scatter index stack repeat",
    "bookkeeping": "view reshape slice select transpose permute strided expand unsqueeze squeeze empty split unbind "
    "unfold detach alias resize narrow to contiguous size t flatten unflatten lift ones zeros new item matmul linear",
}
"""Words in the names of ATen's operators. What has none of these is element-wise; what is no operator of ATen's is
overhead: the autograd engine, Python, and whatever the profiler did not see."""


def kind(name: str) -> str:
    """The kind of a profiled event: one of ``KINDS``, "element-wise", "fused" (compiled), or "overhead"."""
    if name.startswith(("graph_", "triton_", "cpp_fused")):
        return "fused"
    name = name.replace("aoti_torch_cpu_", "aten::")  # what compiled code calls them
    if not name.startswith("aten::"):
        return "overhead"
    operator = name.removeprefix("aten::").removesuffix("_out").lstrip("_").removesuffix("_")
    words = set(operator.split("_")) | {operator}
    if "clamp" in words:  # clamp_max is no maximum
        return "element-wise"
    return next((found for found, names in KINDS.items() if words & set(names.split())), "element-wise")


def shares(call: Call, times: int = 3) -> dict[str, float]:
    """Shares of the wall time of a call by ``kind``; they add up to 1. The profiler itself slows small operators, and
    what it adds falls mostly on "overhead"."""
    call()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start = time.perf_counter()
        for _ in range(times):
            call()
        wall = time.perf_counter() - start
    found: dict[str, float] = {}
    for event in recorded.key_averages():
        share = event.self_cpu_time_total * 1e-6 / wall
        found[kind(event.key)] = found.get(kind(event.key), 0.0) + share
    seen = sum(share for name, share in found.items() if name != "overhead")
    return found | {"overhead": max(0.0, 1.0 - seen)}
