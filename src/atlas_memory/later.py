"""Names of a package that are imported when they are first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a package: names, and the module of it that has each.

    The function raises AttributeError for any other name, and ModuleNotFoundError, with what installs it, where
    transformers is needed and missing.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(where[name], package), name)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ModuleNotFoundError(
                f"{name} needs transformers, which is not installed: pip install 'atlas-memory[train]'", name=error.name
            ) from error

    return get
