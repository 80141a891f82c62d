"""The memory as a layer for any sequence model (ATLAS section 5.1; Titans section 4.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..memory import Gates, Params, Rule, l2_normalise, resolve_rule
from ..ops.chunkwise import GroupState, begin, end, read_on
from ..ops.precision import kept_dtype, narrowed
from ..rules import DEFAULT_RULE
from ..rules.initialisation import orthonormal_columns
from ..rules.state import State
from ..rules.validation import check_heads, check_positive
from .gate_projection import GateProjection, start_gate
from .omega_memory import OmegaMemory
from .short_conv import ShortConvolution, check_lag
from .tnt import HierarchicalGates, HierarchicalMemory, Hierarchy
from .varlen import SequenceMixer

START_VALUE = 3.0**-0.5
"""The root mean square of a fresh layer's values before SiLU, for x of RMS 1, where the memory answers k + ..."""

LARGEST = 1e6
"""Values are cut to +-``LARGEST``: of larger ones, outer gradients of a deep memory can overflow float32."""


@dataclass(frozen=True, repr=False, eq=False)
class LayerState(State):
    """What a memory layer carries from call to call.

    Attributes:
        memory: the memory's ``MemoryState``; with a hierarchy its ``HierarchicalState``.
        past: the convolution's last inputs, ``[batch, taps - 1, 3 dim]``; of ``SelfModifyingMemory`` ``dim`` wide.
    """

    memory: Any
    past: Tensor


