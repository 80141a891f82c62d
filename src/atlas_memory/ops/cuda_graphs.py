"""Calls of a form recorded as CUDA graphs and replayed. Reading a sequence takes a few dozen small operations a chunk.
A GPU does them in less time than Python takes to ask for them; a graph is asked for once.

A call is recorded when tensors of its shapes come for the third time, with its backward pass where gradients are
wanted. Before that, and where it cannot be recorded, it is computed as it would be without. A recording has memory of
its own, for copies of its inputs and for what its backward pass needs. While a backward pass is still to come it cannot
be used again, and a second call of the same shapes is computed without.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..rules.gates import Gates
from ..rules.rule import Params, Rule
from ..rules.state import MemoryState
from .precision import Form

CALLS = 2
"""How often a call is computed before it is recorded, unless ``Graphs.calls`` is set."""
KEPT = 8
"""How many recordings a memory makes; calls of further shapes are computed."""
SHAPES = 1000
"""How many shapes a memory remembers that it has met."""

Read = Callable[[Sequence[Tensor]], tuple[Tensor, MemoryState]]
"""A form as a function of the tensors among its arguments."""


class Graphs:
    """The recordings of one memory, called as a form is, with the form before its arguments. Copies, and what is
    unpickled, begin without recordings."""

    def __init__(self) -> None:
        self.calls = CALLS
        self.seen_shapes: Counter[Any] = Counter()
        self.recordings: dict[Any, Recording | None] = {}  # None: it could not be recorded
        self.lock = Lock()

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()

    def __call__(
        self,
        form: Form,
        rule: Rule,
        params: Params,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        state: MemoryState | None = None,
    ) -> tuple[Tensor, MemoryState]:
        """What ``form`` makes of the other arguments, which are those of ``recurrent``."""
        tensors: list[Tensor] = []

        def meet(x: Tensor) -> Tensor:
            tensors.append(x)
            return x

        def over(leaf: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
            return params.map(leaf), leaf(q), leaf(k), leaf(v), gates.map(leaf), state and state.map(leaf)

        def read(given: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
            each = iter(given)
            return form(rule, *over(lambda _: next(each)))

        over(meet)
        if _recordable(tensors) and self.lock.acquire(blocking=False):  # else another thread is here
            try:
                recording = self._recording((form, rule), tensors, gates, read)
                if recording is not None:
                    return recording(tensors)
            finally:
                self.lock.release()
        return form(rule, params, q, k, v, gates, state)

    def _recording(self, what: tuple[Form, Rule], tensors: list[Tensor], gates: Gates, read: Read) -> Recording | None:
        """The one of this form and rule and these shapes, made if it is time to; None: none can be used now."""
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        shapes = tuple((x.shape, x.dtype, gradients and x.requires_grad) for x in tensors)
        given = tuple(g is None for g in (gates.alpha, gates.theta, gates.gamma, gates.delta, gates.length))
        form, rule = what
        which = (form.func, *form.keywords.items()) if isinstance(form, partial) else form
        key = which, rule, shapes, given, torch.cuda.current_stream(tensors[0].device)
        if key not in self.recordings:
            if len(self.recordings) >= KEPT:
                return None
            if len(self.seen_shapes) >= SHAPES:  # a state that grows has another at every token
                self.seen_shapes.clear()
            self.seen_shapes[key] += 1
            if self.seen_shapes[key] <= self.calls:
                return None
            self.recordings[key] = None
            try:
                self.recordings[key] = Recording(read, tensors, gradients)
            except RuntimeError as error:  # such as too little memory
                why = " ".join(str(error).split())[:200]
                warnings.warn(f"graphed: a memory is computed without a CUDA graph: {why}", stacklevel=4)
        recording = self.recordings[key]
        return None if recording is None or recording.pending else recording


def _recordable(tensors: list[Tensor]) -> bool:
    """Whether these are plain tensors on a GPU, outside of a compiler, of a transform, of another recording and of
    hooks on what is saved for the backward pass, as activation checkpointing has them."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    there = all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda for x in tensors)
    return there and not torch.cuda.is_current_stream_capturing()


