"""Triton kernels for CUDA: the same functions as in ``memory``, never required.

    kernel_support.py         which calls take a kernel, and which only when asked: functions of device, dtype, shapes
                              and rule
    kernel_check.py                  the check that a kernel must pass before it is taken by default
    delta_rule.py                  the delta rule over a whole sequence, with its backward pass
    delta_forward.py, delta_backward.py, delta_common.py     its kernels, and the equations
    conv_kernel.py            the short convolution of q, k and v
    gram_newton_schulz.py     Q with NS(S) = Q S from Gram matrices, all iterations on chip

``memory`` asks ``dispatch`` and imports a kernel only then, so that Triton may be absent.
"""
