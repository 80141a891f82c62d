"""The inner problem, a memory that is trained while the model reads: all public names of ``mathematics``, which says
what is computed, and of ``forms``, which compute it fast."""

from .forms.chunkwise import chunkwise
from .forms.compiling import compile_options
from .forms.fast_newton_schulz import gram_polynomial, newton_schulz
from .forms.incremental import incremental, retrieve
from .forms.spaces import Spaces
from .mathematics.bias import L2, AttentionalBias, Bias, DotProduct, Huber, Lp, RobustL2
from .mathematics.features import (
    Exponential,
    FeatureMap,
    Features,
    Identity,
    Polynomial,
    PolynomialFeatures,
    l2_normalise,
)
from .mathematics.gates import Gates
from .mathematics.kinds import KINDS
from .mathematics.networks import MLP, GatedMLP, Linear, Network
from .mathematics.optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon, Optimiser
from .mathematics.recurrent import recurrent
from .mathematics.retention import (
    Decay,
    ElasticNet,
    FDivergence,
    Keep,
    Kept,
    LinearRetention,
    LqNorm,
    NonLinearRetention,
    Old,
    Retention,
    RowNorm,
    Sigmoid,
    Softmax,
)
from .mathematics.rules import RULES, Params, Rule, resolve_rule
from .mathematics.state import MemoryState, State, initial_state
from .mathematics.step import InnerOptimiser
from .mathematics.windows import Window

__all__ = [
    "KINDS",
    "L2",
    "MLP",
    "RULES",
    "AttentionalBias",
    "Bias",
    "Decay",
    "DeltaGradientDescent",
    "DotProduct",
    "ElasticNet",
    "Exponential",
    "FDivergence",
    "FeatureMap",
    "Features",
    "GatedMLP",
    "Gates",
    "GradientDescent",
    "Huber",
    "Identity",
    "InnerOptimiser",
    "Keep",
    "Kept",
    "Linear",
    "LinearRetention",
    "Lp",
    "LqNorm",
    "MemoryState",
    "Momentum",
    "Muon",
    "Network",
    "NonLinearRetention",
    "Old",
    "Optimiser",
    "Params",
    "Polynomial",
    "PolynomialFeatures",
    "Retention",
    "RobustL2",
    "RowNorm",
    "Rule",
    "Sigmoid",
    "Softmax",
    "Spaces",
    "State",
    "Window",
    "chunkwise",
    "compile_options",
    "gram_polynomial",
    "incremental",
    "initial_state",
    "l2_normalise",
    "newton_schulz",
    "recurrent",
    "resolve_rule",
    "retrieve",
]
