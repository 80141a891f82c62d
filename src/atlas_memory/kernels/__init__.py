"""Triton kernels for CUDA: the same functions as in ``memory``, never required, and off
until asked for (dispatch.py).

    dispatch.py               which calls take a kernel: pure functions of device, dtype, shapes and rule
    gram_newton_schulz.py     Q with NS(S) = Q S from Gram matrices, all iterations on chip
    chunk.py                  the chunk recurrence of gradient descent over a whole sequence, with its backward pass
    chunk_forward.py, chunk_backward.py, chunk_parts.py     its kernels, and the equations

``memory`` asks ``dispatch`` and imports a kernel only then, so that Triton may be absent.
"""
