"""The papers' recurrences written once more, token by token for one sequence and head, without the library's parts.

A rule is a row of small functions (``Hand``); one loop runs them all. Matrices are kept in another basis than the
library's where it has one: polynomial features as the tensor square, phi* as products of one-dimensional Taylor series,
biases as vectors of their own. ``Hand.basis`` takes the library's matrices there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

EPS, NORM_EPS = 1e-6, 1e-6  # of Miras's smooth |x|, and of layer norms


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + torch.exp(-x))


def layer_norm(x, gain, shift):
    centred = x - x.mean()
    return gain * centred / ((centred**2).mean() + NORM_EPS).sqrt() + shift


def orthogonalise(s):
    """Newton-Schulz, five steps."""
    x = s / s.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.mT @ x + 2.0315 * x @ x.mT @ x @ x.mT @ x
    return x


def saturate(s):
    """(S S^T / L^2 + 1)^(-1/2) S, by five steps on [S, L], with L the root of the rows."""
    most = math.sqrt(len(s))
    x = torch.cat([s, most * torch.eye(len(s)).double()], 1) / ((s**2).sum() + most**2).sqrt()
    for _ in range(5):
        x = (15 * x - 10 * x @ x.mT @ x + 3 * x @ x.mT @ x @ x.mT @ x) / 8
    return most * x[:, : s.shape[1]]


# Features: (phi, the library's first matrix in this basis)


def plain(x, a):
    return x


def square(x, a):
    """Degree 2 as (1, x, x (x) x): the same kernel as that of distinct monomials."""
    return torch.cat([a[0] * torch.ones(1).double(), a[1] * x, a[2] * torch.outer(x, x).flatten()])


def square_basis(matrix, keys):
    d = next(d for d in range(1, 99) if (d + 1) * (d + 2) // 2 == matrix.shape[1])
    full, column = torch.zeros(matrix.shape[0], d, d, dtype=matrix.dtype), 1 + d
    for i in range(d):
        for j in range(i, d):
            full[:, i, j] = full[:, j, i] = matrix[:, column] / (1 if i == j else math.sqrt(2))
            column += 1
    return [torch.cat([matrix[:, : 1 + d], full.flatten(1)], 1)]


def star(x, a=None, degree=16):
    """phi* (ATLAS Eq. 22) for vectors of length at most 1, to 1e-12: exp(x.y) = prod_d sum_n x_d^n y_d^n / n!."""
    out = torch.ones(1).double()
    for entry in x:
        series = torch.stack([entry**n / math.sqrt(math.factorial(n)) for n in range(degree)])
        out = torch.outer(out, series).flatten()
    return out


def star_basis(matrix, keys, degree=16):
    """M_0 on the entries of degree 1, and sum_j column_j phi*(x_j)^T."""
    dim = keys.shape[1]
    first, columns = matrix[:, :dim], matrix[:, dim:]
    full = first.new_zeros(len(first), degree**dim)
    full[:, [degree ** (dim - 1 - i) for i in range(dim)]] = first
    return [full + columns @ torch.stack([star(x) for x in keys]) if len(keys) else full]


def same(matrix, keys):
    return [matrix]


def bias_first(matrix, keys):
    """(b, W) of a matrix on (1, x)."""
    return [matrix[:, 0], matrix[:, 1:]]


def bias_last(matrix, keys):
    return [matrix[:, :-1], matrix[:, -1]]


# Networks: body(w, f, taps) -> (body, the inputs of all matrices); a tap is added to a matrix's output


def linear(w, f, taps):
    return w[0] @ f + taps[0], [f]


def mlp(w, f, taps):
    u = gelu(w[0] @ f + taps[0])
    return w[1] @ u + taps[1], [f, u]


def gated(w, f, taps, activation=gelu):
    u = activation(w[0] @ f + taps[0]) * (w[1] @ f + taps[1])
    return w[2] @ u + taps[2], [f, f, u]


def swiglu(w, f, taps):
    return gated(w, f, taps, silu)


def ttt_linear(w, f, taps):
    b, w = w
    return w @ f + b, [f]


def ttt_mlp(w, f, taps):
    b1, w1, w2, b2 = w
    u = gelu(w1 @ f + b1)
    return w2 @ u + b2, [f, u]


def spectral(w):
    """The largest singular value, squared, by four steps of power iteration; its vectors are taken as they are."""
    i = torch.arange(1, len(w) + 1).double()
    u = torch.cos(0.7 * i**2)
    for _ in range(4):
        u = w.detach() @ (w.detach().mT @ (u / u.norm()))
    return ((u / u.norm()) @ w).square().sum()


# Biases: objective(prediction, v, delta), and what bounds its curvature


def l2(m, v, delta):
    return ((m - v) ** 2).sum()


def half_l2(m, v, delta):
    return 0.5 * l2(m, v, delta)


def dot_product(m, v, delta):
    """ATLAS Eqs. 19-20 and 25 with the sign that writes +v k^T."""
    return -(m @ v)


def smooth(x):
    return (x**2 + EPS).sqrt()


def lp(p):
    return lambda m, v, delta: (smooth(m - v) ** p).sum()


def huber_mixture(m, v, delta):
    """Miras Eq. 26: l2 near, delta times l1 far."""
    e = m - v
    return 0.5 * (e**2).sum() if e.norm() <= delta else delta * smooth(e).sum()


def rounded_mixture(m, v, delta):
    """The same with absolute values rounded over delta / sqrt(d)."""
    e = m - v
    far = delta * (e**2 + delta**2 / len(e) + 1e-6).sqrt().sum()
    return 0.5 * (e**2).sum() if e.norm() <= delta else far


# Optimisers: (S, gradient, inputs, W, gates) -> (S, step)


def descent(s, g, under, at):
    return s, at.eta_times(g)


def momentum(s, g, under, at):
    s = at.theta * s + at.eta_times(g)
    return s, s


def muon(s, g, under, at):
    """S, and what plain steps would have changed since the chunk began."""
    momentum, changed = s if isinstance(s, list) else [0.0 * g, 0.0 * g]
    momentum = at.theta * momentum + at.into_momentum(g)
    changed = at.alpha * changed + at.plain * g
    return [momentum, 0.0 * g if at.last else changed], at.orthogonal_step(momentum)


def muon_at_the_end(s, g, under, at):
    """theta acts once a chunk, at its first token."""
    s, step = muon(s, g, under, at if at.first else replace(at, theta=torch.ones(()).double()))
    return s, step if at.last else 0.0 * step


def delta_step(s, g, under, at):
    """-eta g - eta W f f^T."""
    return s, at.eta_times(g + at.gamma * under)


def delta_step_after_decay(s, g, under, at):
    return s, at.eta_times(g + at.gamma * at.alpha_times(under))


@dataclass
class At:
    """The gates at one token; ``first``, ``last``: of the chunk; ``bounded``: for Muon, whether eta is inside."""

    eta: torch.Tensor
    alpha: torch.Tensor
    theta: torch.Tensor
    gamma: torch.Tensor
    first: bool
    last: bool
    bounded: bool = False
    plain: torch.Tensor | float = 0.0

    def eta_times(self, m):
        return spread(self.eta, m) * m

    def into_momentum(self, g):
        return self.eta * g if self.bounded else g

    def orthogonal_step(self, s):
        """eta NS(S), or what is S where S is small and orthogonal where it is large."""
        return saturate(s) if self.bounded else self.eta * orthogonalise(s)

    def alpha_times(self, m):
        return spread(self.alpha, m) * m


def spread(gate, matrix):
    """A scalar gate as it is; one of d channels for the rows of a matrix (or entries of a vector)."""
    if gate.dim() == 0:
        return gate
    rows = torch.cat([g * torch.ones(len(matrix) // len(gate)).double() for g in gate])
    return rows[:, None] if matrix.dim() == 2 else rows


@dataclass
class Exact:
    """A non-linear retention.

    ``token``: the paper's own recurrence, (A, W, step, at, M_0) -> (A, W); ``begin``: A and W of M_0. ``settle`` and
    ``again``: what retention.py says of chunks: W of (A, W_f, M_0); the A with which a chunk begins, of (A, W).
    """

    begin: Callable
    token: Callable
    settle: Callable
    again: Callable = lambda a, w: a
    lag: bool = False
    gated: bool = True
    to_start: bool = False
    fixed_sums: bool = False


@dataclass
class Hand:
    """One rule. ``last``: which of the matrices (and vectors) of the basis make the library's last matrix."""

    objective: Callable
    body: Callable
    optimiser: Callable
    phi: Callable = plain
    basis: tuple[Callable, ...] = (same, same, same)
    residual: bool = True
    norm: bool = False
    retention: str | Exact = "decay"
    curvature: Callable = lambda m, v, delta: 2.0
    sees_itself: bool = True
    last: int = 1
    read: str = "after"

    @property
    def quadratic(self) -> bool:
        return self.objective in (l2, half_l2)

    def in_basis(self, matrices, keys):
        return [out for m, to in zip(matrices, self.basis, strict=False) for out in to(m, keys)]


