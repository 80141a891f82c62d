"""What is computed: a memory trained while the model reads. Plain PyTorch, one file an idea; nothing here is for speed.

    min over M of   sum_{i=t-c+1..t} gamma_i^(t) bias(M(phi(k_i)), v_i)  +  retention(M, M_{t-1})

    recurrent.py      the loop over tokens        rule.py           a rule = one choice on each axis; the table RULES
    features.py        phi                         networks.py        M;  networks.py: sigma and its slope
    bias.py            the inner loss              retention.py       what alpha keeps
    step.py            the inner step, bounded     optimisers.py      its kinds;  orthogonal.py: O in Muon
    window.py         c and b                     gate_projection.py           alpha, eta, theta, gamma, delta
    recurrent.py       the definition, any batch   state.py           what is carried between calls
    initialisation.py           how M_0 begins              norms.py           the layer norm at the end of M
    precision.py       what every form checks, and in which precision it works
    contracts/         what a choice must give     autograd.py, features.py, validation.py   small helpers

Letters (ATLAS's): k, v, q keys, values and queries, phi the feature map, M the memory and W a matrix of it, M_0 the
memory before the first token, M_f the frozen memory, at which gradients are taken, S momentum, c window, b chunk. The
gates: alpha retention (1 keeps), eta step size, theta momentum decay, gamma window gates, delta a threshold of the
bias. phi*, the infinite features of ``Exponential``, are known by their kernel only. Titans calls the momentum decay
eta and the step theta, and its alpha is 1 - ours. docs/notation.md has all letters. The public names are in
``atlas_memory.memory``.
"""
