"""Self-modifying Titans: the memory of Hope (Nested Learning, arXiv 2512.24695, Sec. 8.1).

Where ``NeuralMemory`` has projections and gates, this layer has memories, which learn while the model reads as the
memory itself does. A head has five: M_memory answers the query, the other four make what all five learn from,

    k_t = M_k(x_t)    v_t = M_v(x_t)    eta_t = M_eta(x_t)    alpha_t = M_alpha(x_t)    q_t = W_q x_t
    M_t = M_{t-1} (alpha_t I - eta_t k_t k_t^T) - eta_t grad |M(k_t) - v^_t|^2,  v^_t = M(v_t)      for each M  (Eq. 88)
    y_t = M_memory,t-1(q_t)

with v^_t the target that each M makes for itself. By chunks (Eq. 90), k, v, eta, alpha, every v^ and every gradient are
made by the memories as they carried_prediction before the chunk, so that the five are one call of the chunkwise form
with five times as many heads. Errors see what the chunk has written to the last matrices, memories decay to M_0, and
all but M_memory write slowly at first: these are ours (rules/step.py, retention.py, hope.py).

The gates of self-modifying Titans, read from what two of their memories answer (Nested Learning, Eq. 88).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..memory import (
    Gates,
    MemoryState,
    Params,
    Rule,
    initial_state,
    l2_normalise,
)
from ..ops.chunk import read_chunk
from ..ops.chunk_context import Chunk, MatrixState
from ..ops.chunk_layout import ChunkLayout, starts_chunk
from ..ops.compiling import compiled_for_rule, with_own_strides
from ..ops.dispatch import has_chunks
from ..ops.fused_recurrent import read_out
from ..ops.precision import cast, check_inputs, kept_dtype, narrowed
from ..rules.autograd import is_transformed, no_autocast
from ..rules.validation import check_heads, check_positive
from .gate_projection import SPREAD, gain_of, start_gate
from .neural_memory import LayerState
from .omega_memory import INCREMENTAL_TOKENS, OmegaMemory
from .short_conv import ShortConvolution, check_lag
from .stateful import Stateful
from .varlen import read_documents

START_M_0 = 0.3
"""The standard deviation, times sqrt(columns), with which the last matrix of each M_0 begins; in other layers it is 1.
Queries ask for keys, which M_k makes: what it adds to x at random tells them apart."""


class _WriteInputs(NamedTuple):
    """What the memories make of tokens: k and each memory's own target v^, ``[batch, 5 heads, time, dim]`` with dim the
    width of a head, and the gates ``[batch, 5 heads, time]``."""

    k: Tensor
    target: Tensor
    eta: Tensor
    alpha: Tensor


class SelfModifyingMemory(Stateful):
    """A layer whose projections and gates also learn while it reads: ``y, state = memory(x)``, as ``NeuralMemory``.

    x goes through a depthwise convolution, with taps of its own for M_k, and the memories of a head see its channels.
    What they are asked always has unit length: q and k as in Sec. 8.3 and, ours, x and v too. A memory is trained at
    unit keys alone, and a target M(v) at a long v would be longer than all that M has learned: it would grow by itself.
    RMSNorm a head, output gate and output projection follow as in ``NeuralMemory``. Memories are computed in at least
    float32, whatever x's dtype.

    >>> memory = SelfModifyingMemory(dim=64, heads=4)
    >>> x = torch.randn(2, 100, 64)
    >>> y, state = memory(x)
    >>> y_next, state = memory(x[:, :1], state)  # goes on, from any point

    Args:
        dim: width of x, a multiple of ``heads``.
        heads: heads of width dim / heads, each with five memories.
        rule: of all five; "hope", or that with parts changed, such as plain gradient descent for the delta step.
        chunk_size: b, tokens between refreshes of the frozen memories, the same for all five; None: the rule's.
        conv_size: taps of the convolutions.
        key_lag: by how many tokens keys are behind values in a fresh layer, as in ``NeuralMemory``.
        eps: of the RMSNorm on what the memories answer.

    Attributes:
        writes: set to False, and nothing is written to the memories, as in ``NeuralMemory``.

    Raises:
        ValueError: a width that is no multiple of ``heads``, a size below 1, a ``key_lag`` that the convolution does
            not reach, or a rule that is unknown or needs more than k, v, eta and alpha of the current token.

    As printed, with ``Decay()``, M_0 decays away and with it what makes k differ from v, but for a lag; then nothing is
    left to learn. The rule therefore decays to M_0: see docs/hope.md.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        rule: str | Rule = "hope",
        chunk_size: int | None = None,
        conv_size: int = 4,
        key_lag: int = 0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        check_lag(key_lag, conv_size)
        check_positive("eps", eps)
        self.dim, self.heads, self.key_lag = dim, heads, key_lag
        self.memory = OmegaMemory(dim // heads, len(MEMORIES) * heads, rule, None, chunk_size, gates=False)
        check_rule(self.rule)
        self.gates = GateReadout(dim // heads, heads)
        self.q = nn.Linear(dim, dim, bias=False)
        self.convolution = ShortConvolution(dim, conv_size)
        self.key_convolution = ShortConvolution(dim, conv_size)
        self.norm = nn.RMSNorm(dim // heads, eps=eps)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)
        self.writes = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let queries begin as keys do, and the output as values do, so that a fresh layer recalls what it reads.

        The memories answer x + ... and begin near the identity: the last matrix of each M_0 is random, as small as
        ``START_M_0`` says. W_q and W_o begin as multiples of the identity, as long as they were. The taps for keys are
        those for all else, ``key_lag`` tokens later, and the gate at the output begins open, as in
        ``NeuralMemory.reset_parameters``. Ours.
        """
        with torch.no_grad():
            last = self.memory.initial[-1]
            nn.init.normal_(last, std=START_M_0 * last.shape[-1] ** -0.5)
            for w in (self.q.weight, self.out.weight):
                w.copy_(torch.eye(len(w)).to(w) * (w.norm() / len(w) ** 0.5))
            self.key_convolution.weight.copy_(self.convolution.weight.roll(-self.key_lag, 1))
            self.gate.bias.fill_(start_gate(self.rule))

    @property
    def rule(self) -> Rule:
        """The rule of all five memories, chunk included."""
        return self.memory.rule

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, LayerState]:
        """Read x, learning from it.

        Args:
            x: ``[batch, time, dim]``.
            state: where an earlier call stopped, its memories ``[batch, 5 heads, rows, columns]`` in the order of
                ``MEMORIES``; None: fresh memories.
            mask: ``[batch, time]``, nonzero at real tokens, in any pattern. Others are skipped as if absent; their
                outputs are zero. None: all real.
            document_starts: ``[batch, time]``, nonzero at the first token of every document, from which on the layer
                reads as if nothing had been before. A row whose first token is not marked goes on from ``state``.
                None: nothing begins in this call.

        Returns:
            y ``[batch, time, dim]`` and the state.

        Raises:
            ValueError: x, state or mask of a shape that does not fit.
        """
        self.check_x(x, self.q)
        self.check_state(state, LayerState)
        if document_starts is not None:
            return read_documents(self, x, state, mask, document_starts)
        return self.read_real(x, state, mask)

    def write_inputs(self, x: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Gates]:
        """What the memories would be taught by x, all of one chunk; as in ``NeuralMemory``, of 5 times the heads."""
        _, u, _ = self._look(x, state.past, None)
        found = _write_inputs(self.rule, self.memory.params, self.gates.read_with, u, state.memory.frozen)
        return found.k, found.target, Gates(found.eta, found.alpha)

    def _read(self, x: Tensor, state: LayerState | None, length: Tensor | None) -> tuple[Tensor, LayerState]:
        q, u, past = self._look(x, state.past if state else None, length)
        with no_autocast(x.device):
            asked = for_all(q)
            memory = initial_state(self.rule, self.memory.params.initial, asked) if state is None else state.memory
            memory = memory.map(cast(kept_dtype(x)))
            none = Gates(torch.zeros_like(asked[..., 0]))
            check_inputs(self.rule, self.memory.params, asked, asked, asked, none, memory)
            if not self.writes:
                y = _answer(self.memory.retrieve(asked, memory), self.heads)
            elif state is not None and x.shape[1] <= INCREMENTAL_TOKENS:
                y, memory = self._learn_by_token(q, u, memory, length)
            else:
                y, memory = self._learn(q, u, memory, length, state is None or starts_chunk(self.rule, memory))
        y = self.norm(narrowed(y, self.norm.weight.dtype)).transpose(1, 2).flatten(2)
        gate = F.silu(self.gate(x))
        return self.out((y * gate).to(gate.dtype)), LayerState(memory, past)

    def _look(self, x: Tensor, past: Tensor | None, length: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[batch, heads, time, dim / heads]``; u, which M_v, M_eta and M_alpha are asked, and behind it, as further
        heads, what M_k is asked; both in at least float32 and of unit length. And the last inputs of both
        convolutions."""
        mixed, after = self.convolution(x, past, length)
        both = torch.cat([mixed, self.key_convolution(x, past, length)[0]], -1)
        q, u = (z.to(kept_dtype(x)).unflatten(-1, (-1, x.shape[-1] // self.heads)) for z in (self.q(mixed), both))
        return l2_normalise(q.transpose(1, 2)), l2_normalise(u.transpose(1, 2)), after

    def _learn(
        self, q: Tensor, u: Tensor, state: MemoryState, length: Tensor | None, aligned: bool
    ) -> tuple[Tensor, MemoryState]:
        """Read with q and learn from u, as ``_look`` gives them, chunk after chunk. ``aligned``: whether all sequences
        of the batch begin at the start of a chunk."""
        rule, chunk, time = self.rule, self.rule.window.chunk, u.shape[-2]
        if time == 0:
            return q, state
        params = self.memory.params.map(cast(u.dtype))
        phase = None if aligned else state.seen % chunk
        layout = ChunkLayout(chunk, time, phase, length)
        inside = layout.inside(u.device).unflatten(-1, (layout.count, chunk))[:, None]
        read = partial(_read_chunks, rule, self.memory.compiled, params)
        if self.memory.recompute is not None and torch.is_grad_enabled() and not is_transformed(u):
            read = partial(checkpoint, read, use_reentrant=False, preserve_rng_state=False)
        group, gate = self.memory.recompute or layout.count, self.gates.read_with
        memory, outputs = tuple(MatrixState.of(m, aligned) for m in state.matrices), []
        parts = zip(*(z.split(group, 2) for z in (layout.chunks(q), layout.chunks(u), inside)), strict=True)
        for i, (q_i, u_i, real) in enumerate(parts):
            y, memory = read(gate, q_i, u_i, real, layout.end - i * group * chunk, memory)
            outputs.append(y)
        state = replace(state, matrices=tuple(held.matrix for held in memory))
        y = layout.from_chunks(torch.cat(outputs, -2))
        return y, replace(state, seen=state.seen + (time if length is None else length))

    def _learn_by_token(
        self, q: Tensor, u: Tensor, state: MemoryState, length: Tensor | None
    ) -> tuple[Tensor, MemoryState]:
        """As ``_learn``, token by token, with constant work for each: for a few tokens."""
        outputs, gate = [q[..., :0, :]], self.gates.read_with
        for t in range(u.shape[-2]):
            now = slice(t, t + 1)
            k, target, eta, alpha = _write_inputs(self.rule, self.memory.params, gate, u[..., now, :], state.frozen)
            real = None if length is None else (length > t).long()
            y, state = self.memory(for_all(q[..., now, :]), k, target, Gates(eta, alpha, length=real), state)
            outputs.append(_answer(y, self.heads))
        return torch.cat(outputs, -2), state


Memory = tuple[MatrixState, ...]  # the matrices of all five memories of each head, between two chunks


def _read_chunks(
    rule: Rule,
    compiled: bool,
    params: Params,
    gate: Readout,
    q: Tensor,
    u: Tensor,
    inside: Tensor,
    end: Tensor | int,
    memory: Memory,
) -> tuple[Tensor, Memory]:
    """Read with q ``[batch, heads, chunks, b, dim]`` and learn from u, of twice the heads;
    y ``[batch, heads, chunks * b, dim]``.

    Args:
        inside: which slots hold tokens of this call, bool ``[batch or 1, 1, chunks, b]``.
        end: the slot behind each sequence's last token, ``[batch]`` or of all, from the first chunk's start.
    """
    chunk, outputs = rule.window.chunk, []
    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    for j, (q_j, u_j, real) in enumerate(zip(*(z.unbind(2) for z in (q, u, inside)), strict=True)):
        filled = (j + 1) * chunk <= end
        own = compiled and filled is True and not torch.compiler.is_compiling()
        form = compiled_for_rule(_read_chunk, rule, q.device.type) if own else _read_chunk
        if own:
            q_j, u_j, real = with_own_strides(q_j), with_own_strides(u_j), with_own_strides(real)
        y, memory = form(rule, params, gate, q_j, u_j, real, filled, memory)
        outputs.append(y)
    return torch.cat(outputs, -2), memory


def _read_chunk(
    rule: Rule,
    params: Params,
    gate: Readout,
    q: Tensor,
    u: Tensor,
    real: Tensor,
    filled: Tensor | bool,
    memory: Memory,
) -> tuple[Tensor, Memory]:
    """One chunk: q ``[batch, heads, b, dim]``, u of twice the heads, ``real`` as ``inside`` above, the rest as in
    ``read_chunk``."""
    write_inputs = _write_inputs(rule, params, gate, u, tuple(held.start for held in memory))
    tokens = Chunk(
        kq=torch.cat([write_inputs.k, for_all(q)], -2),
        v=write_inputs.target,
        window=real.to(u.dtype),
        alpha=torch.where(real, write_inputs.alpha, 1.0),
        theta=torch.zeros_like(write_inputs.eta),
        eta=torch.where(real, write_inputs.eta, 0.0),
        inside=real,
    )
    y, memory = read_chunk(rule, params, memory, tokens, filled)
    return _answer(y, q.shape[1]), memory


def _write_inputs(rule: Rule, params: Params, gate: Readout, u: Tensor, frozen: tuple[Tensor, ...]) -> _WriteInputs:
    """What the ``frozen`` memories, as they carried_prediction before the current chunk, make of its tokens u: their
    lesson."""
    u, for_k = u.chunk(2, 1)
    asked = read_out(rule, params, torch.cat([u, for_k, u, u, u], 1), frozen).unflatten(1, (len(MEMORIES), -1))
    _, k, v, eta, alpha = asked.unbind(1)
    target = read_out(rule, params, for_all(l2_normalise(v)), frozen)
    return _WriteInputs(for_all(l2_normalise(k)), target, *gate.gates(eta, alpha))


def _answer(y: Tensor, heads: int) -> Tensor:
    """What the first memory of each head answers, M_memory, from ``[batch, 5 heads, time, dim]`` of all."""
    return y[:, :heads]


def check_rule(rule: Rule) -> None:
    """Raise ValueError unless k, v, eta and alpha of the current token are all that the rule reads."""
    wrong = {
        "a window of more than one token": rule.window.size > 1,
        type(rule.optimiser).__name__: rule.optimiser.has_momentum or not has_chunks(rule),
        type(rule.retention).__name__: rule.retention.has_mirror_map or not rule.retention.gated,
        f"the delta of {type(rule.bias).__name__}": rule.bias.has_delta,
        "Exponential features": rule.features.infinite,
    }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ValueError(
            f"the rule has {', '.join(found)}; a self-modifying memory makes k, v, eta and alpha of one token and "
            "no more: take rule='hope', or a variation of it with DeltaGradientDescent or GradientDescent, and Decay"
        )


MEMORIES = ("memory", "k", "v", "eta", "alpha")
"""What the five memories of a head are for, in the order in which they are stacked: all heads of one, then the next."""

START_ETAS = (0.5, 0.02)
"""Where eta starts: that of M_memory, and that of the other memories."""

HALF_LIVES = (32.0, 8192.0)
"""Tokens: those with which M_memory starts, spread over the heads; all others start with the first."""


class Readout(NamedTuple):
    """The parameters of a ``GateReadout``, as arguments of what is compiled or computed again in a backward pass."""

    weight: Tensor
    bias: Tensor

    def gates(self, eta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """What M_eta and M_alpha answer, ``[batch, heads, time, dim]`` -> eta and alpha of all memories,
        ``[batch, 5 heads, time]``, in the dtype of the answers."""
        dim = eta.shape[-1]
        weight, bias = self.weight.to(eta.dtype) * (dim**0.5 * gain_of(dim)), self.bias.to(eta.dtype)
        answers = torch.stack([for_all(eta), for_all(alpha)])
        logits = (answers * weight.flatten(1, 2)[:, None, :, None]).sum(-1) + bias.flatten(1)[:, None, :, None]
        gates = logits.sigmoid()
        return gates[0], gates[1]


class GateReadout(nn.Module):
    """eta and alpha of each token, head and memory, from what M_eta and M_alpha answer.

    A gate is the sigmoid of ``gain <w, M(x)> sqrt(dim) + b``, with a w and b a gate, memory and head. The root makes
    what is read about as long as the x of ``GateProjection``; the gain, 64 / dim, but at least 1 and at most 4, lets
    gates of narrow heads learn as fast as those of layers 64 wide (layers/gate_projection.py; docs/hope.md).

    Eq. 88 has one eta and one alpha for the five memories of a head. If the memory that makes keys then learns as fast
    as M_memory, it soon answers a token with what came after that token, and not with the key under which M_memory has
    stored it, while queries stay as they are: nothing can be recalled (docs/hope.md). So M_memory starts with an eta of
    1/2 and half-lives spread over ``HALF_LIVES``, the others with an eta of 1/50 and ``HALF_LIVES[0]`` tokens, after
    which they are back at M_0.

    Args:
        dim: width of a head.
        heads: number of heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, len(MEMORIES), heads, dim))
        self.bias = nn.Parameter(torch.empty(2, len(MEMORIES), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random weights, and the starts described above."""
        dim = self.weight.shape[-1]
        nn.init.normal_(self.weight, std=SPREAD * dim**-0.5 / gain_of(dim))
        first, last = map(math.log2, HALF_LIVES)
        half_lives = torch.full(self.bias.shape[1:], HALF_LIVES[0], dtype=torch.float64)  # bfloat16 would make alpha 1
        half_lives[0] = torch.logspace(first, last, self.bias.shape[2], base=2.0, dtype=torch.float64)
        eta = torch.full(self.bias.shape[1:], START_ETAS[1], dtype=torch.float64)
        eta[0] = START_ETAS[0]
        with torch.no_grad():
            self.bias.copy_(torch.stack([eta, 0.5 ** (1.0 / half_lives)]).logit())

    @property
    def read_with(self) -> Readout:
        """The parameters."""
        return Readout(self.weight, self.bias)


def for_all(x: Tensor) -> Tensor:
    """``[batch, heads, ...]`` -> ``[batch, 5 heads, ...]``: the same for the five memories of a head."""
    return x.repeat(1, len(MEMORIES), *(1,) * (x.dim() - 2))
