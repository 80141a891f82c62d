"""The inner problem, a memory that is trained while the model reads: all public names of ``mathematics``, which says
what is computed, and of ``forms``, which compute it fast."""

from .ops.chunkwise import chunkwise
from .ops.compiling import compile_options
from .ops.fused_recurrent import fused_recurrent, retrieve
from .ops.muon_space import MuonSpace
from .ops.newton_schulz import gram_polynomial, newton_schulz
from .ops.recurrent import recurrent
from .rules.bias import L2, AttentionalBias, Bias, DotProduct, Huber, Lp, RobustL2
from .rules.features import (
    Exponential,
    FeatureMap,
    Features,
    Identity,
    Polynomial,
    PolynomialFeatures,
    l2_normalise,
)
from .rules.gates import Gates
from .rules.networks import MLP, GatedMLP, Linear, Network
from .rules.optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon, Optimiser
from .rules.retention import (
    Decay,
    ElasticNet,
    FDivergence,
    Keep,
    LinearRetention,
    LqNorm,
    NewMatrix,
    NonLinearRetention,
    OldMatrix,
    Retention,
    RowNorm,
    Sigmoid,
    Softmax,
)
from .rules.rule import KINDS, RULES, Params, Rule, Window, resolve_rule
from .rules.state import MemoryState, State, initial_state
from .rules.step import InnerOptimiser

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
    "Linear",
    "LinearRetention",
    "Lp",
    "LqNorm",
    "MemoryState",
    "Momentum",
    "Muon",
    "MuonSpace",
    "Network",
    "NewMatrix",
    "NonLinearRetention",
    "OldMatrix",
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
    "State",
    "Window",
    "chunkwise",
    "compile_options",
    "fused_recurrent",
    "gram_polynomial",
    "initial_state",
    "l2_normalise",
    "newton_schulz",
    "recurrent",
    "resolve_rule",
    "retrieve",
]