class Recording:
    """One call as a CUDA graph and, with ``gradients``, its backward pass as another."""

    def __init__(self, read: Read, tensors: Sequence[Tensor], gradients: bool) -> None:
        device = tensors[0].device
        now, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        self.node: Callable[[], object | None] = _gone
        self.calls = 0
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        memory = torch.cuda.graph_pool_handle()
        self.outputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []

        def record(graph: torch.cuda.CUDAGraph) -> Any:  # while other threads may load data
            return torch.cuda.graph(graph, memory, aside, capture_error_mode="thread_local")

        # The caller may have autocast on, outside of which backward passes run.
        with (
            torch.inference_mode(False),
            torch.autocast(device.type, enabled=False),
            torch.cuda.device(device),
            torch.set_grad_enabled(gradients),
        ):
            self.inputs = [x.detach().clone().requires_grad_(gradients and x.requires_grad) for x in tensors]
            aside.wait_stream(now)
            with torch.cuda.stream(aside):  # once more: what a first call on a stream sets up cannot be recorded
                self._keep(*read(self.inputs))
                self.gradients = self._pull() if gradients else []
            now.wait_stream(aside)
            self.outputs, self.gradients = [], []
            with record(self.forward):
                results = read(self.inputs)
            self._keep(*results)
            if gradients:
                with record(self.backward):
                    self.gradients = self._pull()
            self.outputs = [x.detach() for x in self.outputs]

    def _keep(self, y: Tensor, end: MemoryState) -> None:
        """Keep the tensors among the results, each once, where they were, and room for their gradients."""
        results = [y, *end.tensors()]
        kept = {id(x): x for x in results}
        place = {which: i for i, which in enumerate(kept)}
        self.outputs, self.places, self.end = list(kept.values()), [place[id(x)] for x in results], end.detach()
        self.pulled = [torch.zeros_like(x) if x.requires_grad else None for x in self.outputs]

    def _pull(self) -> list[Tensor | None]:
        """The gradients of those inputs that want one."""
        outputs = [x for x, g in zip(self.outputs, self.pulled, strict=True) if g is not None]
        inputs, by = [x for x in self.inputs if x.requires_grad], [g for g in self.pulled if g is not None]
        return list(torch.autograd.grad(outputs, inputs, by, allow_unused=True)) if outputs else [None] * len(inputs)

    @property
    def pending(self) -> bool:
        """Whether there is a call whose backward pass may still come."""
        return self.node() is not None

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
        """The results for other ``tensors`` of the same shapes."""
        outputs = _Replay.apply(self, *tensors)
        y, *rest = (outputs[i] for i in self.places)
        each = iter(rest)
        return y, self.end.map(lambda _: next(each))


def _gone() -> None:
    """In place of a weak reference to what is no more."""


class _Replay(torch.autograd.Function):
    """What a recording makes of tensors. Results and gradients are copies, since the next call overwrites them."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        for mine, given in zip(recording.inputs, tensors, strict=True):
            mine.copy_(given)
        recording.forward.replay()
        recording.calls += 1
        outputs = tuple(x.clone() for x in recording.outputs)
        pairs = zip(outputs, recording.pulled, strict=True)
        ctx.mark_non_differentiable(*(x for x, pulled in pairs if pulled is None))
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.call = recording, recording.calls
        # The backward pass reuses the memory of what it has read: it can be replayed once a call.
        if any(ctx.needs_input_grad):
            recording.node = weakref.ref(ctx)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recording: Recording = ctx.recording
        if ctx.call != recording.calls:
            raise RuntimeError(
                "this is a second backward pass through one call of a memory, and a CUDA graph has one: "
                "set_execution(..., graphed=False)"
            )
        for mine, given in zip(recording.pulled, grads, strict=True):
            if mine is not None:
                mine.zero_() if given is None else mine.copy_(given)
        recording.backward.replay()
        recording.node, ctx.call = _gone, None
        found = iter(recording.gradients)
        each = (next(found) if x.requires_grad else None for x in recording.inputs)
        return None, *(None if g is None else g.clone() for g in each)
