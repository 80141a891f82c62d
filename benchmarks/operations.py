"""Candidates: our layer and our bare memory with their definitions, softmax attention, and a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlas_memory import NeuralMemory, OmegaMemory, Rule, set_execution
from atlas_memory.layers.tnt import Hierarchy
from atlas_memory.memory import (
    Gates,
    MemoryState,
    Params,
    chunkwise,
    l2_normalise,
    recurrent,
    resolve_rule,
)
from benchmarks import cost
from benchmarks.registry import Candidate, Missing, Operation, Shape, Wrap, as_it_is

SEED = 0
FORM = Callable[..., tuple[Tensor, MemoryState]]


def inputs(shape: Shape, dtype: torch.dtype, time: int | None = None, seed: int = SEED) -> Tensor:
    """Random x ``[batch, time, width]``, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.batch, shape.time if time is None else time, shape.width
    return torch.randn(*size, generator=generator).to(shape.device, dtype).requires_grad_()


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype, device: str = "cpu") -> Any:
    """A module whose parameters do not depend on what was made before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return make().to(device, dtype)


# Our layer


def memory_layer(
    name: str,
    rule: Rule | str,
    window: int | None = None,
    chunk: int | None = None,
    verified: int | None = None,
    hierarchy: Hierarchy | None = None,
    recompute: int | None = None,
    **options: Any,
) -> Candidate:
    """``NeuralMemory`` over x, against itself with its memory read and written by ``recurrent``.

    Args:
        window, chunk, hierarchy: as the layer has them.
        verified: tokens over which it is verified; None: two chunks.
        recompute: chunks a group whose intermediate results are computed anew in the backward pass.
        options: of ``Candidate``.
    """
    rule = resolve_rule(rule, window, chunk)
    span = (hierarchy.shard if hierarchy else 0) + 2 * rule.window.chunk if verified is None else verified

    def make(shape: Shape, dtype: torch.dtype) -> NeuralMemory:
        return seeded(partial(NeuralMemory, shape.width, shape.heads, rule, hierarchy=hierarchy), dtype, shape.device)

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        layer = make(shape, dtype)
        set_execution(layer, recompute=recompute, compiled=wrap is not as_it_is)  # what is compiled is the chunk
        return Operation(lambda x: layer(x)[0], inputs(shape, dtype), tuple(layer.parameters()))

    def oracle(shape: Shape, dtype: torch.dtype) -> Operation:
        layer = by_definition(make(shape, dtype))
        return Operation(lambda x: layer(x)[0], inputs(shape, dtype), tuple(layer.parameters()))

    return Candidate(
        name,
        build,
        oracle,
        cost=lambda shape: cost.layer(rule, shape, hierarchy),
        reduce=partial(reduced, tokens=span),
        **options,
    )


M = TypeVar("M", bound=nn.Module)


def by_definition(layer: M) -> M:
    """The layer or model with every memory in it read and written token by token."""
    for module in layer.modules():
        if isinstance(module, OmegaMemory):
            module.forward = partial(_recurrent, module)  # type: ignore[method-assign]
    return layer


def _recurrent(
    memory: OmegaMemory, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None = None, **_: bool
) -> tuple[Tensor, MemoryState]:
    return recurrent(memory.rule, memory.params, q, k, v, gates, state)


def reduced(shape: Shape, tokens: int) -> Shape:
    """One row, at most two heads and ``tokens`` tokens; one head where the definition's graph would fill the memory."""
    time = min(shape.time, tokens)
    return replace(shape, batch=1, heads=min(shape.heads, 1 if time > 128 else 2), time=time)


# Our bare memory


