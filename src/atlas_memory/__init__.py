"""atlas-memory: memories that learn while they read, after ATLAS (arXiv 2505.23735), as values, layers and models.

``NeuralMemory`` is the layer, ``OmegaMemory`` the bare memory over q, k, v, ``AtlasForCausalLM`` the language model;
``RULES`` names what a memory may be. Importing the package registers the models with transformers' Auto classes.
"""

from .layers.memory import NeuralMemory as NeuralMemory
from .layers.omega import OmegaMemory as OmegaMemory
from .layers.omega import set_execution as set_execution
from .memory import RULES as RULES
from .memory import PolynomialFeatures as PolynomialFeatures
from .memory import Rule as Rule
from .memory import compile_options as compile_options
from .models import AtlasConfig as AtlasConfig
from .models import AtlasForCausalLM as AtlasForCausalLM
from .models import AtlasModel as AtlasModel

__version__ = "0.1.0"
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
