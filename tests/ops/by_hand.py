"""The inner problem once more, token by token for one sequence and one head, with what is the library's own: normalised
steps, online gradients, decay to M_0, retentions at their exact tokens, and Muon with a floor.

The papers' equations are the pages of atlas_memory/reference, and other tests hold the definition to those. Here a rule
is read off its parts, and everything that a part does is written anew.
"""

import math

import torch
import torch.nn.functional as F
from torch.func import grad

from atlas_memory.memory import (
    L2,
    MLP,
    Decay,
    DeltaGradientDescent,
    DotProduct,
    ElasticNet,
    Exponential,
    FDivergence,
    GatedMLP,
    Huber,
    Keep,
    Linear,
    Lp,
    LqNorm,
    Momentum,
    Muon,
    Polynomial,
    RowNorm,
    Sigmoid,
    Softmax,
)
from atlas_memory.reference.atlas import exponential, polynomial

EPS, FLOOR = 1e-6, 0.05  # of smooth absolute values and layer norms; of squared lengths in a step's normaliser


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + torch.exp(-x))


def smooth(x):
    return (x**2 + EPS).sqrt()


def saturate(s):
    """(S S^T / L^2 + 1)^(-1/2) S, by five steps on [S, L], with L the root of the rows."""
    most = math.sqrt(len(s))
    x = torch.cat([s, most * torch.eye(len(s)).double()], 1) / ((s**2).sum() + most**2).sqrt()
    for _ in range(5):
        x = (15 * x - 10 * x @ x.mT @ x + 3 * x @ x.mT @ x @ x.mT @ x) / 8
    return most * x[:, : s.shape[1]]


def spectral(w):
    """The largest singular value, squared, by four steps of power iteration; its vectors are taken as they are."""
    i = torch.arange(1, len(w) + 1).double()
    u = torch.cos(0.7 * i**2)
    for _ in range(4):
        u = w.detach() @ (w.detach().mT @ F.normalize(u, dim=0))
    return (F.normalize(u, dim=0) @ w).square().sum()


