"""The inner problem: a memory trained while the model reads. Plain PyTorch, one file an idea.

    min over M of   sum_{i=t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)  +  retention(M, M_{t-1})

features.py        phi                          rules.py         a rule = one choice on each axis; the table RULES
networks.py        M                            gates.py         alpha, eta, theta, gamma
bias.py            the inner loss               state.py         what is carried between calls
retention.py       alpha                        recurrent.py     the definition, token by token; and decoding
optimisers.py      the inner step               chunkwise.py     the fast form, equal to it
newton_schulz.py   O in Muon                    chunk.py         one chunk of it
windows.py         c, b, gamma's band           fast_weight.py   its primitive: one matrix over one chunk
live.py            errors that see the chunk    schedules.py     its scalars
precision.py       float32 or float64           muon_steps.py    that of Muon
horizon.py         S, a sum over few tokens     compiling.py     the options of torch.compile
gram_eigenvalues.py    O of symmetric matrices by eigenvalues

Letters (ATLAS's): alpha retention (1 keeps), eta step size, theta momentum decay, gamma window gates, c window,
b chunk, M_0 initial memory, S momentum. Titans calls the momentum decay eta and the step
theta, and its alpha is 1 - ours.
"""

from .bias import L2, AttentionalBias, DotProduct, Huber, Lp, RobustL2
from .chunkwise import chunkwise
from .compiling import compile_options
from .features import Exponential, FeatureMap, Identity, Polynomial, PolynomialFeatures, l2_normalise
from .gates import Gates
from .networks import MLP, GatedMLP, Linear, Network
from .newton_schulz import gram_polynomial, newton_schulz
from .optimisers import DeltaGradientDescent, GradientDescent, Momentum, Muon, Optimiser
from .recurrent import incremental, recurrent, retrieve
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
