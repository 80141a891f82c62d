"""The steps of gradient descent, the delta step and momentum over a chunk, O = identity (fast_weight.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk_context import Inputs, MatrixContext
from .decay_masks import DecayMasks, GateDecay
from .fast_weight import by_row, decayed, minus_masked, to_rows
from .triangular import late


class PlainSteps(NamedTuple):
    """The steps that one matrix makes of its updates ``[n, U, m]``."""

    part: MatrixContext
    decay: GateDecay
    masks: DecayMasks
    updates: Tensor

    def read(self, queries: Inputs) -> Tensor:
        """W_t f for the input f of every query, ``[n, b, m]``, as if the retention were linear at all tokens."""
        part, decay, context, kernel = self.part, self.decay, self.part.context, queries.kernel
        retained, started, mix = decay.retained, decay.started, self.masks.mix
        assert kernel is not None and mix is not None
        if context.rule.window.read == "before":
            retained, mix, started = late(retained, 1.0), late(mix), None if started is None else late(started)
        out = part.decayed_answer(queries, retained)
        if started is not None:
            out = torch.addcmul(out, to_rows(started, out.shape[-1]), queries.apply(part.state.sums[0]), value=-1)
        return minus_masked(out, mix, kernel, self.updates)

    def matrix(self, token: int, start: Tensor, target: Tensor | None) -> Tensor:
        """The matrix after a token (0: the first, -1: the last) if it makes these steps from ``start`` on and decays to
        ``target``, ``[n, m, F]``; None: to zero."""
        assert self.masks.mix is not None
        end = decayed(self.decay.retained[:, token], start, target)
        if self.decay.started is not None:
            s = self.part.state.sums[0]
            end = torch.addcmul(end, by_row(self.decay.started[:, token], s), s, value=-1)
        return self.part.write(end, self.part.summed(-self.masks.mix[..., token, :], self.updates))

    def sums(self) -> tuple[Tensor, ...]:
        """The momentum S after the chunk, where there is one."""
        if self.masks.last is None or self.decay.start is None:
            return ()
        left = self.decay.start[:, -1, None, None] * self.part.state.sums[0]
        return (self.part.write(left, self.part.summed(self.masks.last, self.updates)),)
