"""Newton-Schulz (orthogonal.py), fast: the same functions, from S or from its Gram matrix.

``newton_schulz`` and ``saturated`` are given S itself. ``gram_polynomial`` is given the Gram matrix G = S S^T and
returns Q with NS(S) = Q S. S need then never be formed, since G and what S and Q S answer can be had through kernels
(muon_steps.py). ``steps`` are the iterations everywhere in this file; COEFFICIENTS and CONVERGENT are a, b, c of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..rules.autograd import Function, call, without_autocast
from ..rules.orthogonal import COEFFICIENTS, CONVERGENT, reciprocal_or_zero
from ..rules.validation import check_size
from .gram_eigenvalues import by_eigenvalues, eigenvalues_pay, gradient_by_eigenvalues
from .triton import kernel_support

Coefficients = tuple[float, float, float]


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise ``matrix`` ``[..., rows, columns]``; same shape and dtype. ``schulz_cost`` has its multiply-adds.

    Where one side is more than twice the other, most iterations need no product with the long side: two are made on the
    Gram matrix of X, then X is brought up to date and a new Gram matrix made of it, on which come at most three more,
    and so on.

    Raises:
        ValueError: ``steps`` below 1.
    """
    check_size("steps", steps)
    scale = matrix.detach().abs().amax((-2, -1), keepdim=True)
    x = matrix * reciprocal_or_zero(scale)
    # After the scaling |x|_F >= 1 unless the matrix is zero; the clamp only keeps zero at zero.
    x = x * x.square().sum((-2, -1), keepdim=True).clamp_min(0.25).rsqrt()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = _in_blocks(partial(_orthogonalise, steps=steps), x.reshape(-1, *x.shape[-2:]))
    x = x.mT if tall else x
    return x.reshape(matrix.shape)


def saturated(matrix: Tensor, steps: int = 5) -> Tensor:
    """``saturate`` of ``matrix`` ``[..., rows, columns]``, by the Gram matrix of its shorter side."""
    size = matrix.detach().abs().amax((-2, -1), keepdim=True).clamp_min(1.0)
    x, tall = matrix / size, matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x
    moved = gram_polynomial(x @ x.mT, steps, floor=size.square().reciprocal()) @ x
    return moved.mT if tall else moved


def gram_polynomial(
    gram: Tensor,
    steps: int = 5,
    floor: Tensor | None = None,
    eigenvalues: bool | None = None,
    kernels: bool | None = None,
) -> Tensor:
    """Q with NS(S) = Q S, from ``gram`` = S S^T ``[..., m, m]``, symmetric; same shape and dtype. (4 steps - 3) m^3
    multiply-adds. The gradient is symmetric, too.

    The caller scales S so that the trace of ``gram`` neither over- nor underflows. A Gram matrix squares the condition
    number, and Newton-Schulz amplifies small directions: give it float64 where the result must hold to float32. A new
    Gram matrix between iterations, as ``newton_schulz`` makes one, would not help here. It mends rounding errors only
    if it is made of an X, whose condition number is the root of the Gram matrix's. S is never formed here, and Q G Q^T
    has the errors of the G with which it began.

    On one or two cores float64 is computed by eigenvalues (gram_eigenvalues.py; ``eigenvalues``: always or never), and
    on a GPU a Triton kernel may be taken (``kernels``, as for ``chunkwise``).

    With ``floor`` ``[..., 1, 1]``, f > 0, Q S is (S S^T + f I)^(-1/2) S, which for f = 1 is ``saturate``. The iteration
    then runs on (G + f I) / (tr G + f), with ``CONVERGENT`` coefficients.

    Raises:
        ValueError: ``steps`` below 1.
    """
    check_size("steps", steps)
    if kernels is None and gram.requires_grad and gram.shape[-1] > kernel_support.GRAM_TRAINED:
        kernels = False
    if kernel_support.taken(kernels, kernel_support.gram_refusal, gram.device.type, gram.dtype, gram.shape[-1]):
        from .triton.gram_newton_schulz import gram_newton_schulz

        return gram_newton_schulz(gram, steps, floor)
    cache = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    coefficients = COEFFICIENTS
    if floor is not None:
        cache, coefficients = cache + floor, CONVERGENT
        gram = gram + floor * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    tiny = torch.finfo(gram.dtype).tiny
    scale = torch.where(cache > tiny, cache.clamp_min(tiny).rsqrt(), 0.0)
    unit = (gram * reciprocal_or_zero(cache)).reshape(-1, *gram.shape[-2:])
    go = eigenvalues_pay(gram) if eigenvalues is None else eigenvalues
    function = partial(_by_eigenvalues if go else _symmetric_product, steps=steps, coefficients=coefficients)
    return scale * _in_blocks(function, unit).view(gram.shape)


