"""Names of a package that are imported when they are first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """``__getattr__`` of a package: of each name the module that has it. It raises AttributeError for any other name,
    and ModuleNotFoundError, with what installs it, where transformers is needed and missing."""

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
