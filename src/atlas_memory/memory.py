"""Memories that are trained while the model reads: the public names of ``rules`` and ``ops``."""

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
from .rules.gates import Gates, rows
from .rules.networks import MLP, ForwardCache, GatedMLP, Linear, Network, NetworkBase
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
from .rules.step import InnerOptimiser, TokenGates

__all__ = [name for name in globals() if not name.startswith("_")]
