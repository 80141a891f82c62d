"""What every layer with a state has in common: the check of its inputs, the state before the first token, and states in
files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
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
        """Raise ValueError unless x is ``[batch, time, dim]`` and can be read by ``first``, a linear layer, or what
        another library, of adapters or quantised layers perhaps, has put in its place."""
        weight: Any = getattr(first, "weight", None)
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a tensor [batch, time, {self.dim}], got {_brief(x)}")
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must be [batch, time, {self.dim}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"x must be floating point, got {x.dtype}: embed tokens first")
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
        """Raise ValueError unless ``state`` is None or of this ``kind``; and for one that was made under
        ``torch.inference_mode`` where gradients are on and a parameter is trained."""
        if state is not None and not isinstance(state, kind):
            raise ValueError(
                f"state must be the {kind.__name__} that an earlier call returned, or None, got {_brief(state)}"
            )
        if state is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if any(t.is_inference() for t in state.tensors()) and any(p.requires_grad for p in self.parameters()):
            raise ValueError(
                "the state was made under torch.inference_mode, and PyTorch takes no gradients beside it: give "
                "state.detach(), or of a cache call detach(), which copies it"
            )

    def _forward(self, x: Tensor, state: Any, length: Tensor | None) -> tuple[Tensor, Any]:
        """x ``[batch, time, dim]``, whose real tokens are the first ``length`` ``[batch]`` of each row; None: all."""
        raise NotImplementedError

    def forward_masked(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """``_forward`` of the tokens at which ``mask`` ``[batch, time]`` is not zero. Outputs at the others are zero,
        and all else is as if those tokens did not exist. None: all tokens are real. From a token on that is not finite,
        the outputs and the state of its row are NaN (nonfinite_inputs.py)."""
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
        """``y`` ``[..., time, dim]``, made to depend on every parameter. A call that continues from a ``state`` uses
        neither M_0 nor persistent tokens, one without ``writes`` no gates, and one of no tokens hardly anything; a
        memory that is read as it was before a chunk may use no gates, and none uses parameters without entries. Their
        gradients are then zero and not missing, for data-parallel training would wait for them."""
        if not torch.is_grad_enabled():
            return y
        rule = getattr(self, "rule", None)
        unread = (rule is not None and rule.window.read == "frozen") or not all(p.numel() for p in self.parameters())
        if state is None and y.shape[-2] and getattr(self, "writes", True) and not unread:
            return y
        return y + sum((p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad), start=y.new_zeros(()))

    def initial_state(self, batch: int = 1) -> Any:
        """The state of ``batch`` sequences before their first token. It is made from the learned M_0: a loss on what is
        read from it trains M_0. ValueError unless ``batch`` is a whole number of at least 0."""
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
            raise ValueError(f"batch must be a whole number of sequences, at least 0, got {batch!r}")
        return self(*self.empty_inputs(batch))[1]

    def save_state(self, state: State, path: str | Path) -> None:
        """Write a state to a safetensors file, whole or not at all, with the layer's kind and rules beside it.

        Raises:
            ValueError: no state, or one whose tensors are not those of this layer's states, or not finite; ``path`` is
                a folder.
            FileNotFoundError: the folder of ``path`` does not exist.
        """
        if not isinstance(state, State):
            raise ValueError(f"state must be what a call of this layer returned beside y, got {_brief(state)}")
        if not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {Path(path).absolute().parent}; make it first")
        if Path(path).is_dir():
            raise ValueError(f"{path} is a folder: name a file in it, such as {Path(path) / 'state.safetensors'}")
        like = self.initial_state()
        check_tensors(self, dict(state.named_tensors()), like, "the state")
        tensors = {name: t.detach().clone().contiguous() for name, t in state.named_tensors()}
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(tensors, partial, metadata={"format": FORMAT, "of": _what(self)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load_state(self, path: str | Path) -> Any:
        """Read a state that ``save_state`` wrote, onto the device of the layer's parameters, and in the dtypes of this
        layer's states: one that was written by a layer in float32 can be read on from in bfloat16.

        Raises:
            FileNotFoundError: no such file.
            ValueError: no such state, one that was cut short, one of another kind of layer, another rule or width, or
                one with numbers that are not finite or counts of tokens that are none.
        """
        if not Path(path).is_file():
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
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds tensors, but no state of a memory: save_state writes them")
        if (of := metadata.get("of", "")) != _what(self):
            theirs, ours = _parts(of) or ["a layer that it does not name"], _parts(_what(self))
            held, here = (
                ", ".join(w for w in these if w not in those) for these, those in ((theirs, ours), (ours, theirs))
            )
            raise ValueError(f"{path} holds a state of another layer: {held}; in this {type(self).__name__}: {here}")
        check_tensors(self, tensors, like, str(path))
        names = iter([name for name, _ in like.named_tensors()])
        return like.map(lambda t: tensors[next(names)].to(t.dtype))


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _what(layer: nn.Module) -> str:
    """A layer in words, to tell whose state a file holds: its kind, and the rules of its memories."""
    rules = sorted({repr(m.rule) for m in layer.modules() if hasattr(m, "rule")})
    hierarchies = [repr(m.hierarchy) for m in layer.modules() if hasattr(m, "hierarchy")]
    return f"{type(layer).__name__}({'; '.join(rules + hierarchies)})"


def _parts(what: str) -> list[str]:
    """The kind of a layer and the parts of its rules, of what ``_what`` says of it."""
    parts, depth = [""], 0
    for sign in what:
        before, depth = depth, depth + (sign == "(") - (sign == ")")
        if max(before, depth) <= 2 and sign in "(),;":  # within a rule, and not within one of its parts
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _fits(got: torch.Size, fresh: torch.Size, grows: bool) -> bool:
    """Whether a state can have a tensor of this shape where a fresh one has ``fresh``, both without the batch. What
    grows with what is read is longer in one dimension behind the first, the heads."""
    if not grows or not fresh:
        return got == fresh
    longer = [a - b for a, b in zip(got, fresh, strict=True)]
    return longer[0] == 0 and min(longer) >= 0 and sum(map(bool, longer)) <= 1


def check_tensors(layer: nn.Module, tensors: dict[str, Tensor], like: State, where: str) -> None:
    """Raise ValueError unless names and shapes are those of ``like``, whatever the batch, the precision and, where a
    state grows with what is read, its length."""
    expected = dict(like.named_tensors())
    if missing := [name for name in expected if name not in tensors]:
        raise ValueError(f"{where} lacks {', '.join(missing)}: it is of another layer than this {type(layer).__name__}")
    if extra := [name for name in tensors if name not in expected]:
        raise ValueError(f"{where} has {', '.join(extra)}, which this {type(layer).__name__} has not")
    grows = any(m.grows for m in layer.modules() if isinstance(m, Stateful))
    for name, t in expected.items():
        got = tensors[name]
        kind = got.is_floating_point() == t.is_floating_point()
        same = got.dim() == t.dim() and kind and _fits(got.shape[1:], t.shape[1:], grows)
        if not same:
            raise ValueError(
                f"{where} has {name} {list(got.shape)} of {got.dtype}, and this layer's is [batch, "
                f"{', '.join(map(str, t.shape[1:]))}] of {t.dtype}"
            )
    if len({t.shape[0] for t in tensors.values()}) > 1:
        raise ValueError(f"{where} has tensors of different batches")
    check_numbers(tensors.items(), where)
