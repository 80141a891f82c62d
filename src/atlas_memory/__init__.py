"""atlas-memory: memories that learn while they read, after ATLAS (arXiv 2505.23735), as values, layers and models.

``NeuralMemory`` is the layer, ``OmegaMemory`` the bare memory over q, k, v, ``AtlasForCausalLM`` the language model;
``RULES`` names what a memory may be. Each is imported when it is first asked for, so that ``atlas --help`` need not
wait for torch, nor a layer for transformers. Importing the package is enough for transformers' Auto classes to know
the models.
"""

from typing import TYPE_CHECKING

from .later import later
from .registration import register_with_auto_classes

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

_WHERE = {
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
__all__ = [
    "RULES",
    "AtlasConfig",
    "AtlasForCausalLM",
    "AtlasModel",
    "NeuralMemory",
    "OmegaMemory",
    "PolynomialFeatures",
    "Rule",
    "compile_options",
    "set_execution",
]


__getattr__ = later(__name__, _WHERE)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


register_with_auto_classes()
