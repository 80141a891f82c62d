"""Whether a mixer from outside does what a model asks of one. It is tried on a few tokens when the first model is made
with it, so that one that forgets, mixes rows or sees the future is refused by its name, and does not generate with
another function than it was trained with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..rules.contracts.trying import numbers
from .stateful import Stateful
from .varlen import read_documents

TIME, CUTS, PADDING = 6, (3, 2, 1), 2

Read = Callable[..., tuple[Tensor, Any]]


class _CannotRun(Exception):
    """Its forward pass fails here, perhaps because it needs a GPU: then it will say so itself when it is called."""


@torch.no_grad()
def try_mixer(mixer: Stateful) -> bool:
    """Read a few tokens of two sequences with a copy of the mixer in eval mode, whose weights are moved a little, lest
    it begin by answering zero. False: it has no numbers yet, on the device "meta", and was not tried.

    Raises:
        ValueError: It answers otherwise when it is called again, in several calls than in one, when other rows are
            beside, or when later tokens differ; it changes a state in place; or it does not keep the dtype of x.

    Warns:
        UserWarning: It does not answer as if padding were not there, fails for no tokens, or lets no gradient through.
    """
    like = next((t for t in (*mixer.parameters(), *mixer.buffers()) if t.is_floating_point()), torch.zeros(()))
    if like.is_meta or torch.zeros(()).is_meta:
        return False
    trial, name = copy.deepcopy(mixer).eval(), type(mixer).__name__
    for i, parameter in enumerate(trial.parameters()):
        if parameter.is_floating_point():
            parameter.add_(numbers(*parameter.shape, frequency=0.3 + 0.1 * i).to(parameter), alpha=0.05)
    forward = trial.forward

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            raise _CannotRun from error

    trial.forward = guarded
    x = numbers(2, TIME, mixer.dim).to(like)
    with torch.autocast(x.device.type, enabled=False), suppress(_CannotRun):
        _try(name, x, lambda x, state=None, mask=None: read_documents(trial, x, state, mask, None))
    return True


def _try(name: str, x: Tensor, read: Read) -> None:
    whole = read(x)[0]
    if whole.dtype != x.dtype:
        raise ValueError(f"{name} must answer in the dtype of x, here {x.dtype}, got {whole.dtype}")
    again = f"{name} answers otherwise when it is called again: it must draw nothing in eval mode"
    _equal(read(x)[0], whole, f"{again}, and keep nothing in itself between calls")
    later = torch.cat([x[:, :-2], -x[:, -2:]], 1)
    _equal(read(later)[0][:, :-2], whole[:, :-2], f"{name} sees the future: what it answers changes with later tokens")
    answers: list[Tensor] = []
    state: Any = None
    for part in x.split(CUTS, 1):
        before, held = state, [] if state is None else [t.clone() for t in state.tensors()]
        y, state = read(part, before)
        answers.append(y)
        read(part.flip(1))  # another text, which must not matter
        if before is not None and not all(map(torch.equal, held, before.tensors())):
            raise ValueError(
                f"{name} changes in place the state that it is given, which belongs to the caller: make new tensors"
            )
    in_calls = (
        f"{name} answers otherwise when it reads {TIME} tokens in {len(CUTS)} calls than in one: it must go on from "
        "the state that it is given (None: from the start), return the one after the last token, and keep nothing in "
        "itself"
    )
    _equal(torch.cat(answers, 1), whole, in_calls)
    _equal(read(x[1:])[0], whole[1:], f"{name} answers a row otherwise when other rows are beside it")
    _warn_of_padding(name, x, read)
    _warn_of_nothing(name, x, read)


def _warn_of_padding(name: str, x: Tensor, read: Read) -> None:
    mask = torch.ones_like(x[..., 0])
    mask[0, :PADDING] = mask[1, -PADDING:] = 0
    y, state = read(x, None, mask)
    more = read(x, state)[0]
    for i, real in enumerate((slice(PADDING, None), slice(None, -PADDING))):
        alone, after = read(x[i : i + 1, real])
        same = _close(y[i : i + 1, real], alone) and _close(more[i : i + 1], read(x[i : i + 1], after)[0])
        if not same or y[i][mask[i] == 0].any():
            warnings.warn(
                f"{name} does not answer as if padding, whose y must be zero, were not there: batches of rows of "
                "different length will be read wrongly. Use mask [batch, time], 1 at real tokens (as "
                "Stateful.read_real does)",
                stacklevel=2,
            )
            return


def _warn_of_nothing(name: str, x: Tensor, read: Read) -> None:
    """Warn of a mixer that cannot read no tokens, as in a call of padding alone, or through which none learns."""
    try:
        read(x[:, :0])
    except _CannotRun as error:
        warnings.warn(
            f"{name} fails for x [batch, time, dim] of no tokens, time 0; y has none then either, and the state stays "
            f"as it is: {error.__cause__}",
            stacklevel=2,
        )
    if torch.is_inference_mode_enabled():
        return
    with torch.enable_grad():
        if not read(x.clone().requires_grad_())[0].requires_grad:
            warnings.warn(
                f"{name} lets no gradient through from y to x, so that no layer below it learns of it: nothing may be "
                "detached, or computed under torch.no_grad",
                stacklevel=2,
            )


def _close(a: Tensor, b: Tensor) -> bool:
    off = (a.float() - b.float()).abs().max()
    return bool(off <= 100 * torch.finfo(a.dtype).eps * b.float().abs().max().clamp_min(1.0))


def _equal(a: Tensor, b: Tensor, message: str) -> None:
    if not _close(a, b):
        raise ValueError(f"{message}. Here it differs by up to {float((a.float() - b.float()).abs().max()):.3g}")
