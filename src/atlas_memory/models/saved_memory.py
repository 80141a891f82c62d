"""What a model has read: a value of constant size that is saved, handed on, read on from and asked."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .. import __version__
from ..layers.stateful import check_tensors
from ..rules.state import MAX_TOKENS, State
from .cache import AtlasCache
from .configuration import AtlasConfig
from .layer_facts import LayerFacts

FORMAT = 1
METADATA = "atlas-memory"  # one entry: the order of several is another in each file


@dataclass(frozen=True)
class ReadText:
    """A text that was read: its name, the bytes of it that were read, their SHA-256, and whether that was all of it."""

    name: str
    bytes: int
    sha256: str
    whole: bool = True


@dataclass(frozen=True)
class Memory:
    """What a model has read. A value: reading on gives another one, and this one stays as it is.

    ``model.read`` makes it, ``model.generate(..., memory=...)`` answers from it.

    Attributes:
        states: Of each block, of one row; None before the first token.
        last_token: The token read last. The states have not seen it: it is given to the model with what comes next.
        tokens: How many were read, `last_token` included; but not the end-of-text token with which every memory begins.
        texts: What was read.
        model: Of which model it is: `name`, `block`, `rule`, hashes of `config` and `weights`, and the `library`.
        layers: Its memories.
    """

    states: tuple[State | None, ...]
    last_token: int
    tokens: int
    texts: tuple[ReadText, ...]
    model: dict[str, str]
    layers: tuple[LayerFacts, ...] = ()

    @classmethod
    def empty(cls, model: Any) -> Memory:
        """The memory of a model that has read the end-of-text token alone, with which every text begins. ValueError if
        its configuration names none."""
        end = model.config.eos_token_id
        if not isinstance(end, int):
            raise ValueError(
                f"config.eos_token_id={end!r}: give the model an end-of-text token, with which texts begin"
            )
        return cls((None,) * model.config.num_hidden_layers, end, 0, (), identity(model))

    @property
    def nbytes(self) -> int:
        """Bytes of the states, which do not grow with what is read unless the rule's state does."""
        return sum(state.nbytes for state in self.states if state is not None)

    def cache(self) -> AtlasCache:
        """The states as a cache of one row, whose columns are those that are read from now on."""
        cache = AtlasCache(len(self.states))
        for layer, state in zip(cache.blocks, self.states, strict=True):
            if state is not None:
                layer.restore(state, 0)
        return cache

    def check_model(self, model: Any, where: str = "the memory") -> None:
        """ValueError, by name, unless it is of this model."""
        own = identity(model)
        for what in ("block", "rule", "config", "weights"):
            if self.model.get(what) != own[what]:
                shown = f"{what} {self.model.get(what)!r}, and this one has {own[what]!r}"
                if what in ("config", "weights"):
                    shown = "another configuration" if what == "config" else "other weights"
                raise ValueError(
                    f"{where} is of another model than {own['name']!r}: it was read by {self.model.get('name')!r}, "
                    f"which has {shown}"
                )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all. OSError where that is not possible; ValueError for states with
        numbers that are not finite."""
        tensors = {
            f"{i}.{name}": t.detach().cpu().clone().contiguous()
            for i, state in enumerate(self.states)
            if state is not None
            for name, t in state.named_tensors()
        }
        for name, t in tensors.items():
            if t.is_floating_point() and not t.isfinite().all():
                raise ValueError(f"the memory has numbers in {name} that are not finite, and is not saved")
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "states"}
        about |= {"texts": [asdict(t) for t in self.texts], "layers": [asdict(layer) for layer in self.layers]}
        written = json.dumps(about, sort_keys=True)
        described = json.dumps({"format": FORMAT, "sha256": _digest(written, tensors), "about": written})
        _write(Path(path), save(tensors, metadata={METADATA: described}))

    @classmethod
    @torch.no_grad()
    def load(cls, path: str | Path, model: Any) -> Memory:
        """Read what `save` wrote, for the model that has read it, onto its device.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no memory, damaged, or of another model.
        """
        about, tensors = read_memory_file(path)
        states: list[State | None] = [None] * model.config.num_hidden_layers
        memory = cls(tuple(states), **about)
        memory.check_model(model, str(path))
        for i, block in enumerate(model.model.layers if tensors else ()):
            begins = f"{i}."
            own = {name[len(begins) :]: t for name, t in tensors.items() if name.startswith(begins)}
            like = block.mixer.initial_state()
            check_tensors(block.mixer, own, like, str(path))
            names = iter([name for name, _ in like.named_tensors()])
            states[i] = like.map(lambda t, own=own, names=names: own[next(names)].to(t.device, t.dtype))
        return cls(tuple(states), **about)


def read_memory_file(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The attributes of a saved `Memory` but its states, and its tensors. Raises as `Memory.load`."""
    if not Path(path).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"there is no memory at {str(path)!r}")
    data = Path(path).read_bytes()  # not safe_open, of whose tensors a kilobyte a file is never freed (safetensors 0.8)
    try:
        # Copied: what lies in a file begins anywhere, and products of it differ in the last bit.
        tensors = {name: t.clone() for name, t in load(data).items()}
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, TypeError, RuntimeError) as error:  # the last two of sizes that no tensor has
        reason = str(error).splitlines()[0]
        raise ValueError(f"{str(path)!r} is no memory, or was cut short: {reason}") from error
    if METADATA not in metadata:
        raise ValueError(f"{str(path)!r} holds tensors, but no memory: `atlas read` and Memory.save write them")
    try:
        described = json.loads(metadata[METADATA])
        if described["format"] != FORMAT:
            raise ValueError(f"it was written by another version of atlas-memory than {__version__}")
        if described["sha256"] != _digest(described["about"], tensors):
            raise ValueError("its contents do not have the checksum that was saved with them")
        about = json.loads(described["about"])
        found: dict[str, Any] = {
            "last_token": _count(about["last_token"]),
            "tokens": _count(about["tokens"]),
            "texts": tuple(ReadText(**text | {"bytes": _count(text["bytes"])}) for text in about["texts"]),
            "model": {str(name): str(value) for name, value in about["model"].items()},
            "layers": tuple(
                LayerFacts(**layer | {"half_life": layer["half_life"] and tuple(layer["half_life"])})
                for layer in about["layers"]
            ),
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from error
    return found, tensors


def identity(model: Any) -> dict[str, str]:
    """What `Memory.model` holds."""
    config = model.config
    options = {name: getattr(config, name) for name in AtlasConfig.__annotations__}
    return {
        "name": Path(config.name_or_path or type(model).__name__).name,  # a path tells of the machine
        "block": config.block,
        "rule": str(config.rule),
        "config": hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest(),
        "weights": weights_hash(model),
        "library": __version__,
    }


_hashes: WeakKeyDictionary[Any, tuple[Any, str]] = WeakKeyDictionary()


def weights_hash(model: Any) -> str:
    """SHA-256 of the model's weights, remembered until one of them changes."""
    weights = dict(sorted(model.state_dict(keep_vars=True).items()))
    versions = [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in weights.values()]
    known = _hashes.get(model)
    if known is None or known[0] != versions:
        known = _hashes[model] = versions, _digest("", {name: t.detach().cpu() for name, t in weights.items()})
    return known[1]


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a text and of named tensors."""
    found = hashlib.sha256(text.encode())
    for name, t in sorted(tensors.items()):
        found.update(f"\n{name} {t.dtype} {list(t.shape)}\n".encode())
        found.update(t.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{str(path)!r} could not be written: {reason}; make room, or choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{value!r} is no count")
    return value
