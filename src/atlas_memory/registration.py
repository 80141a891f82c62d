"""The models in transformers' Auto classes, without importing transformers where it is not used.

It takes seconds to import, and a layer does not need it. So ``AtlasConfig`` registers itself when there is an
``AutoConfig``: at once if transformers has been imported, else right after the module of ``AutoConfig`` has been. The
first ``AtlasConfig`` that is made then registers the models (configuration.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO = "transformers.models.auto.configuration_auto"
"""The module of ``AutoConfig``."""

AUTO_FILE = "modeling_atlas_memory.py"
AUTO_CODE = '''"""For `from_pretrained(..., trust_remote_code=True)`: the model's code is the package atlas-memory."""

from atlas_memory import AtlasConfig, AtlasForCausalLM, AtlasModel

__all__ = ["AtlasConfig", "AtlasForCausalLM", "AtlasModel"]
'''
"""What every saved folder has, so that it can be opened without ``import atlas_memory``; where the package is missing,
transformers says to install it."""
AUTO_MAP = {
    "AutoConfig": "modeling_atlas_memory.AtlasConfig",
    "AutoModel": "modeling_atlas_memory.AtlasModel",
    "AutoModelForCausalLM": "modeling_atlas_memory.AtlasForCausalLM",
}
"""Of each Auto class, what that file has for it."""


def register_with_auto_classes() -> None:
    """Now, or when there are any."""
    if AUTO in sys.modules:
        _register()
    elif not any(isinstance(finder, _Afterwards) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Afterwards())


def _register() -> None:
    """With a transformers that is too old for the models, layers are used without them."""
    try:
        from .models import configuration  # noqa: F401
    except ImportError as error:
        warnings.warn(f"the models of atlas_memory need transformers 5.17 or newer: {error}", stacklevel=2)


class _Afterwards(MetaPathFinder):
    """Finds ``AUTO`` as it would be found, with a loader that imports ours at the end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register()
