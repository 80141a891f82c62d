"""Self-modifying Titans: the memory of Hope (Nested Learning, arXiv 2512.24695, Sec. 8.1).

In place of the projections and gates of ``NeuralMemory`` this layer has memories, which also learn while it reads. A
head has five: M_memory answers the query, and from the other four all five learn,

    k_t = M_k(x_t)    v_t = M_v(x_t)    eta_t = M_eta(x_t)    alpha_t = M_alpha(x_t)    q_t = W_q x_t
    M_t = M_{t-1} (alpha_t I - eta_t k_t k_t^T) - eta_t grad |M(k_t) - v^_t|^2,  v^_t = M(v_t)      for each M  (Eq. 88)
    y_t = M_memory,t-1(q_t)

with v^_t the target that each M makes for itself. By chunks (Eq. 90), all of these and every gradient come from the
memories before the chunk, so that the five are one ``chunkwise`` with five times as many heads. Errors see what the
chunk has written to the last matrices, memories decay to M_0, and all but M_memory write slowly at first: ours.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..memory import Gates, MemoryState, Params, Rule, initial_state, l2_normalise
from ..ops.chunk import read_chunk
from ..ops.chunk_context import Chunk, ChunkParams, MatrixState
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
from .varlen import SequenceMixer

MEMORIES = ("memory", "k", "v", "eta", "alpha")
"""The five memories of a head, in the order in which they are stacked: all heads of one, then the next."""

START_M_0 = 0.3
"""The standard deviation, times sqrt(columns), of the last matrix of each M_0. It is small because queries ask for
keys, which M_k makes: what it adds to x at random tells them apart."""

START_ETAS = (0.5, 0.02)
"""Where eta starts: that of M_memory, and that of the other memories."""

HALF_LIVES = (32.0, 8192.0)
"""Tokens: those with which M_memory starts, spread over the heads; all others start with the first."""


class SelfModifyingMemory(SequenceMixer):
    """A layer whose projections and gates also learn while it reads: ``y, state = memory(x)``, as ``NeuralMemory``.

    x goes through a depthwise convolution, with taps of its own for M_k, and the memories of a head see its channels.
    Their inputs have unit length: q and k as in Sec. 8.3 and, ours, x and v too, since a memory is trained at unit keys
    alone. RMSNorm a head, output gate and output projection follow as in ``NeuralMemory``. Memories are computed in at
    least float32. As printed, with ``Decay()``, M_0 decays away, and with it all that makes k differ from v.

    Args:
        dim: width of x, a multiple of ``heads``.
        heads: heads of width dim / heads, each with five memories.
        rule: of all five; "hope", or that with parts changed, such as plain gradient descent for the delta step.
        chunk_size, conv_size, key_lag, eps: as of ``NeuralMemory``, as is the attribute ``writes``.

    Raises:
        ValueError: a bad size, or a rule that is unknown or needs more than k, v, eta and alpha of the current token.
    """

    state_type, input_projection = LayerState, "q"

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
        self.gates = SelfModifyingGates(dim // heads, heads)
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

        W_q and W_o begin as multiples of the identity, the last matrix of each M_0 as small as ``START_M_0`` says. Taps
        for keys and the gate at the output begin as in ``NeuralMemory.reset_parameters``. Ours."""
        with torch.no_grad():
            last = self.memory.initial[-1]
            nn.init.normal_(last, std=START_M_0 * last.shape[-1] ** -0.5)
            for w in (self.q.weight, self.out.weight):
                w.copy_(torch.eye(len(w)).to(w) * (w.norm() / len(w) ** 0.5))
            self.key_convolution.weight.copy_(self.convolution.weight.roll(-self.key_lag, 1))
            self.gate.bias.fill_(start_gate(self.rule))

    @property
    def rule(self) -> Rule:
        return self.memory.rule

    def write_inputs(self, x: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Gates]:
        """Keys, targets and gates of x, all of one chunk, for 5 times the heads; as in ``NeuralMemory``."""
        _, u, _ = self._project(x, state.past, None)
        gates = self.gates.weight, self.gates.bias
        k, target, eta, alpha = _write_inputs(self.rule, self.memory.params, gates, u, state.memory.frozen)
        return k, target, Gates(eta, alpha)

    def _forward(self, x: Tensor, state: LayerState | None, length: Tensor | None) -> tuple[Tensor, LayerState]:
        q, u, past = self._project(x, state.past if state else None, length)
        with no_autocast(x.device):
            queries = repeat_for_memories(q)
            memory = initial_state(self.rule, self.memory.params.initial, queries) if state is None else state.memory
            memory = memory.map(cast(kept_dtype(x)))
            none = Gates(torch.zeros_like(queries[..., 0]))
            check_inputs(self.rule, self.memory.params, queries, queries, queries, none, memory)
            if not self.writes:
                y = self.memory.retrieve(queries, memory)[:, : self.heads]
            elif state is not None and x.shape[1] <= INCREMENTAL_TOKENS:
                y, memory = self._fused_recurrent(q, u, memory, length)
            else:
                y, memory = self._chunkwise(q, u, memory, length, state is None or starts_chunk(self.rule, memory))
        y = self.norm(narrowed(y, self.norm.weight.dtype)).transpose(1, 2).flatten(2)
        gate = F.silu(self.gate(x))
        return self.out((y * gate).to(gate.dtype)), LayerState(memory, past)

    def _project(self, x: Tensor, past: Tensor | None, length: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q ``[batch, heads, time, dim / heads]``; u, the input of M_v, M_eta and M_alpha and, as further heads, that
        of M_k; both of unit length; and the last inputs of the convolutions."""
        mixed, after = self.convolution(x, past, length)
        both = torch.cat([mixed, self.key_convolution(x, past, length)[0]], -1)
        q, u = (z.to(kept_dtype(x)).unflatten(-1, (-1, x.shape[-1] // self.heads)) for z in (self.q(mixed), both))
        return l2_normalise(q.transpose(1, 2)), l2_normalise(u.transpose(1, 2)), after

    def _chunkwise(
        self, q: Tensor, u: Tensor, state: MemoryState, length: Tensor | None, aligned: bool
    ) -> tuple[Tensor, MemoryState]:
        """Read with q and learn from u, chunk after chunk. ``aligned``: all rows begin at the start of a chunk."""
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
        group, gates = self.memory.recompute or layout.count, (self.gates.weight, self.gates.bias)
        matrices, outputs = tuple(MatrixState.of(m, aligned) for m in state.matrices), []
        parts = zip(*(z.split(group, 2) for z in (layout.chunks(q), layout.chunks(u), inside)), strict=True)
        for i, (q_i, u_i, real) in enumerate(parts):
            y, matrices = read(gates, q_i, u_i, real, layout.end - i * group * chunk, matrices)
            outputs.append(y)
        state = replace(state, matrices=tuple(m.matrix(self.memory.heads) for m in matrices))
        y = layout.from_chunks(torch.cat(outputs, -2))
        return y, replace(state, seen=state.seen + (time if length is None else length))

    def _fused_recurrent(
        self, q: Tensor, u: Tensor, state: MemoryState, length: Tensor | None
    ) -> tuple[Tensor, MemoryState]:
        """As ``_chunkwise``, token by token: for a few tokens."""
        outputs, gates = [q[..., :0, :]], (self.gates.weight, self.gates.bias)
        for t in range(u.shape[-2]):
            now = slice(t, t + 1)
            k, target, eta, alpha = _write_inputs(self.rule, self.memory.params, gates, u[..., now, :], state.frozen)
            real = None if length is None else (length > t).long()
            queries = repeat_for_memories(q[..., now, :])
            y, state = self.memory(queries, k, target, Gates(eta, alpha, length=real), state, checked=True)
            outputs.append(y[:, : self.heads])
        return torch.cat(outputs, -2), state


class SelfModifyingGates(nn.Module):
    """eta and alpha of each token, head and memory, from the outputs of M_eta and M_alpha.

    A gate is the sigmoid of ``gain <w, M(x)> sqrt(dim) + b``, with a w and b a gate, memory and head, and the gain
    of gate_projection.py.

    Eq. 88 has one eta and alpha for the five memories of a head. If M_k then learns as fast as M_memory, nothing can be
    recalled: queries stay as they are while keys change. So the others start slower, with ``START_ETAS[1]``, and return
    to M_0 within ``HALF_LIVES[0]`` tokens (notes/hope.md)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, len(MEMORIES), heads, dim))
        self.bias = nn.Parameter(torch.empty(2, len(MEMORIES), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        dim = self.weight.shape[-1]
        nn.init.normal_(self.weight, std=SPREAD * dim**-0.5 / gain_of(dim))
        first, last = map(math.log2, HALF_LIVES)
        half_lives = torch.full(self.bias.shape[1:], HALF_LIVES[0], dtype=torch.float64)  # bfloat16 would make alpha 1
        half_lives[0] = torch.logspace(first, last, self.bias.shape[2], base=2.0, dtype=torch.float64)
        eta = torch.full(self.bias.shape[1:], START_ETAS[1], dtype=torch.float64)
        eta[0] = START_ETAS[0]
        with torch.no_grad():
            self.bias.copy_(torch.stack([eta, 0.5 ** (1.0 / half_lives)]).logit())


GateParameters = tuple[Tensor, Tensor]
"""Weight and bias of ``SelfModifyingGates``, as arguments of what is compiled or recomputed."""


def compute_gates(parameters: GateParameters, eta: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of M_eta and M_alpha, ``[batch, heads, time, dim]`` -> eta and alpha of all memories,
    ``[batch, 5 heads, time]``."""
    dim, (weight, bias) = eta.shape[-1], parameters
    weight, bias = weight.to(eta.dtype) * (dim**0.5 * gain_of(dim)), bias.to(eta.dtype)
    read = torch.stack([repeat_for_memories(eta), repeat_for_memories(alpha)])
    logits = (read * weight.flatten(1, 2)[:, None, :, None]).sum(-1) + bias.flatten(1)[:, None, :, None]
    gates = logits.sigmoid()
    return gates[0], gates[1]


def _write_inputs(
    rule: Rule, params: Params, gates: GateParameters, u: Tensor, frozen: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, targets v^, eta and alpha ``[batch, 5 heads, time, ...]`` that the ``frozen`` memories make of u."""
    u, for_k = u.chunk(2, 1)
    read = read_out(rule, params, torch.cat([u, for_k, u, u, u], 1), frozen).unflatten(1, (len(MEMORIES), -1))
    _, k, v, eta, alpha = read.unbind(1)
    target = read_out(rule, params, repeat_for_memories(l2_normalise(v)), frozen)
    return repeat_for_memories(l2_normalise(k)), target, *compute_gates(gates, eta, alpha)


def _read_chunks(
    rule: Rule,
    compiled: bool,
    params: Params,
    gates: GateParameters,
    q: Tensor,
    u: Tensor,
    inside: Tensor,
    end: Tensor | int,
    matrices: tuple[MatrixState, ...],
) -> tuple[Tensor, tuple[MatrixState, ...]]:
    """y ``[batch, heads, chunks * b, dim]``; slots ``inside`` ``[batch or 1, 1, chunks, b]`` hold tokens, none from
    ``end`` on."""
    chunk, outputs = rule.window.chunk, []
    # Unbinding, where slicing in the loop would make the backward pass quadratic in time.
    for j, (q_j, u_j, real) in enumerate(zip(*(z.unbind(2) for z in (q, u, inside)), strict=True)):
        filled = (j + 1) * chunk <= end
        own = compiled and filled is True and not torch.compiler.is_compiling()
        form = compiled_for_rule(_read_chunk, rule, q.device.type) if own else _read_chunk
        if own:
            q_j, u_j, real = with_own_strides(q_j), with_own_strides(u_j), with_own_strides(real)
        y, matrices = form(rule, params, gates, q_j, u_j, real, filled, matrices)
        outputs.append(y)
    return torch.cat(outputs, -2), matrices


def _read_chunk(
    rule: Rule,
    params: Params,
    gates: GateParameters,
    q: Tensor,
    u: Tensor,
    real: Tensor,
    filled: Tensor | bool,
    matrices: tuple[MatrixState, ...],
) -> tuple[Tensor, tuple[MatrixState, ...]]:
    """One chunk of ``_read_chunks``; ``filled`` as in ``read_chunk``."""
    batch, heads = len(q), len(MEMORIES) * q.shape[1]
    frozen = tuple(m.start.unflatten(0, (batch, heads)) for m in matrices)
    k, target, eta, alpha = _write_inputs(rule, params, gates, u, frozen)
    token_gates = (torch.where(real, alpha, 1.0), torch.zeros_like(eta), torch.where(real, eta, 0.0))
    parts = (k, repeat_for_memories(q), target, real.to(u.dtype).expand_as(eta), *token_gates, real.expand_as(eta))
    chunk = Chunk(*(x.flatten(0, 1) for x in parts))
    filled = filled if isinstance(filled, bool) else filled.repeat_interleave(heads)
    y, matrices = read_chunk(rule, ChunkParams.of(rule, params, batch), matrices, chunk, filled)
    return y.unflatten(0, (batch, heads))[:, : q.shape[1]], matrices


def repeat_for_memories(x: Tensor) -> Tensor:
    """``[batch, heads, ...]`` -> ``[batch, 5 heads, ...]``: the same for the five memories of a head."""
    return x.repeat(1, len(MEMORIES), *(1,) * (x.dim() - 2))


def check_rule(rule: Rule) -> None:
    """Raise ValueError unless k, v, eta and alpha of the current token are all that the rule reads."""
    wrong = {
        "a window of more than one token": rule.window.size > 1,
        type(rule.optimiser).__name__: rule.optimiser.has_momentum or not has_chunks(rule),
        type(rule.retention).__name__: rule.retention.has_mirror_map or not rule.retention.gated,
        f"the delta of {type(rule.bias).__name__}": rule.bias.has_delta,
        "Exponential features": rule.features.infinite,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(
            f"this memory makes only k, v, eta and alpha of one token, and the rule has {', '.join(found)}: "
            "take rule='hope', perhaps with GradientDescent"
        )
