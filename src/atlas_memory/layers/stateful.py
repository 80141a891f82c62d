"""What layers with a state have in common: checks of inputs, the initial state, and states in files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..rules.state import State, check_numbers
from .nonfinite_inputs import MAX_ABS, replace_nonfinite, restore_nan, restore_nan_in_state
from .padding import move_padding_right, restore_padding

FORMAT = "atlas-memory state, 1"


class Stateful(nn.Module):
    """A layer ``y, state = layer(x, state)``, whose state is a ``State``: a frozen dataclass of tensors, the batch
    first in each. ``initial_state`` is the state after no tokens, so that a layer must read x ``[batch, 0, dim]``."""

    dim: int
    """Width of x; each layer sets it. Of ``OmegaMemory``, which reads q, k and v, it is the width of a head."""
    max_abs = MAX_ABS
    """To what entries of x are cut."""
    grows = False
    """Whether the state is longer the more has been read."""

    def empty_inputs(self, batch: int) -> tuple[Any, ...]:
        """Inputs of no tokens for ``batch`` sequences, in the dtype and on the device of the layer's parameters; in
        the default ones where it has none."""
        own = (p for p in self.parameters() if p.is_floating_point())  # a layer may have none, or packed ones
        like = next(own, torch.zeros(()))
        return (torch.zeros(batch, 0, self.dim, dtype=like.dtype, device=like.device),)

    def check_x(self, x: Tensor, first: nn.Module) -> None:
        """Raise ValueError unless x is ``[batch, time, dim]`` in the dtype of ``first``, a linear layer, or an adapter
        or quantised layer in its place."""
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.dim:
            got = list(x.shape) if isinstance(x, Tensor) else _brief(x)
            raise ValueError(f"x must be [batch, time, {self.dim}], got {got}")
        if not x.is_floating_point():
            raise ValueError(f"x must be floating point, got {x.dtype}: embed tokens first")
        weight: Any = getattr(first, "weight", None)
        plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1
        kind = x.device.type
        casts = torch.float64 not in (x.dtype, getattr(weight, "dtype", None))  # which autocast leaves alone
        casts = casts and torch.amp.is_autocast_available(kind)
        if plain and x.dtype != weight.dtype and not (casts and torch.is_autocast_enabled(kind)):
            raise ValueError(
                f"x is {x.dtype} and this {type(self).__name__} is {weight.dtype}: bring one to the dtype of the "
                f"other, x.to(...) or layer.to(...){', or call it under torch.autocast' if casts else ''}"
            )

    def check_state(self, state: Any, kind: type[State]) -> None:
        """Raise ValueError unless ``state`` is None or of this ``kind``, and gradients can flow beside it."""
        if state is not None and not isinstance(state, kind):
            raise ValueError(f"state must be the {kind.__name__} of an earlier call, or None, got {_brief(state)}")
        if state is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if any(t.is_inference() for t in state.tensors()) and any(p.requires_grad for p in self.parameters()):
            raise ValueError(
                "the state was made under torch.inference_mode, which allows no gradients: give state.detach(), a copy"
            )

    def _forward(self, x: Tensor, state: Any, length: Tensor | None) -> tuple[Tensor, Any]:
        """x ``[batch, time, dim]``, whose real tokens are the first ``length`` ``[batch]`` of each row; None: all."""
        raise NotImplementedError

    def forward_masked(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """``_forward`` of the tokens at which ``mask`` ``[batch, time]`` is not zero (None: all), as if there were no
        others, whose outputs are zero. Outputs and state of a row are NaN from a token on that is not finite."""
        length, order = None, None
        if mask is not None:
            x, length, order = move_padding_right(x, mask)
        x, bad = replace_nonfinite(x, self.max_abs)
        y, after = self._forward(x, state, length)
        if bad is not None:
            y, after = restore_nan(y, bad.cumsum(1) > 0), restore_nan_in_state(after, bad.any(1))
        if mask is not None and order is not None:
            y = restore_padding(y, order, mask)
        return self.link_unused_parameters(y, state), after

    def link_unused_parameters(self, y: Tensor, state: Any) -> Tensor:
        """``y`` ``[..., time, dim]``, made to depend on every parameter: those that a call does not use, as M_0 where
        it continues from a state, get zero gradients and not none, for which data-parallel training would wait."""
        if not torch.is_grad_enabled():
            return y
        rule = getattr(self, "rule", None)
        unread = (rule is not None and rule.window.read == "frozen") or not all(p.numel() for p in self.parameters())
        if state is None and y.shape[-2] and getattr(self, "writes", True) and not unread:
            return y
        return y + sum((p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad), start=y.new_zeros(()))

    def initial_state(self, batch: int = 1) -> Any:
        """The state of ``batch`` sequences before their first token, with gradients to the learned M_0. ValueError
        unless ``batch`` is a whole number of at least 0."""
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise ValueError(f"batch must be a whole number of sequences, at least 0, got {batch!r}")
        return self(*self.empty_inputs(batch))[1]

    def save_state(self, state: State, path: str | Path) -> None:
        """Write a state to a safetensors file, whole or not at all, with the layer's kind and rules beside it.

        Raises:
            ValueError: no state of this layer, or numbers that are not finite.
            OSError: ``path`` cannot be written, as where its folder does not exist.
        """
        if not isinstance(state, State):
            raise ValueError(f"state must be what a call of this layer returned beside y, got {_brief(state)}")
        tensors = {name: t.detach().clone().contiguous() for name, t in state.named_tensors()}
        check_tensors(self, tensors, self.initial_state(), "the state")
        partial = Path(f"{path}.partial")
        try:
            partial.write_bytes(save(tensors, metadata={"format": FORMAT, "of": _describe(self)}))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load_state(self, path: str | Path) -> Any:
        """Read a state that ``save_state`` wrote, to the device of the layer's parameters and the dtypes of its states.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no state, or one that was cut short, is of another layer, or has numbers that are not finite.
        """
        if not Path(path).is_file():  # a pipe would be waited for
            raise FileNotFoundError(f"there is no state at {path}")
        like = self.initial_state()
        device = next(like.tensors(), torch.empty(0)).device
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                # Copied: what lies in a file begins anywhere, and products of it differ in the last bit.
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, TypeError, RuntimeError) as error:  # the last two of sizes that no tensor has
            raise ValueError(f"{path} is no state, or was cut short: {str(error).splitlines()[0]}") from error
        of, own = metadata.get("of", "a layer that it does not name"), _describe(self)
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds tensors, but no state of a memory: save_state writes them")
        if of != own:
            theirs, ours = (set(re.split(r", (?=[a-z]+=[A-Z])|; ", layer)) for layer in (of, own))
            raise ValueError(
                f"{path} holds a state of another layer: {', '.join(sorted(theirs - ours))}; in this "
                f"{type(self).__name__}: {', '.join(sorted(ours - theirs))}"
            )
        check_tensors(self, tensors, like, str(path))
        names = iter([name for name, _ in like.named_tensors()])
        return like.map(lambda t: tensors[next(names)].to(t.dtype))


def _brief(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _describe(layer: nn.Module) -> str:
    """The kind of a layer and the rules of its memories, in words."""
    rules = sorted({repr(m.rule) for m in layer.modules() if hasattr(m, "rule")})
    hierarchies = [repr(m.hierarchy) for m in layer.modules() if hasattr(m, "hierarchy")]
    return f"{type(layer).__name__}({'; '.join(rules + hierarchies)})"


def _fits(got: torch.Size, fresh: torch.Size, grows: bool) -> bool:
    """Whether a state's tensor may have this shape where a fresh one has ``fresh``, both without the batch."""
    if not grows or not fresh:
        return got == fresh
    longer = [a - b for a, b in zip(got, fresh, strict=True)]
    return longer[0] == 0 and min(longer) >= 0 and sum(map(bool, longer)) <= 1


def check_tensors(layer: nn.Module, tensors: dict[str, Tensor], like: State, where: str) -> None:
    """Raise ValueError unless names and shapes are those of ``like``, but for the batch, the precision and the length
    of a state that grows."""
    expected = dict(like.named_tensors())
    if other := sorted(expected.keys() ^ tensors.keys()):
        raise ValueError(f"{where} is of another layer than this {type(layer).__name__}: only one has {other[0]}")
    grows = any(m.grows for m in layer.modules() if isinstance(m, Stateful))
    for name, t in expected.items():
        got = tensors[name]
        kind = got.is_floating_point() == t.is_floating_point()
        if not (got.dim() == t.dim() and kind and _fits(got.shape[1:], t.shape[1:], grows)):
            raise ValueError(
                f"{where} has {name} {list(got.shape)} of {got.dtype}, and this layer's is [batch, "
                f"{', '.join(map(str, t.shape[1:]))}] of {t.dtype}"
            )
    if len({t.shape[0] for t in tensors.values()}) > 1:
        raise ValueError(f"{where} has tensors of different batches")
    check_numbers(tensors.items(), where)
