"""In which precision the inner problem is computed, and the checks every form makes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules.autograd import is_cheap_to_read, no_autocast
from ..rules.features import Features
from ..rules.gates import Gates
from ..rules.rule import Params, Rule
from ..rules.state import MemoryState, check_count

Form = Callable[..., tuple[Tensor, MemoryState]]

MAX_ABS = 1e25
"""The largest entry of a value or gate that a memory is given: what is computed of larger ones overflows in float32.
For keys see ``Features.max_abs``."""


def working_dtype(rule: Rule, x: Tensor) -> torch.dtype:
    """The dtype in which ``rule`` is computed for inputs like ``x``: at least float32; see ``Muon.precise``."""
    return torch.float64 if rule.optimiser.in_float64 or x.dtype == torch.float64 else torch.float32


def compute(
    form: Form,
    rule: Rule,
    params: Params,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    state: MemoryState | None,
) -> tuple[Tensor, MemoryState]:
    """Run ``form`` in the working precision. Returns y in q's dtype, and the state in float32 (float64 if q is).

    Raises:
        ValueError: q, k and v not ``[batch, heads, time, dim]`` of one shape and one floating dtype; gates that do not
            go with them; a state or initial memory of another rule, head count or width.
    """
    check_inputs(rule, params, q, k, v, gates, state)
    up = cast(working_dtype(rule, q))
    with no_autocast(q.device):
        state = None if state is None else state.map(up)
        k, v, gates, nonfinite = NonFinite.apart(rule, k, v, gates)
        y, end = form(rule, params.map(up), up(q), up(k), up(v), gates.map(up), state)
    down = cast(kept_dtype(q))
    return nonfinite.outputs(y).to(q.dtype), end.map(lambda t: nonfinite.state(down(t)))


class NonFinite(NamedTuple):
    """Tokens whose key, phi(k), value or gates are not finite. From a real one on the memory is lost, and its outputs
    are NaN. But in a product over the tokens of a chunk, 0 x NaN would reach back to outputs before it. So the memory
    is computed with zeros in place of these tokens, and NaN is put into outputs and state afterwards.

    Attributes:
        token: which tokens are such, padding included, ``[batch, heads, time]`` bool; None: it was seen that none is,
            and that no number is beyond +-``MAX_ABS``, or the ``max_abs`` of the features.
        since: which tokens are real and such, or come after one, of the same shape; or None.
    """

    token: Tensor | None
    since: Tensor | None

    @staticmethod
    def apart(rule: Rule, k: Tensor, v: Tensor, gates: Gates) -> tuple[Tensor, Tensor, Gates, NonFinite]:
        """k, v and gates without such tokens, and which these are."""
        nonfinite = NonFinite.among(rule, k, v, gates)
        return (
            nonfinite.taken_out(k, rule.features.max_abs or MAX_ABS),
            nonfinite.taken_out(v),
            nonfinite.of_gates(gates),
            nonfinite,
        )

    @staticmethod
    def among(rule: Rule, k: Tensor, v: Tensor, gates: Gates) -> NonFinite:
        """Which tokens are such."""
        features = rule.features
        others = (v, gates.eta, gates.alpha, gates.theta, gates.gamma, gates.delta)
        near = is_cheap_to_read(k) and are_near(k, features.max_abs or MAX_ABS)
        near = near and all(is_cheap_to_read(x) and are_near(x, MAX_ABS) for x in others if x is not None)
        if near and (features.max_abs or not _is_too_long(features, k).any()):
            return NonFinite(None, None)
        token = ~(are_finite(k) & are_finite(v))
        if features.max_abs is None:
            token = token | _is_too_long(features, k)
        for gate in (gates.eta, gates.alpha, gates.theta, gates.gamma, gates.delta):
            if gate is not None:
                token = token | ~(gate.isfinite() if gate.dim() == 3 else are_finite(gate))
        lost = token
        if gates.length is not None:
            lost = token & (torch.arange(k.shape[-2], device=k.device) < gates.length[:, None, None])
        return NonFinite(token, lost.cumsum(-1) > 0)

    def taken_out(self, x: Tensor, max_abs: float = MAX_ABS) -> Tensor:
        """x with zero in place of these tokens, and cut to +-``max_abs``; an x that is not ``[batch, heads, time,
        ...]``, such as lengths, stays as it is."""
        if self.token is None or x.shape[:3] != self.token.shape:
            return x
        token = self.token if x.dim() == 3 else self.token[..., None]
        return x.masked_fill(token, 0.0).clamp(-max_abs, max_abs)  # laid out as x, not as the mask

    def of_gates(self, gates: Gates) -> Gates:
        """Gates without these tokens, contiguous whether there are any or not. In another layout products are rounded
        otherwise, and a token that is no number would change the last bit of others."""
        return gates.map(lambda x: self.taken_out(x).contiguous())

    def outputs(self, y: Tensor) -> Tensor:
        """y ``[batch, heads, time, dim]`` with NaN from the first such token on."""
        return y if self.since is None else y.masked_fill(self.since[..., None], torch.nan)

    def state(self, x: Tensor) -> Tensor:
        """A tensor of the state with NaN in the heads that met such a token; counts, which are integers, stay."""
        if self.since is None or not x.is_floating_point() or not self.since.shape[-1]:
            return x
        return torch.where(self.since[..., -1, None, None], torch.nan, x)


def are_finite(x: Tensor) -> Tensor:
    """Whether all numbers along the last axis are finite, in one pass where ``isfinite`` takes four on a GPU."""
    if not x.numel():  # of which fake tensors refuse a norm
        return x.new_ones(x.shape[:-1], dtype=torch.bool)
    return torch.linalg.vector_norm(x.detach(), torch.inf, -1).isfinite()


def are_near(x: Tensor, max_abs: float) -> bool:
    """Whether all of ``x`` is finite and within +-``max_abs``."""
    if not x.numel():
        return True
    low, high = torch.aminmax(x.detach())
    return float(low) >= -max_abs and float(high) <= max_abs  # false for NaN, too


def _is_too_long(features: Features, k: Tensor) -> Tensor:
    """For which keys ``[..., dim]`` a thousand times |phi(k)|^2 is no number in at least float32: ``[...]`` bool."""
    k = k.detach().to(torch.promote_types(k.dtype, torch.float32))
    return ~(features.squared_norm(k) <= 1e-3 * torch.finfo(k.dtype).max)


def kept_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which states are kept for inputs like ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The function that brings a floating-point tensor to ``dtype``, and leaves one of integers or bools as it is."""
    return lambda t: t.to(dtype) if t.is_floating_point() else t


def narrowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in ``dtype``, cut to the largest number of float16 where it is that, which a memory's answer may be beyond."""
    return (y.clamp(-65504.0, 65504.0) if dtype == torch.float16 else y).to(dtype)


def check_inputs(
    rule: Rule, params: Params, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState | None
) -> None:
    """Raise ValueError unless the arguments fit together; see ``compute``."""
    for name, given, kind in (("rule", rule, Rule), ("params", params, Params), ("gates", gates, Gates)):
        if not isinstance(given, kind):
            raise ValueError(f"{name} must be {kind.__name__}(...), got a {type(given).__name__}")
    _check_tokens(q, k, v)
    batch, heads, _, dim = q.shape
    expected = [[heads, *shape] for shape in rule.shapes(dim)]
    got = [list(m.shape) for m in params.initial]
    if got != expected:
        raise ValueError(
            f"params.initial must have shapes {expected} for this rule and q of {list(q.shape)} "
            f"({heads} heads of {dim}), got {got}"
        )
    if not q.is_meta and any(m.is_meta for m in params.initial):
        raise ValueError(
            "M_0 has no numbers, it is on the device meta. Where weights are offloaded, let whole blocks be read: "
            "dispatch_model(model, device_map, ..., preload_module_classes=['AtlasBlock'])"
        )
    gates.check(q, rule.window.size)
    channels = gates.eta.dim() == 4 or (gates.alpha is not None and gates.alpha.dim() == 4)
    if channels and rule.optimiser.mixes_rows:
        raise ValueError(
            f"{type(rule.optimiser).__name__} takes one eta and alpha a token and head; give gates of shape "
            "[batch, heads, time]"
        )
    if state is not None:
        check_memory_state(rule, batch, heads, dim, state)


def _check_tokens(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor [batch, heads, time, dim], got a {type(x).__name__}")
    if q.dim() != 4:
        raise ValueError(f"q must be [batch, heads, time, dim], got shape {list(q.shape)}")
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape:
            raise ValueError(f"{name} must have the shape of q, {list(q.shape)}, got {list(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def check_memory_state(rule: Rule, batch: int, heads: int, dim: int, state: MemoryState) -> None:
    """ValueError unless the state is one of this rule, for so many rows and heads of this width."""
    if not isinstance(state, MemoryState):
        raise ValueError(f"state must be the MemoryState that an earlier call returned, got a {type(state).__name__}")
    check_count(state.seen)
    held = state.keys.shape[-2]
    shapes = enumerate(rule.shapes(dim))
    expected = [[batch, heads, rows, columns + rule.kernelised(i) * held] for i, (rows, columns) in shapes]
    got = [list(m.weights.shape) for m in state.matrices]
    if got != expected:
        raise ValueError(
            f"state must hold memories of shapes {expected}, got {got}: it is of another rule, batch or width"
        )
    sums = {len(m.sums) for m in state.matrices}
    if sums != {rule.accumulators}:
        raise ValueError(
            f"state keeps {', '.join(map(str, sorted(sums)))} sums a matrix, where {rule.optimiser} keeps "
            f"{rule.accumulators}: it is of another rule"
        )
    mirrored = {m.dual is not None for m in state.matrices}
    if mirrored != {rule.retention.has_mirror_map} or state.v.shape[-1] != dim + rule.bias.has_delta:
        raise ValueError(f"state is of a rule with another retention or bias than {rule.retention}, {rule.bias}")
    if state.k.shape[-2] != rule.window.size - 1:
        raise ValueError(
            f"state carries {state.k.shape[-2]} window tokens, the rule's window needs {rule.window.size - 1}"
        )