def bare_memory(
    name: str,
    rule: Rule,
    form: FORM = chunkwise,
    verified: int | None = None,
    pieces: int | None = None,
    **options: Any,
) -> Candidate:
    """A form of the memory over q, k, v and gates, against ``recurrent``.

    Args:
        form: with the signature of ``chunkwise``.
        verified: tokens over which it is verified; None: two chunks.
        pieces: forward and backward by so many tokens at a time, each from the state of the last, for a form whose
            graph would not fit in memory; the candidate is then measured as if it had no backward pass.
        options: of ``Candidate``.
    """

    def problem(shape: Shape, dtype: torch.dtype, form: FORM) -> Operation:
        draw = torch.Generator().manual_seed(SEED)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw, dtype=torch.float64)

        per = shape.batch, shape.heads, shape.time
        x = torch.stack([l2_normalise(randn(*per, shape.dim)) for _ in range(2)] + [randn(*per, shape.dim)])
        gates = [randn(*per).sigmoid(), (2 + randn(*per)).sigmoid(), randn(*per).sigmoid()]
        gates += [randn(*per, rule.window.size).sigmoid()]
        initial = [randn(shape.heads, *size) * size[1] ** -0.5 for size in rule.shapes(shape.dim)]
        sqrt_a = rule.features.initial_sqrt_a()
        tensors = [*gates, *initial, *([] if sqrt_a is None else [sqrt_a])]
        leaves = [t.to(shape.device, dtype).requires_grad_() for t in tensors]
        end = len(gates) + len(initial)
        params = Params(tuple(leaves[len(gates) : end]), None if sqrt_a is None else leaves[-1])
        given = Gates(*leaves[: len(gates)])

        def whole(x: Tensor) -> tuple[Tensor, ...]:
            y, end = form(rule, params, *x, given)
            return y, *end.weights, *end.frozen

        def piecewise(x: Tensor) -> Tensor:
            outputs: list[Tensor] = []
            state: MemoryState | None = None
            with torch.inference_mode(False), torch.enable_grad():
                for parts in zip(
                    x.detach().clone().split(pieces or 1, 3),
                    *(t.split(pieces or 1, 2) for t in leaves[:4]),
                    strict=True,
                ):
                    q, k, v = parts[0].requires_grad_()
                    y, state = form(rule, params, q, k, v, Gates(*parts[1:]), state)
                    torch.autograd.grad(y.sum(), (parts[0], *leaves), allow_unused=True)
                    outputs, state = [*outputs, y.detach()], state.map(torch.detach)
            return torch.cat(outputs, -2)

        x = x.to(shape.device, dtype).requires_grad_()
        if pieces:
            return Operation(piecewise, x, tuple(leaves))
        return Operation(lambda x: whole(x)[0], x, tuple(leaves), whole=whole)

    return Candidate(
        name,
        lambda shape, dtype, wrap: problem(shape, dtype, form if wrap is as_it_is else partial(form, compiled=True)),
        lambda shape, dtype: problem(shape, dtype, recurrent),
        cost=None if pieces else lambda shape: cost.memory(rule, shape),
        reduce=partial(reduced, tokens=2 * rule.window.chunk if verified is None else verified),
        backward=not pieces,
        **options,
    )


def in_steps(name: str, candidate: Candidate, tokens: int, **options: Any) -> Candidate:
    """A candidate's forward and backward over so many tokens at a time, each a sequence of its own: what a step over
    all of them is set against. Measured as if it had no backward pass."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        operation = candidate.build(replace(shape, time=min(tokens, shape.time)), dtype, wrap)

        def function(x: Tensor) -> Tensor:
            outputs = []
            with torch.inference_mode(False), torch.enable_grad():
                for part in x.detach().clone().split(tokens, 1):
                    y = operation.function(part.requires_grad_())
                    torch.autograd.grad(y, (part, *operation.parameters), torch.ones_like(y), allow_unused=True)
                    outputs.append(y.detach())
            return torch.cat(outputs, 1)

        return replace(operation, function=function, x=inputs(shape, dtype))

    return replace(candidate, name=name, build=build, cost=None, backward=False, baseline=False, **options)


# Others


class Attention(nn.Module):
    """What a memory layer stands in for: q, k, v of one linear map, PyTorch's causal attention, a map of outputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same."""
        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def split(self, x: Tensor) -> Tensor:
        """q, k, v in one: ``[3, batch, heads, time, dim]``."""
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def join(self, y: Tensor) -> Tensor:
        """``[batch, heads, time, dim]`` of the heads to outputs."""
        return self.out(y.transpose(1, 2).flatten(2))


def sdpa(name: str = "sdpa", **options: Any) -> Candidate:
    """The ``Attention`` mixer."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        mixer = seeded(partial(Attention, shape.width, shape.heads), dtype, shape.device)
        return Operation(wrap(mixer), inputs(shape, dtype), tuple(mixer.parameters()))

    return Candidate(name, build, cost=cost.attention, reduce=partial(reduced, tokens=128), **options)


def titans_pytorch(name: str, chunk: int, asked: dict[str, Any], **options: Any) -> Candidate:
    """``titans_pytorch.NeuralMemory`` with an MLP of depth 2 in chunks, ``asked`` being the rest of its options."""

    def build(shape: Shape, dtype: torch.dtype, wrap: Wrap) -> Operation:
        try:
            from titans_pytorch import NeuralMemory as Peer
        except ImportError as error:
            raise Missing(f"titans-pytorch: {error}; pip install titans-pytorch") from error
        make = partial(Peer, shape.width, dim_head=shape.dim, heads=shape.heads, chunk_size=chunk, **asked)
        peer = seeded(make, dtype, shape.device)
        run = wrap(peer)
        return Operation(lambda x: run(x)[0], inputs(shape, dtype), tuple(peer.parameters()))

    return Candidate(name, build, reduce=partial(reduced, tokens=2 * chunk), **options)


def in_both(make: Callable[..., Candidate], name: str, *given: Any, **options: Any) -> tuple[Candidate, Candidate]:
    """A candidate eager and through ``torch.compile``; of our layer, what happens in a chunk is compiled."""
    flags = {key: value for key, value in options.items() if key != "baseline"}
    return make(name, *given, **options), make(f"{name}, compiled", *given, compile=True, **flags)
