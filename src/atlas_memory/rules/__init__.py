"""What a memory computes, in plain PyTorch: a file for each axis of a rule, and the table of rules.

    min over M of   sum_{i=t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)  +  retention(M, M_{t-1})

    features.py    phi                       bias.py         the inner loss
    networks.py    M                         retention.py    what alpha keeps
    step.py        the inner step            optimisers.py   its kinds; orthogonal.py: Newton-Schulz
    rule.py        Window (c and b), Rule, RULES
    gates.py       alpha, eta, theta, gamma, delta           state.py   what calls hand on; initialisation.py: M_0

Letters are ATLAS's (docs/explanation/notation.md). Gates: alpha retention (1 keeps), eta step size, theta momentum
decay, gamma window gates, delta a threshold of the bias. Titans calls the momentum decay eta and the step theta, and
its alpha is 1 - ours. phi* are the infinitely many features of ``Exponential``. The public names are in
``atlas_memory.memory``."""

DEFAULT_RULE = "gated-deltanet"
"""One of the cheapest. Forward and backward of ``NeuralMemory(128, 8, rule)`` over 2 x 256 tokens take one core 0.02 s
with it, 0.12 with ``titans``, 0.28 with ``omeganet`` and 28 with ``atlas`` (Intel Xeon, 2026-11-29)."""