class NeuralMemory(SequenceMixer):
    """A layer that learns while it reads: ``y, state = memory(x)``, in place of an attention layer.

    x is projected to q, k and v, each of which goes through a depthwise convolution and SiLU. In each head q and k get
    unit length, and the memory of ``rule`` reads q, k and v with gates computed from x, in at least float32. What it
    answers goes through RMSNorm a head, an output gate and an output projection. Residual and norm on x belong to the
    block around the layer.

    If your framework re-initialises linear layers, call ``reset_parameters()`` afterwards; otherwise recall takes much
    longer to learn.

    Examples:
        >>> memory = NeuralMemory(dim=64, heads=4, rule="omeganet", window=4, chunk_size=16)
        >>> x = torch.randn(2, 100, 64)
        >>> y, state = memory(x)
        >>> y_next, state = memory(x[:, :1], state)  # continues, from any point

    Args:
        dim: width of x, a multiple of ``heads``.
        heads: memory heads of width dim / heads.
        rule: a name in ``RULES`` or a ``Rule``.
        window: c, the tokens in the inner loss; None: the rule's.
        chunk_size: b, tokens between refreshes of the frozen memory; None: the rule's. With ``lact``, which takes its
            step at the end of a chunk, nothing has been written before that.
        conv_size: taps of the convolution.
        key_lag: by how many tokens keys are behind values in a fresh layer. 0: a value is written under its own token's
            key; 1: under that of the token before, so that a query retrieves what came next.
        eps: of the RMSNorm on what the memory answers.
        gate_rank: make eta and alpha channel-wise, through a map of this rank (Miras section 5.4: 32 or 64).
        hierarchy: one global and N local memories of the rule instead of one (TNT): a ``Hierarchy`` or a mapping of its
            fields. The chunks are then the hierarchy's: leave ``chunk_size`` out.

    Attributes:
        writes: set to False, and nothing is written: the memory stays as the state has it, or M_0.

    Raises:
        ValueError: a bad size, an unknown rule, a ``key_lag`` that the convolution does not reach, or a ``hierarchy``
            that is wrong or given along with a ``chunk_size``.
    """

    state_type, input_projection = LayerState, "qkv"

    def __init__(
        self,
        dim: int,
        heads: int,
        rule: str | Rule = DEFAULT_RULE,
        window: int | None = None,
        chunk_size: int | None = None,
        conv_size: int = 4,
        key_lag: int = 0,
        eps: float = 1e-6,
        gate_rank: int | None = None,
        hierarchy: Hierarchy | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_heads(dim, heads)
        check_lag(key_lag, conv_size)
        check_positive("eps", eps)
        self.dim, self.heads, self.key_lag = dim, heads, key_lag
        self.memory: OmegaMemory | HierarchicalMemory
        self.gates: GateProjection | HierarchicalGates
        if hierarchy is None:
            self.memory = OmegaMemory(dim // heads, heads, rule, window, chunk_size, gates=False)
            self.gates = GateProjection(dim, heads, self.rule, gate_rank)
        else:
            if chunk_size is not None:
                raise ValueError(f"chunk_size={chunk_size} has no use beside a hierarchy, which has chunks; drop it")
            self.memory = HierarchicalMemory(dim // heads, heads, resolve_rule(rule, window), hierarchy, gates=False)
            self.gates = HierarchicalGates(dim, heads, self.memory.rules, gate_rank)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.convolution = ShortConvolution(3 * dim, conv_size)
        self.norm = nn.RMSNorm(dim // heads, eps=eps)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim, bias=False)
        self.writes = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections W_q, W_k, W_v and W_o together, so that a fresh layer recalls what it reads. Ours
        (docs/explanation/initialisation.md).

        W_q and W_v begin orthogonal, times a factor, and W_o as W_v^T. Keys begin as queries do, ``key_lag`` tokens
        later; without a lag W_k is rotated by 45 degrees, so that a query does not find its own token's key. The taps
        that a lag shifts out come back at the latest tokens: a document's first token would otherwise have the key 0,
        where the gradient of x / |x| has no bound. The output gate begins at ``start_gate``. Where the memory has a
        residual, W_v is scaled to ``START_VALUE``.

        Nothing is drawn: the orthogonal matrices are made of what was drawn, by the submodules' ``reset_parameters``.
        """
        with torch.no_grad():
            (w_q, w_k, w_v), (taps_q, taps_k, _) = (
                w.unflatten(0, (3, -1)) for w in (self.qkv.weight, self.convolution.weight)
            )
            for w in (w_q, w_v):
                w.copy_(orthonormal_columns(w.to(kept_dtype(w))) * (w.norm() / len(w) ** 0.5))
            w_k.copy_(w_q if self.key_lag else _rotate_by_45_degrees(w_q, self.heads))
            taps_k.copy_(taps_q.roll(-self.key_lag, 1))  # the last tap is the current token's
            self.out.weight.copy_(w_v.mT)
            if self.rule.network.residual:
                w_v.mul_(START_VALUE * len(w_v) ** 0.5 / w_v.norm().clamp_min(1e-30))
            self.gate.bias.fill_(start_gate(self.rule))

    @property
    def rule(self) -> Rule:
        """The memory's rule, with the layer's window and chunk."""
        return self.memory.rule

    def retrieve(self, x: Tensor, memory: Any) -> Tensor:
        """What the memory of a state answers to x, without writing: M*(q) (Titans, Eqs. 15 and 21).

        As ``forward``, but without the convolution, whose state belongs to the tokens that are written.

        Args:
            x: ``[batch, time, dim]``.
            memory: as ``state.memory`` of a ``LayerState``.

        Returns:
            y ``[batch, time, dim]`` in x's dtype, each token's from that token alone.

        Raises:
            ValueError: another state than that of this layer's memory; x of another width or dtype.
        """
        self.check_x(x, self.qkv)
        plain = type(self.qkv) is nn.Linear  # or else an adapter or a quantised layer, whose weight is not all
        q = F.linear(x, self.qkv.weight[: self.dim]) if plain else self.qkv(x)[..., : self.dim]
        q = F.silu(q).to(kept_dtype(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self._output(self.memory.retrieve(l2_normalise(q), memory), x)

    def write_inputs(self, x: Tensor, state: LayerState) -> tuple[Tensor, Tensor, Gates]:
        """Keys, values ``[batch, heads, time, dim / heads]`` and gates of x ``[batch, time, dim]`` after ``state``."""
        _, k, v, _ = self._project(x, state.past, None)
        return k, v, self.gates(x)

    def _forward(self, x: Tensor, state: LayerState | None, length: Tensor | None) -> tuple[Tensor, LayerState]:
        memory = self.memory
        if isinstance(memory, OmegaMemory) and self.writes and memory.reads_in_groups(x):
            return self._forward_in_groups(memory, x, state, length)
        q, k, v, past = self._project(x, state.past if state else None, length)
        before = state.memory if state else None
        if self.writes:
            gates = self.gates(x)
            gates = gates if length is None else replace(gates, length=length)
            y, after = memory(q, k, v, gates, before, checked=True)
        else:
            none = q.new_zeros(q.shape[0], self.gates.heads, 0)
            after = self.memory(q[:, :, :0], k[:, :, :0], v[:, :, :0], Gates(none), before)[1]
            y = self.memory.retrieve(q, after)
        return self._output(y, x), LayerState(after, past)

    def _forward_in_groups(
        self, memory: OmegaMemory, x: Tensor, state: LayerState | None, length: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        """As ``_forward``, keeping for the backward pass x and one state for every group of chunks."""
        # With random numbers: adapters have dropout.
        read = partial(checkpoint, self._forward_group, use_reentrant=False)
        like = x.new_zeros(len(x), self.heads, 0, x.shape[2] // self.heads, dtype=kept_dtype(x))
        params, reading = begin(memory.rule, memory.params, like, state.memory if state else None)
        past, outputs, start = state.past if state else None, [], 0
        for part in x.split(memory.group, 1):
            left = None if length is None else (length - start).clamp(0, part.shape[1])
            y, past, reading = read(memory, params, reading, part, past, left)
            outputs.append(y)
            start += part.shape[1]
        assert past is not None
        return torch.cat(outputs, 1), LayerState(end(reading, like), past)

    def _forward_group(
        self,
        memory: OmegaMemory,
        params: Params,
        reading: GroupState,
        x: Tensor,
        past: Tensor | None,
        length: Tensor | None,
    ) -> tuple[Tensor, Tensor, GroupState]:
        q, k, v, past = self._project(x, past, length)
        gates = replace(self.gates(x), length=length)
        y, reading = read_on(memory.rule, memory.compiled, params, reading, q, k, v, gates)
        return self._output(y, x), past, reading

    def _project(self, x: Tensor, past: Tensor | None, length: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v ``[batch, heads, time, dim / heads]`` in at least float32, and the last inputs of the convolution."""
        qkv, past = self.convolution(self.qkv(x), past, length)
        qk, v = F.silu(qkv).to(kept_dtype(x)).unflatten(-1, (3, self.heads, -1)).split([2, 1], 2)
        q, k = l2_normalise(qk.transpose(1, 3)).unbind(2)  # [batch, heads, 2, time, dim / heads]
        return q, k, v.squeeze(2).transpose(1, 2).clamp(-LARGEST, LARGEST), past

    def _output(self, y: Tensor, x: Tensor) -> Tensor:
        """y ``[batch, heads, time, dim / heads]`` normed, gated by x and projected: ``[batch, time, dim]``."""
        y = self.norm(narrowed(y, self.norm.weight.dtype)).transpose(1, 2).flatten(2)
        gate = F.silu(self.gate(x))
        return self.out((y * gate).to(gate.dtype))  # a norm may be kept in float32 where maps are narrower


def _rotate_by_45_degrees(w: Tensor, heads: int) -> Tensor:
    """``w [heads * dim, ...]``, each head's rows rotated by 45 degrees in pairs (the last of an odd number stays)."""
    rows = w.unflatten(0, (heads, -1))
    half = rows.shape[1] // 2
    one, other, last = rows.tensor_split((half, 2 * half), 1)
    return torch.cat([(one - other) * 0.5**0.5, (one + other) * 0.5**0.5, last], 1).flatten(0, 1)
