"""The inner problem: a memory trained while the model reads. Plain PyTorch, one file an idea.

    min over M of   sum_{i=t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)  +  retention(M, M_{t-1})

The mathematics:
    definition.py      the loop over tokens        rules.py           a rule = one choice on each axis; the table RULES
    features.py        phi                         networks.py        M
    bias.py            the inner loss              retention.py       what alpha keeps
    optimisers.py      the inner step              orthogonal.py      O in Muon
    windows.py         c, b, gamma's band          gates.py           alpha, eta, theta, gamma
    recurrent.py       the definition, any batch   state.py           what is carried between calls

The forms, equal to it:
    chunkwise.py       chunk after chunk           incremental.py     token by token, for decoding
    chunk.py           one chunk                   fast_weight.py     its primitive: one matrix over one chunk
    live.py            errors that see the chunk   schedules.py       its scalars
    muon_steps.py      the primitive of Muon       horizon.py         S, a sum over few tokens
    fast_newton_schulz.py, gram_eigenvalues.py     O, by Gram matrices and by eigenvalues
    precision.py       float32 or float64          compiling.py       the options of torch.compile

Letters (ATLAS's): alpha retention (1 keeps), eta step size, theta momentum decay, gamma window gates, c window,
b chunk, M_0 initial memory, S momentum. Titans calls the momentum decay eta and the step
theta, and its alpha is 1 - ours.
"""

from .bias import L2, AttentionalBias, DotProduct, Huber, Lp, RobustL2
from .chunkwise import chunkwise
from .compiling import compile_options
from .fast_newton_schulz import gram_polynomial, newton_schulz
from .features import Exponential, FeatureMap, Identity, Polynomial, PolynomialFeatures, l2_normalise
from .gates import Gates
from .incremental import incremental, retrieve
from .networks import MLP, GatedMLP, Linear, Network
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon, Optimiser
from .recurrent import recurrent
from .retention import Decay, ElasticNet, FDivergence, Keep, LqNorm, Retention, RowNorm, Sigmoid, Softmax
from .rules import KINDS, RULES, Params, Rule, resolve_rule
from .state import MemoryState, initial_state
from .windows import Window

__all__ = [
    "KINDS",
    "L2",
    "MLP",
    "RULES",
    "AttentionalBias",
    "Decay",
    "DeltaGradientDescent",
    "DotProduct",
    "ElasticNet",
    "Exponential",
    "FDivergence",
    "FeatureMap",
    "GatedMLP",
    "Gates",
    "GradientDescent",
    "Huber",
    "Identity",
    "Keep",
    "Linear",
    "Lp",
    "LqNorm",
    "MemoryState",
    "Momentum",
    "Muon",
    "Network",
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