def run(hand, problem, b, h, bounded, live=True):
    """The loop of the papers: gradient at the chunk's first memory, update, read. Returns outputs and last weights."""
    q, k, v = (x[b, h].detach() for x in (problem.q, problem.k, problem.v))
    gates = problem.gates.map(lambda g: g[b, h].detach())
    a = None if problem.params.sqrt_a is None else problem.params.sqrt_a.detach()
    exact = isinstance(hand.retention, Exact)
    gain, shift = (n[h].detach() for n in problem.params.norm) if hand.norm else (None, None)
    size, chunk = problem.rule.window.size, problem.rule.window.chunk

    def body_of(weights, x, taps=(0.0, 0.0, 0.0)):
        return hand.body(weights, hand.phi(x, a), taps)[0]

    def ending(body, x):
        out = layer_norm(body, gain, shift) if hand.norm else body
        return x + out if hand.residual else out

    def free(m):
        """Without what is common to a row of a matrix, or to an input of one, where rows have fixed sums."""
        return m - m.mean(-1, keepdim=True) if exact and hand.retention.fixed_sums else m

    def memory(weights, x):
        return ending(body_of(weights, x), x)

    def response(weights, x, v_x, delta):
        """How fast the error at the body can grow with the body."""
        body = body_of(weights, x)
        curvature = hand.curvature(ending(body, x), v_x, delta)
        if not hand.norm:
            return curvature
        variance = ((body - body.mean()) ** 2).mean() + NORM_EPS
        z = (body - body.mean()) / variance.sqrt()
        straight = curvature * (gain**2).max()
        if not hand.quadratic:
            return straight / variance.clamp(max=1)
        slope = curvature * (ending(body, x) - v_x)
        return torch.maximum(straight - (slope * gain) @ z / len(z), straight / 2) / variance.clamp(max=1)

    def sizes(weights, x, v_x, delta):
        """Of every matrix: response * (|d body / d (W f)|^2 + 0.05) (|f|^2 + 0.05) over its share of the step."""
        taps = tuple(torch.zeros(len(w)).double() for w in weights)
        inputs = hand.body(weights, hand.phi(x, a), taps)[1]
        hidden = torch.autograd.functional.jacobian(lambda *t: hand.body(weights, hand.phi(x, a), t)[1][-1], taps)
        earlier = len(inputs) - 1
        slopes = [(j.diagonal() ** 2).max() for j in hidden[:earlier]]
        gains = [slope * spectral(weights[-1]) for slope in slopes] + [1.0]
        shares = [0.1 / earlier] * earlier + [0.9] if earlier else [1.0]
        erased = 1.0 if hand.optimiser in DELTA else 0.0
        each = zip(gains, map(free, inputs), shares, strict=True)
        r = response(weights, x, v_x, delta)
        return torch.stack([(r * (g + 0.05) + erased) * ((f**2).sum() + 0.05) / share for g, f, share in each])

    def moved(weights, now, s, x, v_x, delta):
        """By how much the error at the body is another one at the last matrix as it stands, or with what waits in S."""
        last = now[-hand.last :]
        if hand.optimiser in MUON:
            last = [w - (part[1] if isinstance(part, list) else part) for w, part in zip(weights, s, strict=True)]
            last = last[-hand.last :]
        later = [*weights[: -hand.last], *last]
        return response(weights, x, v_x, delta) * (body_of(later, x) - body_of(weights, x))

    start = hand.in_basis([m[h].detach() for m in problem.params.initial], k[:0])
    if exact:
        state, now = zip(*map(hand.retention.begin, start), strict=True)
    else:
        state, now = (), start
    home, dual_home = now, state  # what a memory that fades "to start" fades to
    s, out, settled = [torch.zeros_like(w) for w in now], [], now
    for t in range(len(q)):
        if t % chunk == 0:
            frozen = [w.clone().requires_grad_() for w in settled]
        window = [(gates.gamma[t, t - i], k[i], v[i], delta(gates, i)) for i in range(max(0, t - size + 1), t + 1)]
        fixed = [w.detach() for w in frozen]
        loss = sum(g * hand.objective(memory(frozen, k_i), v_i, d) for g, k_i, v_i, d in window)
        sees = bounded or hand.optimiser not in MUON
        if live and sees and hand.sees_itself:
            loss = loss + sum(
                g * (moved(fixed, now, s, k_i, v_i, d) * body_of(frozen, k_i)).sum() for g, k_i, v_i, d in window
            )
        grads = [free(g) for g in torch.autograd.grad(loss, frozen)]
        ends = t % chunk == 0, (t + 1) % chunk == 0
        at = At(gates.eta[t], gates.alpha[t], gates.theta[t], gates.gamma[t, 0], *ends, bounded)
        if exact and not hand.retention.gated:
            at.alpha = torch.ones(()).double()
        etas = [at.eta] * len(grads)
        if bounded:
            weights = [*(g for g, *_ in window[:-1]), 1.0]  # its own token at full weight
            total = sum(g * sizes(fixed, *x) for g, (_, *x) in zip(weights, window, strict=True))
            lasts = hand.optimiser in (momentum, *MUON)
            total = total / (1 - at.theta) if lasts else total
            if hand.optimiser in MUON and not live:
                total = total * chunk  # the steps of a chunk do not see one another
            etas = [at.eta / x for x in total]
        inputs = hand.body(frozen, hand.phi(k[t], a), (0.0, 0.0, 0.0))[1]
        before, steps = now, []
        for i, (w, g) in enumerate(zip(now, grads, strict=True)):
            at.eta, at.plain = etas[i], etas[i] / (1 - at.theta) if bounded and lasts else 0.0
            under = torch.outer(w @ inputs[i], inputs[i]).detach() if hand.optimiser in DELTA else None
            s[i], step = hand.optimiser(s[i], g, under, at)
            steps.append(step)
        if hand.retention == "keep":
            now = [w - step for w, step in zip(now, steps, strict=True)]
        elif hand.retention == "decay":
            now = [at.alpha_times(w) - step for w, step in zip(now, steps, strict=True)]
        elif hand.retention == "decay to start":
            now = [m + at.alpha_times(w - m) - step for w, m, step in zip(now, start, steps, strict=True)]
        elif chunk == 1:
            if hand.retention.to_start:  # what comes back is as if it had been written
                steps = [step - (m - at.alpha_times(m)) for step, m in zip(steps, dual_home, strict=True)]
            each = zip(state, now, steps, start, strict=True)
            state, now = zip(*(hand.retention.token(x, w, step, at, m) for x, w, step, m in each), strict=True)
        settled = now
        if exact and chunk > 1:
            back = 1.0 if hand.retention.to_start else 0.0
            state = [
                at.alpha_times(x) - step + back * (m - at.alpha_times(m))
                for x, step, m in zip(state, steps, dual_home, strict=True)
            ]
            settled = [hand.retention.settle(x, f.detach(), m) for x, f, m in zip(state, frozen, start, strict=True)]
            is_exact = t % chunk == 0 if hand.retention.lag else at.last
            linear = [
                at.alpha_times(w) - step + back * (m - at.alpha_times(m))
                for w, step, m in zip(now, steps, home, strict=True)
            ]
            now = settled if is_exact else linear
            if at.last:
                state = [hand.retention.again(x, w) for x, w in zip(state, settled, strict=True)]
        shown = before if hand.read == "before" else now
        if problem.rule.optimiser.shows and not at.last:  # what waits for the chunk's end
            shown = [w - (part[0] if isinstance(part, list) else part) for w, part in zip(shown, s, strict=True)]
        out.append(memory(shown, q[t]))
    return torch.stack(out).detach(), [w.detach() for w in now]


DELTA = (delta_step, delta_step_after_decay)
MUON = (muon, muon_at_the_end)


def delta(gates, i):
    return None if gates.delta is None else gates.delta[i]
