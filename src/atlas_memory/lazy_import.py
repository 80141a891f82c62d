"""Lazy import of the public names of a package."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a package that imports each name from its module; without transformers the error says what
    installs it."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name], package), name)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ModuleNotFoundError(
                f"{name} needs transformers, which is not installed: pip install 'atlas-memory[train]'", name=error.name
            ) from error

    return get
