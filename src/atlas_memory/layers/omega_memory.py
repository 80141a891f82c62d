"""The bare memory, without projections: for models that make q, k and v themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import Gates, MemoryState, Params, Rule, chunkwise, fused_recurrent, initial_state, resolve_rule, retrieve
from ..ops.chunk_layout import starts_chunk
from ..ops.cuda_graphs import Graphs
from ..ops.fused_recurrent import decode_token
from ..ops.precision import Form, check_memory_state
from ..rules import DEFAULT_RULE
from ..rules.autograd import is_transformed
from ..rules.validation import UNBOUNDED, check_size
from .gate_projection import GateProjection
from .stateful import Stateful

INCREMENTAL_TOKENS = 2  # from a state, up to so many tokens are cheaper one by one than as a chunk


class OmegaMemory(Stateful):
    """A memory over q, k and v. Its parameters are M_0, the coefficients of the features, gain and shift of a layer
    norm, and, unless ``gates=False``, a projection that makes gates from the keys.

    Examples:
        >>> omega = OmegaMemory(dim=16, heads=2, rule="omeganet", window=4)
        >>> q, k, v = torch.randn(3, 1, 2, 50, 16)
        >>> y, state = omega(q, k, v)
        >>> y_next, state = omega(q, k, v, state=state)  # continues where it stopped

    Queries and keys are used as they come; ``l2_normalise`` them unless you have a reason not to.

    Args:
        dim: width of a head.
        heads: number of heads, each with its own memory.
        rule: a name in ``RULES`` or a ``Rule``.
        window: c, the tokens in the inner loss; None: the rule's.
        chunk_size: b, tokens between refreshes of the frozen memory; None: the rule's.
        gates: whether to own a gate projection. If not, every call must bring ``gates``.
        gate_rank: the ``rank`` of ``GateProjection``.

    Attributes:
        recompute, compiled, graphs: how ``forward`` computes; ``set_execution`` sets them in a model.

    Raises:
        ValueError: an unknown rule, or a size below 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        rule: str | Rule = DEFAULT_RULE,
        window: int | None = None,
        chunk_size: int | None = None,
        gates: bool = True,
        gate_rank: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads)):
            check_size(name, value)
        self.dim, self.heads = dim, heads
        self.rule = resolve_rule(rule, window, chunk_size)
        for rows, columns in self.rule.shapes(dim):
            for name, value in (("rows", rows), ("columns", columns)):
                check_size(f"the {name} of a memory's matrix, for heads of {dim} and {self.rule.network},", value)
        self.initial = nn.ParameterList(torch.empty(heads, *shape) for shape in self.rule.shapes(dim))
        sqrt_a = self.rule.features.initial_sqrt_a()
        self.sqrt_a = None if sqrt_a is None else nn.Parameter(sqrt_a.to(torch.get_default_dtype()))
        norm = self.rule.network.norm
        self.norm_gain = nn.Parameter(torch.empty(heads, dim)) if norm else None
        self.norm_shift = nn.Parameter(torch.empty(heads, dim)) if norm else None
        if gate_rank is not None and not gates:
            raise ValueError(f"gate_rank={gate_rank} needs gates=True")
        self.gates = GateProjection(dim * heads, heads, self.rule, gate_rank) if gates else None
        self._sums = self.rule.accumulators
        self.reset_parameters()
        self.recompute: int | None = None
        self.compiled = False
        self.graphs: Graphs | None = None

    @property
    def grows(self) -> bool:  # type: ignore[override]
        """Whether the state grows with what is read, as with ``Exponential`` features."""
        return self.rule.features.infinite

    @property
    def params(self) -> Params:
        """The outer parameters of the inner problem."""
        norm = None if self.norm_gain is None or self.norm_shift is None else (self.norm_gain, self.norm_shift)
        return Params(tuple(self.initial), self.sqrt_a, norm)

    def reset_parameters(self) -> None:
        """A fresh random M_0, the features' starting coefficients, a plain layer norm, and fresh gates."""
        with torch.no_grad():
            values = self.rule.initial_weights(self.heads, self.dim)
            for parameter, value in zip(self.initial, values, strict=True):
                parameter.copy_(value)
            sqrt_a = self.rule.features.initial_sqrt_a()
            if self.sqrt_a is not None and sqrt_a is not None:
                self.sqrt_a.copy_(sqrt_a)
            if self.norm_gain is not None and self.norm_shift is not None:
                self.norm_gain.fill_(1.0)
                self.norm_shift.zero_()
        if self.gates is not None:
            self.gates.reset_parameters()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates | None = None,
        state: MemoryState | None = None,
        *,
        checked: bool = False,
    ) -> tuple[Tensor, MemoryState]:
        """Read and write every token in turn.

        Args:
            q, k, v: ``[batch, heads, time, dim]``.
            gates: your own; None: computed from the keys.
            state: where an earlier call stopped; None: a fresh memory for each sequence of the batch.
            checked: whether a layer has made q, k, v and gates, which then need no check.

        Returns:
            y ``[batch, heads, time, dim]`` in q's dtype, y_t read after the write of token t unless the rule's window
            says otherwise; and the state after the last token.

        Raises:
            ValueError: shapes that do not fit, or neither ``gates`` given nor owned.
        """
        self.check_state(state, MemoryState)
        if checked and gates is not None and state is not None and q.shape[-2] == 1 and not torch.is_grad_enabled():
            if not self._fits(state, len(q)):
                check_memory_state(self.rule, len(q), self.heads, self.dim, state)
            if (found := decode_token(self.rule, self.params, q, k, v, gates, state)) is not None:
                return found
        if not checked:
            self.check_heads(q, k, v)
        if gates is None:
            if self.gates is None:
                raise ValueError(
                    "this memory was made with gates=False: pass gates=Gates(eta=..., ...) with every call"
                )
            gates = self.gates(k.transpose(1, 2).flatten(2))
        form: Form = fused_recurrent
        if state is None or k.shape[-2] > INCREMENTAL_TOKENS:
            starts = starts_chunk(self.rule, state)
            form = partial(chunkwise, recompute=self.recompute, compiled=self.compiled, starts=starts)
        args = self.rule, self.params, q, k, v, gates, state
        graphs = self.graphs if q.is_cuda and not torch.compiler.is_compiling() else None
        y, after = form(*args) if graphs is None else graphs(form, *args)
        return (y if checked else self.link_unused_parameters(y, state)), after

    def _fits(self, state: MemoryState, batch: int) -> bool:
        """Whether the state seems to be this memory's, for so many sequences: cheaper than ``check_memory_state``."""
        for matrix, m_0 in zip(state.matrices, self.initial, strict=False):
            if matrix.weights.shape != (batch, *m_0.shape) or len(matrix.sums) != self._sums:
                return False
        window = state.k.shape[-2] == self.rule.window.size - 1
        return window and len(state.matrices) == len(self.initial) and state.seen.dtype == torch.int64

    def check_heads(self, *qkv: Tensor) -> None:
        """Raise ValueError unless q, k and v, or q alone, are ``[batch, heads, time, dim]``."""
        for name, z in zip("qkv", qkv, strict=False):
            if not isinstance(z, Tensor) or z.dim() != 4 or z.shape[1] != self.heads or z.shape[3] != self.dim:
                got = list(z.shape) if isinstance(z, Tensor) else f"a {type(z).__name__}"
                raise ValueError(f"{name} must be [batch, heads={self.heads}, time, dim={self.dim}], got {got}")

    def empty_inputs(self, batch: int) -> tuple[Any, ...]:
        like = next(self.parameters())
        q = torch.zeros(batch, self.heads, 0, self.dim, dtype=like.dtype, device=like.device)
        return q, q, q, Gates(q[..., 0])

    def extra_repr(self) -> str:
        """What ``print`` shows of the memory."""
        return f"dim={self.dim}, heads={self.heads}, {self.rule}"

    def reads_in_groups(self, x: Tensor) -> bool:
        """Whether a layer should make q, k and v of x ``[batch, time, ...]`` for one group of chunks at a time, and
        again in the backward pass (``recompute``): not on a GPU, which a group would not fill, nor under a compiler."""
        if self.recompute is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return x.device.type == "cpu" and x.shape[1] > self.group and not is_transformed(x)

    @property
    def group(self) -> int:
        """Tokens in a group of ``recompute`` chunks."""
        return (self.recompute or 1) * self.rule.window.chunk

    def retrieve(self, q: Tensor, state: MemoryState | None = None) -> Tensor:
        """What the memory answers to q ``[batch, heads, time, dim]``, without writing; shaped as q. ``state`` None: a
        fresh memory. ValueError: q of another number of heads or width, or a state of another rule, size or batch."""
        self.check_state(state, MemoryState)
        self.check_heads(q)
        if state is None:
            state = initial_state(self.rule, self.params.initial, q.to(torch.promote_types(q.dtype, torch.float32)))
        else:
            check_memory_state(self.rule, len(q), self.heads, self.dim, state)
        return retrieve(self.rule, self.params, q, state)


def set_execution(
    module: nn.Module, *, recompute: int | None = None, compiled: bool = False, graphed: bool = False
) -> None:
    """Set how every memory inside ``module`` is computed, not what. What a call does not name is switched off.

    Args:
        module: a layer or a model.
        recompute: how many chunks make a group. Of each group the backward pass keeps one state of the memory, and
            computes the rest again, on a CPU projections and gates too; None: keep everything.
        compiled: whether to compile the reading of a chunk; see ``chunkwise``.
        graphed: on a GPU, whether to record calls as CUDA graphs when they come for the third time with the same
            shapes, and then to replay them. A recording holds what the backward pass needs, which runs once.

    Raises:
        ValueError: ``recompute`` below 1, or a module without memories.
    """
    if recompute is not None:
        check_size("recompute, a number of chunks,", recompute, UNBOUNDED)
    memories = [m for m in module.modules() if isinstance(m, OmegaMemory)]
    if not memories:
        raise ValueError(f"{type(module).__name__} has no memory whose execution could be set")
    for memory in memories:
        memory.recompute, memory.compiled, memory.graphs = recompute, compiled, Graphs() if graphed else None
