"""``gram_polynomial`` through eigenvalues: G = U diag(g) U^T, Q = U diag(p(g)) U^T, with p the polynomial to which the
iterations of Newton-Schulz multiply (orthogonal.py).

With five iterations, Q takes 17 matrix products and its gradient 25. One eigendecomposition takes as long as 9 products
(256 rows) to 16 (32 rows); Q is then one product more, and the gradient four, dL/dG = U (F * (U^T dL/dQ U)) U^T with
the divided differences F_ij = (p(g_i) - p(g_j)) / (g_i - g_j), p'(g_i) where the two are equal (Daleckii and Krein). F
comes from the iteration itself by the product rule for divided differences, without a division, and so is exact for
eigenvalues however close. For the backward pass two matrices, G and U, are kept in place of thirteen.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SIZE = 32
"""From so many rows on eigenvalues are faster."""

MOST_THREADS = 2
"""Up to so many threads eigenvalues are faster: those of a batch are found one matrix after another, while products of
a batch are computed in all threads at once."""


def eigenvalues_pay(matrix: Tensor) -> bool:
    """Whether eigenvalues are the faster way to the polynomial of symmetric matrices of ``matrix``'s rows, dtype and
    device: on one or two cores, in float64. Products are faster in float32, on a GPU and inside a compiler's graph."""
    return (
        matrix.device.type == "cpu"
        and matrix.dtype == torch.float64
        and matrix.shape[-2] >= LEAST_SIZE
        and not torch.compiler.is_compiling()
        and torch.get_num_threads() <= MOST_THREADS
    )


def eigenvalues_cost(m: int) -> int:
    """As how many multiply-adds an eigendecomposition counts: those of products that take as long, forward and
    backward, fitted to times of m = 32 to 256 rows on one thread. To choose by, not a count of what runs."""
    return 6 * m**3 + 256 * m**2


def by_eigenvalues(gram: Tensor, steps: int, coefficients: tuple[float, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Q, U and g of symmetric ``gram`` ``[n, m, m]``, all of whose eigenvalues are at most 1; NaN where it has any."""
    a, b, c = coefficients
    finite = gram.isfinite().all(-1).all(-1)[:, None]
    g, u = torch.linalg.eigh(torch.where(finite[..., None], gram, 0.0))  # LAPACK raises on NaN
    g = torch.where(finite, g, torch.nan)
    q, power = torch.ones_like(g), g
    for _ in range(steps):
        z = a + b * power + c * power.square()
        q, power = z * q, power * z.square()
    return (u * q[:, None, :]) @ u.mT, u, g


def gradient_by_eigenvalues(
    to_q: Tensor, u: Tensor, g: Tensor, steps: int, coefficients: tuple[float, float, float]
) -> Tensor:
    """The symmetric dL/dG ``[n, m, m]`` from dL/dQ."""
    inner = u.mT @ (to_q + to_q.mT) @ u
    return u @ inner.mul_(_divided_differences(g, steps, coefficients)).mul_(0.5) @ u.mT


def _divided_differences(g: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """F ``[n, m, m]``, the divided differences of p at g. Those of a product are (u v)_ij = u_ij v_j + u_i v_ij."""
    a, b, c = coefficients
    of_power, of_q = None, None  # the divided differences of the power, 1 at first, and of Q, 0 at first
    power, q = g, torch.ones_like(g)
    for step in range(steps):
        z = a + b * power + c * power.square()
        of_z = c * (power[:, :, None] + power[:, None, :]) + b
        if of_power is not None:
            of_z *= of_power
        of_next = of_z * q[:, None, :]
        if of_q is not None:
            of_next.addcmul_(z[:, :, None], of_q)
        if step + 1 < steps:  # power' = power z^2
            squared = z.square()
            of_z *= z[:, :, None] + z[:, None, :]
            of_z *= power[:, :, None]
            of_power = of_z + squared[:, None, :] if of_power is None else of_z.addcmul_(of_power, squared[:, None, :])
            power = power * squared
        q, of_q = z * q, of_next
    assert of_q is not None
    return of_q
