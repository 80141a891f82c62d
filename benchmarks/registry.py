"""What a benchmark is: candidates for one operation, the shapes they meet, and what the table shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_memory import compile_options

Function = Callable[[Tensor], Tensor]
Row = dict[str, Any]


class Missing(Exception):
    """A candidate that cannot be built here, such as a peer that is not installed. The message says why."""


class Cost(NamedTuple):
    """What one pass needs by the written model (cost.py)."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Shape:
    """One problem size: x is ``[batch, time, heads * dim]``; ``context`` tokens have been read before it. Everything
    is made on the CPU, the same numbers everywhere, and moved to ``device``."""

    batch: int
    heads: int
    dim: int
    time: int
    context: int = 0
    device: str = "cpu"

    @property
    def width(self) -> int:
        """heads * dim."""
        return self.heads * self.dim

    @property
    def tokens(self) -> int:
        """Tokens of one call."""
        return self.batch * self.time

    def __str__(self) -> str:
        after = f" after {self.context:,}" if self.context else ""
        return f"B={self.batch} T={self.time:,}{after}, {self.heads} x {self.dim}"


def up_to(tokens: int) -> Callable[[Shape], bool]:
    """Shapes with at most so many tokens in ``context`` and ``time``."""
    return lambda shape: shape.context + shape.time <= tokens


@dataclass(frozen=True)
class Operation:
    """A candidate at a shape: ``function(x)``, its gradients taken with respect to ``leaves``.

    Attributes:
        facts: what is known without timing, such as the bytes of a state.
        whole: the results of ``function`` and what else the call leaves, such as a state, all of which is verified;
            None: it leaves nothing else.
        update: what is done with the gradients, None where there is none, such as a step of an optimiser; timed too.
    """

    function: Function
    x: Tensor
    parameters: tuple[Tensor, ...] = ()
    facts: dict[str, float] = field(default_factory=dict)
    whole: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    update: Callable[[tuple[Tensor | None, ...]], object] | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """x, unless it is tokens, and ``parameters``."""
        return (self.x, *self.parameters) if self.x.requires_grad else self.parameters


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The ``Wrap`` of eager mode."""
    return function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` for the one shape at hand.

    Candidates share the code of ``forward``, and each is one more compilation of it: the limit, past which PyTorch goes
    on eagerly without a word, is raised.
    """
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(function, dynamic=False, options=compile_options())


@dataclass(frozen=True)
class Candidate:
    """One way to do what a benchmark measures.

    Attributes:
        name: unique in its benchmark.
        build: the operation at a shape, in a dtype, with its callable passed through a ``Wrap``; may raise ``Missing``.
        oracle: for candidates of ours: the same numbers by the definition, in a dtype. None: of others, which are
            checked for causality, shape and finiteness only.
        cost: the written model, forward; None: not modelled.
        backward_cost: of the backward pass alone; None: twice the forward's.
        reduce: the shape at which it is verified.
        baseline: the candidate that the others of its ``group`` are compared with.
        compile: built through ``torch.compile``.
        kernel: made of kernels for float32 alone, and verified to a tolerance of their own.
        backward: forward and backward, or forward only in inference mode.
        once: timed once, without a call to warm up.
        takes: at which shapes it is measured.
    """

    name: str
    build: Callable[[Shape, torch.dtype, Wrap], Operation]
    oracle: Callable[[Shape, torch.dtype], Operation] | None = None
    cost: Callable[[Shape], Cost] | None = None
    backward_cost: Callable[[Shape], Cost] | None = None
    reduce: Callable[[Shape], Shape] = lambda shape: shape
    baseline: bool = False
    group: str = ""
    compile: bool = False
    kernel: bool = False
    backward: bool = True
    once: bool = False
    takes: Callable[[Shape], bool] = lambda shape: True

    def operation(self, shape: Shape, dtype: torch.dtype = torch.float32) -> Operation:
        """The operation at a shape; float32 is what is timed."""
        return self.build(shape, dtype, compiled if self.compile else as_it_is)


@dataclass(frozen=True)
class Benchmark:
    """A table of candidates and shapes.

    Attributes:
        name: what the command calls it.
        shows: one sentence.
        shapes, quick: what is measured on ``device``, and with ``--quick`` on the CPU.
        candidates: see ``Candidate``; one baseline at most in each group.
        columns: of its table; see ``results.COLUMNS``.
        remarks: sentences below the table, computed from its rows.
        profiled: whether the rows also say on what kinds of operation the time goes.
        device: "cpu" or "cuda".

    Raises:
        ValueError: two candidates of one name, or two baselines in one group.
    """

    name: str
    shows: str
    shapes: tuple[Shape, ...]
    quick: tuple[Shape, ...]
    candidates: tuple[Candidate, ...]
    columns: tuple[str, ...]
    remarks: Callable[[list[Row]], list[str]] = lambda rows: []
    profiled: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        names = [c.name for c in self.candidates]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"benchmark {self.name} has two candidates called {repeated.pop()!r}; rename one")
        groups = [c.group for c in self.candidates if c.baseline]
        if len(groups) > len(set(groups)):
            raise ValueError(f"benchmark {self.name} has two baselines in one group; keep one")

    def at(self, quick: bool) -> tuple[Shape, ...]:
        """The shapes, each on its device."""
        return self.quick if quick else tuple(replace(shape, device=self.device) for shape in self.shapes)

    def candidate(self, name: str) -> Candidate:
        """By its name.

        Raises:
            ValueError: there is none.
        """
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        known = ", ".join(c.name for c in self.candidates)
        raise ValueError(f"benchmark {self.name} has no candidate {name!r}; it has {known}")