CACHED = 2**18
"""Bytes of matrices that are computed together on a CPU, so that intermediate results stay in cache."""


def _in_blocks(function: Callable[[Tensor], Tensor], matrices: Tensor) -> Tensor:
    """``function`` of n independent matrices ``[n, rows, columns]``, called with a few at a time."""
    size = max(1, CACHED // max(1, matrices[0].numel() * matrices.element_size())) if len(matrices) else 1
    if len(matrices) <= size or matrices.device.type != "cpu" or torch.compiler.is_compiling():
        return function(matrices)
    return torch.cat([function(part) for part in matrices.split(size)])


def _orthogonalise(x: Tensor, steps: int) -> Tensor:
    """The iteration from X ``[n, short, long]`` on, each of norm 1."""
    for count in _between_restarts(x.shape[-2], x.shape[-1], steps):
        x = _symmetric_product(x @ x.mT, count, COEFFICIENTS) @ x if count > 1 else call(_Step, x)[0]
    return x


def _step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One iteration, a X + b G X + c G^2 X with G = X X^T; also G, and b G + c G^2, for the backward pass."""
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    return torch.baddbmm(x, z, x, beta=a), gram, z


class _Step(Function):
    """``_step``, with four products in the backward pass for autograd's six: Gram matrices are symmetric, and only the
    symmetric part of their gradient counts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _step(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, g: Tensor | None, *none: None) -> Tensor | None:
        if g is None:
            return None
        a, b, c = COEFFICIENTS
        x, gram, z = ctx.saved_tensors
        if _differentiable():
            return _pulled_back(lambda x: _step(x)[0], x, g)
        to_z = _twice_symmetric_part(g @ x.mT)
        to_gram = torch.baddbmm(to_z, to_z, gram, beta=0.5 * b, alpha=c)
        return torch.baddbmm(g, z, g, beta=a).baddbmm_(_twice_symmetric_part(to_gram), x)


def _product(gram: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """Q with X_steps = Q X_0, from X_0 X_0^T ``[n, m, m]``."""
    return _products(gram, steps, coefficients)[0]


def _products(gram: Tensor, steps: int, coefficients: Coefficients) -> tuple[Tensor, ...]:
    """Q; and for the backward pass, each a tensor an iteration: the Gram matrix X X^T before it (``power``); its factor
    Z = a I + b power + c power^2, with which X becomes Z X; and the Q after it, except after the first iteration, where
    Q is Z, and after the last."""
    a, b, c = coefficients
    diagonal = a * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    powers = [gram]
    factors: list[Tensor] = []
    products: list[Tensor] = []
    for step in range(steps):
        power = powers[-1]
        z = torch.add(diagonal, power, alpha=b).baddbmm_(power, power, alpha=c)
        factors.append(z)
        products.append(z @ products[-1] if products else z)
        if step + 1 < steps:
            powers.append(z @ power @ z)
    return products[-1], *powers, *factors, *products[1:-1]


def _symmetric_product(gram: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """``_product``, for symmetric matrices: with a faster backward pass."""
    if steps == 1:
        return _product(gram, steps, coefficients)
    return call(_SymmetricProduct, gram, steps, coefficients)[0]


class _SymmetricProduct(Function):
    """``_product`` of symmetric matrices. All powers, Z and Q are symmetric and commute, and only the symmetric part of
    a gradient counts: six products an iteration in the backward pass, where autograd has eight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, steps: int, coefficients: Coefficients) -> tuple[Tensor, ...]:
        q, _, *others = _products(gram, steps, coefficients)
        return q, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, Coefficients], output: tuple[Tensor, ...]) -> None:
        ctx.steps, ctx.coefficients = inputs[1:]
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, to_q: Tensor | None, *none: None) -> tuple[Tensor | None, None, None]:
        if to_q is None:
            return None, None, None
        _, b, c = ctx.coefficients
        steps, saved = ctx.steps, ctx.saved_tensors
        if _differentiable():
            return _pulled_back(lambda s: _product(s, steps, ctx.coefficients), saved[0], to_q), None, None
        powers, factors = saved[:steps], saved[steps : 2 * steps]
        products = factors[0], *saved[2 * steps :]
        to_power = torch.zeros((), dtype=to_q.dtype, device=to_q.device)
        for step in range(steps - 1, -1, -1):
            power, z, last = powers[step], factors[step], step + 1 == steps
            to_z = to_q @ products[step - 1] if step > 0 else to_q
            to_q = z @ to_q if step > 0 else to_q
            # The next power is z power z. Gradients to z and to powers are kept as twice their symmetric part, and
            # halved where they are used.
            through = to_power if last else to_power @ z
            to_z = _twice_symmetric_part(to_z if last else torch.baddbmm(to_z, through, power))
            to_power = torch.baddbmm(to_z, to_z, power, beta=0.5 * b, alpha=c)
            to_power = _twice_symmetric_part(to_power if last else to_power.baddbmm_(z, through, alpha=0.5))
        return 0.5 * to_power, None, None


def _by_eigenvalues(gram: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    return call(_ByEigenvalues, gram, steps, coefficients)[0]


class _ByEigenvalues(_SymmetricProduct):
    """``_product`` of symmetric matrices through their eigenvalues."""

    @staticmethod
    def forward(gram: Tensor, steps: int, coefficients: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
        return by_eigenvalues(gram, steps, coefficients)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, to_q: Tensor | None, *none: None) -> tuple[Tensor | None, None, None]:
        if to_q is None:
            return None, None, None
        gram, vectors, values = ctx.saved_tensors
        if _differentiable():
            return _pulled_back(lambda s: _product(s, ctx.steps, ctx.coefficients), gram, to_q), None, None
        return gradient_by_eigenvalues(to_q, vectors, values, ctx.steps, ctx.coefficients), None, None


def _differentiable() -> bool:
    """Whether a backward pass must be differentiable itself. The tensors that it saved have no history, and it computes
    the forward pass again. No compiler makes second derivatives."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _pulled_back(f: Callable[[Tensor], Tensor], x: Tensor, to_y: Tensor) -> Tensor:
    """The gradient of ``f(x)``, itself differentiable, and under ``vmap`` too, as in ``torch.func.jacrev``."""
    pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(f, x)[1]
    return pull(to_y)[0]


def _twice_symmetric_part(x: Tensor) -> Tensor:
    return x + x.mT


def _between_restarts(short: int, long: int, steps: int) -> list[int]:
    """How many of the ``steps`` iterations to make on each Gram matrix of a short x long X before a new one is made."""
    if long <= 2 * short:
        return [1] * steps
    counts = [min(2, steps)]
    while sum(counts) < steps:
        counts.append(min(3, steps - sum(counts)))
    return counts


def schulz_cost(rows: int, columns: int, steps: int) -> int:
    """Multiply-adds of ``newton_schulz`` on one matrix."""
    short, long = sorted((rows, columns))
    return sum(2 * short**2 * long + gram_cost(short, count) for count in _between_restarts(short, long, steps))


def saturated_cost(rows: int, columns: int, steps: int) -> int:
    """Multiply-adds of ``saturated`` on one matrix."""
    short, long = sorted((rows, columns))
    return 2 * short**2 * long + gram_cost(short, steps)


def gram_cost(m: int, steps: int) -> int:
    """Multiply-adds of ``gram_polynomial`` on one matrix."""
    return (4 * steps - 3) * m**3
