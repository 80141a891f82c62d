"""The inner problem: a memory trained while the model reads. Plain PyTorch, one file an idea.

    min over M of   sum_{i=t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)  +  retention(M, M_{t-1})

features.py        phi                          rules.py         a rule = one choice on each axis; the table RULES
networks.py        M                            gates.py         alpha, eta, theta, gamma
bias.py            the inner loss               state.py         what is carried between calls
retention.py       alpha                        recurrent.py     the definition, token by token; and decoding
optimisers.py      the inner step               chunkwise.py     the fast form, equal to it
newton_schulz.py   O in Muon                    fast_weight.py   its primitive: one matrix over one chunk
windows.py         c, b, gamma's band

Letters (ATLAS's): alpha retention (1 keeps), eta step size, theta momentum decay, gamma window gates, c window,
b chunk, M_0 initial memory, S momentum. Titans calls the momentum decay eta and the step
theta, and its alpha is 1 - ours.
"""

from .bias import L2, AttentionalBias, DotProduct
from .chunkwise import chunkwise
from .features import FeatureMap, Identity, Polynomial, PolynomialFeatures, l2_normalise
from .gates import Gates
from .networks import MLP, GatedMLP, Linear, Network
from .newton_schulz import gram_polynomial, newton_schulz
from .optimisers import GradientDescent, Momentum, Muon, Optimiser
from .recurrent import incremental, recurrent
from .retention import Decay, Keep, Retention
from .rules import RULES, Params, Rule, resolve_rule
from .state import MemoryState, initial_state
from .windows import Window

__all__ = [
    "L2",
    "MLP",
    "RULES",
    "AttentionalBias",
    "Decay",
    "DotProduct",
    "FeatureMap",
    "GatedMLP",
    "Gates",
    "GradientDescent",
    "Identity",
    "Keep",
    "Linear",
    "MemoryState",
    "Momentum",
    "Muon",
    "Network",
    "Optimiser",
    "Params",
    "Polynomial",
    "PolynomialFeatures",
    "Retention",
    "Rule",
    "Window",
    "chunkwise",
    "gram_polynomial",
    "incremental",
    "initial_state",
    "l2_normalise",
    "newton_schulz",
    "recurrent",
    "resolve_rule",
]
