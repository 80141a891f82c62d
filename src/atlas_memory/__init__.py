"""Memories that learn while they read, after ATLAS (arXiv 2505.23735).

``NeuralMemory`` is the layer, ``OmegaMemory`` the memory over q, k, v, ``AtlasForCausalLM`` the language model and
``RULES`` the learning rules. Importing the package registers the models with transformers, where that is installed.
"""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .lazy_import import lazy_getattr

if TYPE_CHECKING:
    from .layers.neural_memory import NeuralMemory as NeuralMemory
    from .layers.omega_memory import OmegaMemory as OmegaMemory
    from .layers.omega_memory import set_execution as set_execution
    from .memory import RULES as RULES
    from .memory import PolynomialFeatures as PolynomialFeatures
    from .memory import Rule as Rule
    from .memory import compile_options as compile_options
    from .models import AtlasConfig as AtlasConfig
    from .models import AtlasForCausalLM as AtlasForCausalLM
    from .models import AtlasModel as AtlasModel

__version__ = "0.1.0"

_MODULES = {
    "RULES": ".memory",
    "AtlasConfig": ".models",
    "AtlasForCausalLM": ".models",
    "AtlasModel": ".models",
    "NeuralMemory": ".layers.neural_memory",
    "OmegaMemory": ".layers.omega_memory",
    "PolynomialFeatures": ".memory",
    "Rule": ".memory",
    "compile_options": ".memory",
    "set_execution": ".layers.omega_memory",
}
__all__ = list(_MODULES)
__getattr__ = lazy_getattr(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])


def _is_command() -> bool:
    """Whether this process is `atlas`, whose `--help` must not wait for imports."""
    program = sys.argv[0] if sys.argv else ""
    return Path(program).name in ("atlas", "atlas.exe") or (program == "-m" and __name__ in sys.orig_argv)


if find_spec("transformers") and not _is_command():
    try:
        import_module(".models.configuration", __name__)
    except ImportError as error:  # of a transformers that is too old
        warnings.warn(f"the models of atlas_memory need transformers 5.17 or newer: {error}", stacklevel=2)