def spread(gate, matrix):
    """A scalar gate as it is; one of d channels for the rows of a matrix."""
    return gate if gate.dim() == 0 else torch.cat([g.expand(len(matrix) // len(gate)) for g in gate])[:, None]


def phi(features, x, sqrt_a):
    match features:
        case Exponential():
            return exponential(x)
        case Polynomial(degree=1):
            return torch.cat([sqrt_a[:1], sqrt_a[1] * x])
        case Polynomial(degree=2):
            return polynomial(x, sqrt_a**2)
    return x


def in_basis(features, matrix, keys):
    """The first matrix on phi*, whose basis is that of the page; M_0 stands where phi* has x."""
    if not isinstance(features, Exponential):
        return matrix
    initial, columns = matrix[:, : keys.shape[1]], matrix[:, keys.shape[1] :]
    full = F.pad(initial, (1, len(exponential(initial[0])) - 1 - keys.shape[1]))
    return full + sum(torch.outer(column, exponential(k)) for column, k in zip(columns.mT, keys, strict=True))


def hidden(network, *pre):
    """The input of the last matrix, from what the others put out."""
    match network:
        case MLP(bias=bias):
            return torch.cat([gelu(*pre), torch.ones(int(bias)).double()])
        case GatedMLP(activation=activation):
            return {"gelu": gelu, "silu": silu}[activation](pre[0]) * pre[1]


def inputs(network, w, f):
    """Of all matrices."""
    return [f] if isinstance(network, Linear) else [*[f] * (len(w) - 1), hidden(network, *(m @ f for m in w[:-1]))]


def jacobian_bounds(network, w, f):
    """|d body / d (W f)|^2, at most, of all matrices."""
    pre, found = [m @ f for m in w[:-1]], []
    for i, x in enumerate(pre):
        slope = grad(lambda x, i=i: hidden(network, *pre[:i], x, *pre[i + 1 :]).sum())(x)
        found.append((slope**2).max() * spectral(w[-1][:, : len(x)]))
    return [*found, 1.0]


def loss(bias, m, v, delta):
    e = m - v
    match bias:
        case L2(scale):
            return scale * (e**2).sum()
        case DotProduct():
            return -(m @ v)
        case Lp(p):
            return (smooth(e) ** p).sum()
        case Huber("mixture", corner):
            max_abs = (e**2 + (corner * delta) ** 2 / len(e) + EPS).sqrt().sum()
            return 0.5 * (e**2).sum() if e.norm() <= delta else delta * max_abs


def curvature(bias, m, v, delta):
    match bias:
        case L2(scale):
            return 2 * scale * v.new_ones(())
        case DotProduct():
            return v.new_ones(())
        case Lp(3):
            return 3 * smooth(m - v).max()  # |derivative| / |error| of the largest coordinate
        case Huber("mixture", corner):
            size = (m - v).norm()
            return v.new_ones(()) if size <= delta else len(v) ** 0.5 * (1 / corner if corner else delta / size)


def mirror_map(retention, a, frozen, m_0):
    """W at an exact token, of A, the memory before the chunk and M_0; None where the retention is linear."""
    match retention:
        case LqNorm(q):
            return a / (a.abs() ** q).sum() ** ((q - 2) / q)  # Miras Eq. 24
        case Softmax(scale):
            return scale * torch.exp(a / scale) / torch.exp(a / scale).mean(-1, keepdim=True)  # Eqs. 21 and 27
        case Sigmoid(scale):
            return scale / (1 + torch.exp(-a))  # sec. 5.2
        case ElasticNet(threshold):
            return a.sign() * (a.abs() - threshold).clamp_min(0)  # Eqs. 22 and 23
        case RowNorm():
            return a * m_0.norm(dim=-1, keepdim=True) / ((a**2).sum(-1, keepdim=True) + 1e-10).sqrt()  # LaCT
        case FDivergence(scale):  # Eq. 18 with f'(u) = u - 1: zeta by bisection
            low, high = a.amin(-1, keepdim=True) - 2, a.amax(-1, keepdim=True) + 2
            for _ in range(100):
                zeta = (low + high) / 2
                too_much = (frozen * (1 + a - zeta).clamp_min(0)).mean(-1, keepdim=True) > scale
                low, high = torch.where(too_much, zeta, low), torch.where(too_much, high, zeta)
            return frozen * (1 + a - (low + high) / 2).clamp_min(0)
    return None


def begin(retention, m_0):
    """A and W of M_0."""
    match retention:
        case FDivergence(scale):
            return 0 * m_0, scale * m_0.shape[1] * m_0.softmax(1)
        case Decay() | Keep() | RowNorm():
            return m_0, m_0
    w = mirror_map(retention, m_0, m_0, m_0)
    return again(retention, m_0, w), w


def again(retention, a, w):
    """The A with which a chunk begins, of the A and W with which another ends."""
    match retention:
        case RowNorm() | ElasticNet(local=True):
            return w
        case FDivergence():
            return 0 * a
    return a


def run(problem, b, h):
    """Outputs and last matrices: the gradient at the chunk's first memory, the step, what is kept, the answer."""
    rule = problem.rule
    network, optimiser, retention, bias = rule.network, rule.optimiser, rule.retention, rule.bias
    size, chunk, every = rule.window.size, rule.window.chunk, optimiser.every or rule.window.chunk
    q, k, v = (x[b, h].detach() for x in (problem.q, problem.k, problem.v))
    gates, params = problem.gates.map(lambda g: g[b, h].detach()), problem.params.map(torch.Tensor.detach)
    gain, shift = (n[h] for n in params.norm) if network.norm else (None, None)
    online = optimiser.online and not isinstance(bias, DotProduct)
    momentum, delta_step = isinstance(optimiser, Momentum | Muon), isinstance(optimiser, DeltaGradientDescent)

    def features(x):
        return phi(rule.features, x, params.sqrt_a)

    def pre_norm(w, x):
        return w[-1] @ inputs(network, w, features(x))[-1]

    def normalised(pre_norm):
        return (pre_norm - pre_norm.mean()) / (((pre_norm - pre_norm.mean()) ** 2).mean() + EPS).sqrt()

    def ending(pre_norm, x):
        out = gain * normalised(pre_norm) + shift if network.norm else pre_norm
        return x + out if network.residual else out

    def free(m):
        """Without what is common to a row of a matrix, or to an input of one, where rows have fixed sums."""
        return m - m.mean(-1, keepdim=True) if isinstance(retention, Softmax | FDivergence) else m

    def curvature_bound(w, x, v_x, delta):
        """How fast the error at the body can grow with the body."""
        out = pre_norm(w, x)
        bound, m = curvature(bias, ending(out, x), v_x, delta), ending(out, x)
        if not network.norm:
            return bound
        straight, bend = bound * (gain**2).max(), 0.0
        if isinstance(bias, L2):
            bend = (bound * (m - v_x) * gain) @ normalised(out) / len(out)
            bend = torch.minimum(bend, straight / 2)
        return (straight - bend) / (((out - out.mean()) ** 2).mean() + EPS).clamp(max=1)

    def normaliser(w, x, v_x, delta):
        """Of every matrix: response * (|d body / d (W f)|^2 + 0.05) (|f|^2 + 0.05) over its share of the step."""
        r, f, earlier = curvature_bound(w, x, v_x, delta), features(x), len(w) - 1
        shares = [0.1 / earlier] * earlier + [0.9] if earlier else [1.0]
        each = zip(jacobian_bounds(network, w, f), map(free, inputs(network, w, f)), shares, strict=True)
        return torch.stack([(r * (g + FLOOR) + delta_step) * ((u**2).sum() + FLOOR) / s for g, u, s in each])

    m_0 = [in_basis(rule.features, m[h], k[:0]) if i == 0 else m[h] for i, m in enumerate(params.initial)]
    a_0, w_0 = zip(*(begin(retention, m) for m in m_0), strict=True)
    a, w, mirrored, zero, y = a_0, w_0, w_0, [0 * m for m in m_0], []
    s, changed = zero, zero
    for t in range(len(q)):
        first, last, due = t % chunk == 0, (t + 1) % chunk == 0, (t + 1) % every == 0
        if first:
            frozen, changed = mirrored, zero
        eta, alpha, theta = gates.eta[t], gates.alpha[t], gates.theta[t]
        alpha = torch.ones(()).double() if isinstance(retention, Keep | RowNorm | FDivergence) else alpha
        window = [
            (gates.gamma[t, t - i], k[i], v[i], None if gates.delta is None else gates.delta[i])
            for i in range(max(0, t - size + 1), t + 1)
        ]
        written = -changed[-1] if isinstance(optimiser, Muon) else w[-1] - frozen[-1]
        moved = [
            curvature_bound(frozen, *x) * (written @ inputs(network, frozen, features(x[0]))[-1])
            if online
            else 0 * x[0]
            for _, *x in window
        ]

        def objective(w, window=window, moved=moved):
            terms = ((g, pre_norm(w, x), more, x, v_x, d) for (g, x, v_x, d), more in zip(window, moved, strict=True))
            return sum(g * (loss(bias, ending(out, x), v_x, d) + more @ out) for g, out, more, x, v_x, d in terms)

        g = [free(m) for m in grad(objective)(list(frozen))]
        rate = plain = [eta] * len(g)
        if optimiser.normalised:
            weights = [*(x[0] for x in window[:-1]), 1.0]  # its own token at full weight
            total = sum(c * normaliser(frozen, *x) for c, (_, *x) in zip(weights, window, strict=True))
            plain = [eta / n for n in total]
            late = chunk if isinstance(optimiser, Muon) and not optimiser.online else 1.0
            rate = [(1 - theta if momentum else 1.0) * p / late for p in plain]
        step = [spread(r, m) * m for r, m in zip(rate, g, strict=True)]
        if momentum:
            keep = theta if t % every == 0 else 1.0  # theta acts once a step
            s = step = [keep * x + m for x, m in zip(s, step, strict=True)]
        if isinstance(optimiser, Muon):
            changed = [alpha * x + p * m for x, p, m in zip(changed, plain, g, strict=True)]
            step = [saturate(x) for x in s] if due else zero
        if delta_step:
            f, own = inputs(network, frozen, features(k[t])), gates.gamma[t, 0]
            old = [spread(alpha, m) * m for m in w] if optimiser.after_decay else w
            each = zip(step, rate, old, f, strict=True)
            step = [x + spread(r, m) * own * torch.outer(m @ u, u) for x, r, m, u in each]

        def kept(now, decay_target, alpha=alpha, step=step):
            decay_target = decay_target if getattr(retention, "to_initial", False) else zero
            each = zip(now, decay_target, step, strict=True)
            return [m + spread(alpha, m) * (x - m) - p for x, m, p in each]

        before, w, a = w, kept(w, w_0), kept(a, a_0)
        mirrored = [mirror_map(retention, *x) for x in zip(a, frozen, m_0, strict=True)]
        if mirrored[0] is None:
            mirrored = w
        elif first if getattr(retention, "lag", False) else last:
            w = mirrored
        a = [again(retention, *x) for x in zip(a, mirrored, strict=True)] if last else a
        shown = {"before": before, "after": w, "frozen": frozen}[rule.window.read]
        if optimiser.read_pending and not due:  # what waits for a step
            shown = [m - x for m, x in zip(w, s, strict=True)]
        y.append(ending(pre_norm(shown, q[t]), q[t]))
    return torch.stack(y), w
