"""``recurrent`` against the equations written by hand (by_hand.py): every row of RULES, every bias and retention.

Equation numbers are the papers': ATLAS (A), Titans (T), Miras (M), Nested Learning (N).
"""

from dataclasses import replace

import pytest
import torch

from atlas_memory.memory import (
    RULES,
    Decay,
    ElasticNet,
    Exponential,
    FDivergence,
    Huber,
    LqNorm,
    Sigmoid,
    Softmax,
    recurrent,
)

from .by_hand import (
    MUON,
    Exact,
    Hand,
    bias_first,
    bias_last,
    delta_step,
    delta_step_after_decay,
    descent,
    dot_product,
    gated,
    half_l2,
    huber_mixture,
    l2,
    linear,
    lp,
    mlp,
    momentum,
    muon,
    muon_at_the_end,
    rounded_mixture,
    run,
    same,
    smooth,
    square,
    square_basis,
    star,
    star_basis,
    swiglu,
    ttt_linear,
    ttt_mlp,
)
from .problems import error, random_problem

BATCH, HEADS, TIME = 1, 2, 10


def l_q(q):
    """M Eq. 24: A_t = alpha A_{t-1} - eta g, W_t = A_t / |A_t|_q^(q - 2)."""

    def of(a):
        return a / (a.abs() ** q).sum() ** ((q - 2) / q)

    def token(a, w, step, at, m):
        a = at.alpha_times(a) - step
        return a, of(a)

    return Exact(lambda m: (m, of(m)), token, lambda a, f, m: of(a))


def kullback_leibler(scale=1.0, lag=True):
    """M Eqs. 21 and 27: W_t = c Softmax(alpha log W_{t-1} - eta g / scale), c = scale * columns; A is scale log W. With
    scale = 1 it is as printed."""

    def of(a):
        return scale * torch.exp(a / scale) / torch.exp(a / scale).mean(-1, keepdim=True)

    def token(a, w, step, at, m):
        w = of(at.alpha_times(scale * torch.log(w)) - step)
        return a, w

    return Exact(lambda m: (m, of(m)), token, lambda a, f, m: of(a), lag=lag, fixed_sums=True)


def bregman(scale=1.0):
    """M section 5.2: W_t = g(F'(W_{t-1}) - eta g), g the sigmoid and F' = g^-1 the logit."""

    def of(a):
        return scale / (1 + torch.exp(-a))

    def token(a, w, step, at, m):
        return a, of(at.alpha_times(torch.log(w / scale / (1 - w / scale))) - step)

    return Exact(lambda m: (m, of(m)), token, lambda a, f, m: of(a))


def elastic_net(threshold, local):
    """M Eq. 22, W_t = S(lambda W_{t-1} - zeta g), lambda being alpha and zeta eta; and Eq. 23, A going on by itself."""

    def of(a):
        return a.sign() * (a.abs() - threshold).clamp_min(0)

    def token(a, w, step, at, m):
        a = at.alpha_times(w if local else a) - step
        return a, of(a)

    def again(a, w):
        return w if local else a

    return Exact(lambda m: (again(m, of(m)), of(m)), token, lambda a, f, m: of(a), again)


def pearson(scale=1.0):
    """M Eq. 18, W_t = W_{t-1} * g(-zeta - eta g) with g = (f')^-1, f' (u) = u - 1, and W >= 0: zeta by bisection."""

    def of(a, w):
        low, high = a.amin(-1, keepdim=True) - 2, a.amax(-1, keepdim=True) + 2
        for _ in range(100):
            zeta = (low + high) / 2
            too_much = (w * (1 + a - zeta).clamp_min(0)).mean(-1, keepdim=True) > scale
            low, high = torch.where(too_much, zeta, low), torch.where(too_much, high, zeta)
        return w * (1 + a - (low + high) / 2).clamp_min(0)

    def begin(m):
        return 0 * m, scale * m.shape[-1] * torch.softmax(m, -1)

    def token(a, w, step, at, m):
        return a, of(-step, w)

    return Exact(begin, token, lambda a, f, m: of(a, f), lambda a, w: 0 * a, gated=False, fixed_sums=True)


def row_length():
    """LaCT: every row at the length it has in M_0 (1e-10 is the library's)."""

    def of(a, m):
        return a * m.norm(dim=-1, keepdim=True) / ((a**2).sum(-1, keepdim=True) + 1e-10).sqrt()

    def token(a, w, step, at, m):
        return a, of(w - step, m)

    return Exact(lambda m: (m, m), token, lambda a, f, m: of(a, m), lambda a, w: w, gated=False)


SQUARE = {"phi": square, "basis": (square_basis, same)}
STAR = {"phi": star, "basis": (star_basis, same), "curvature": lambda m, v, delta: 1.0}
HEBB = {"curvature": lambda m, v, delta: 1.0, "sees_itself": False}
HALF = {"curvature": lambda m, v, delta: 1.0}
MATRIX = {"residual": False}
ATLAS = Hand(l2, mlp, muon, **SQUARE)
MIRAS = Hand(l2, mlp, descent, norm=True)

HAND = {
    "atlas": ATLAS,  # A32-33
    "atlas++": replace(ATLAS, body=gated, basis=(square_basis, square_basis, same)),  # A43
    "omeganet": replace(ATLAS, optimiser=descent),  # A10
    "atlas-linear": replace(ATLAS, body=linear, **MATRIX),
    "atlas-identity": Hand(l2, mlp, muon),
    "atlas-c1": ATLAS,
    "dla": Hand(dot_product, mlp, descent, **SQUARE, **HEBB),  # A19
    "swla": Hand(dot_product, linear, descent, **SQUARE, **HEBB, **MATRIX),  # A20, with the alpha it loses
    "deeptransformer": Hand(dot_product, mlp, descent, sees_itself=False, **STAR),  # A25
    "swdt": Hand(dot_product, mlp, descent, sees_itself=False, **STAR),
    "dot": Hand(l2, mlp, descent, **{**STAR, "curvature": lambda m, v, delta: 2.0}),  # A27
    "titans": Hand(l2, mlp, momentum),  # T13-14: our eta, inside S, is their theta; our theta their eta
    "tnt": Hand(l2, mlp, descent, norm=True, retention="keep"),  # N, App. D
    "moneta": replace(  # M24
        MIRAS,
        objective=lp(3),
        retention=l_q(4),
        curvature=lambda m, v, delta: 3 * smooth(m - v).max(),  # |derivative| / |error| of the largest coordinate
    ),
    "yaad": replace(  # M26
        MIRAS,
        objective=huber_mixture,
        curvature=lambda m, v, delta: 1.0 if (m - v).norm() <= delta else delta * len(v) ** 0.5 / (m - v).norm(),
    ),
    "memora": replace(MIRAS, retention=kullback_leibler(0.5)),  # M27
    "hope": Hand(l2, mlp, delta_step, read="before"),  # N88-90, at given k and v
    "deltanet": Hand(dot_product, linear, delta_step, retention="keep", **HEBB, **MATRIX),
    "gated-deltanet": Hand(dot_product, linear, delta_step_after_decay, **HEBB, **MATRIX),
    "ttt-linear": Hand(half_l2, ttt_linear, descent, **HALF, basis=(bias_first,), norm=True, retention="keep", last=2),
    "ttt-mlp": Hand(
        half_l2, ttt_mlp, descent, **HALF, basis=(bias_first, bias_last), norm=True, retention="keep", last=2
    ),
    "lact": Hand(dot_product, swiglu, muon_at_the_end, **HEBB, residual=False, retention=row_length()),
}

ROUNDED = {
    "objective": rounded_mixture,
    "curvature": lambda m, v, delta: 1.0 if (m - v).norm() <= delta else len(v) ** 0.5,
}

OTHERS = {
    "decay to M_0": (replace(RULES["omeganet"], retention=Decay(to_start=True)), "omeganet", "decay to start"),
    "decay to M_0, Muon": (replace(RULES["atlas"], retention=Decay(to_start=True)), "atlas", "decay to start"),
    "L_3": (replace(RULES["yaad"], bias=Huber("mixture"), retention=LqNorm(3.0)), "yaad", l_q(3)),
    "softmax, no lag": (
        replace(RULES["memora"], retention=Softmax(2.0, lag=False)),
        "memora",
        kullback_leibler(2, False),
    ),
    "sigmoid": (replace(RULES["memora"], retention=Sigmoid(2.0)), "memora", bregman(2.0)),
    "elastic net": (replace(RULES["memora"], retention=ElasticNet(0.05)), "memora", elastic_net(0.05, True)),
    "elastic net, FTRL": (
        replace(RULES["memora"], retention=ElasticNet(0.05, local=False)),
        "memora",
        elastic_net(0.05, False),
    ),
    "f-divergence": (replace(RULES["memora"], retention=FDivergence(2.0)), "memora", pearson(2.0)),
}


def agree(rule, hand, bounded, chunk, seed=0, live=True):
    size = 1 if rule.window.size == 1 else 3
    rule = rule.vary(window={"size": size, "chunk": chunk})
    rule = rule.vary(optimiser={"bounded": bounded, "live": live})
    dim = 2 if isinstance(rule.features, Exponential) else 3
    per_channel = hand.norm and "ttt" not in hand.body.__name__  # Miras's gates
    problem = random_problem(rule, seed, BATCH, HEADS, TIME, dim, channels=per_channel)
    if "ttt" in hand.body.__name__:
        problem.params = replace(problem.params, sqrt_a=torch.ones(2).double())
    if not bounded and hand.body is not linear and hand.optimiser not in MUON:
        # the bare equations of a deep memory explode at larger steps
        scale = 1e-5 if isinstance(hand.retention, Exact) else 0.002 if hand.norm else 0.03
        problem.gates = replace(problem.gates, eta=scale * problem.gates.eta.detach())
    y, state = recurrent(*problem.arguments())
    for b in range(BATCH):
        for h in range(HEADS):
            expected, weights = run(hand, problem, b, h, bounded, live)
            assert error(y[b, h], expected) < 1e-10
            ours = hand.in_basis([w[b, h].detach() for w in state.weights], state.keys[b, h].detach())
            assert max(error(w, e) for w, e in zip(ours, weights, strict=True)) < 1e-9


def as_printed(rule):
    """What fades, fades to zero; and absolute values have corners."""
    rule = rule.vary(bias={"corner": 0.0}) if getattr(rule.bias, "corner", 0.0) else rule
    return rule.vary(retention={"to_start": False}) if getattr(rule.retention, "to_start", False) else rule


def bounds(hand):
    """Whether steps are bounded; the parts of TTT's matrices have lengths of their own here."""
    return [False] if hand.body in (ttt_linear, ttt_mlp) else [False, True]


def test_every_row_is_written_by_hand():
    assert HAND.keys() == RULES.keys()


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name,bounded", [(name, bounded) for name in HAND for bounded in bounds(HAND[name])])
def test_every_rule_is_its_equations(name, bounded, chunk):
    agree(as_printed(RULES[name]), HAND[name], bounded, chunk)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", [name for name in HAND if getattr(RULES[name].retention, "to_start", False)])
def test_every_rule_as_it_stands_fades_to_its_start(name, chunk):
    retention = HAND[name].retention
    retention = replace(retention, to_start=True) if isinstance(retention, Exact) else "decay to start"
    agree(RULES[name], replace(HAND[name], retention=retention, **ROUNDED if name == "yaad" else {}), True, chunk)


@pytest.mark.parametrize("name", ["lact", "atlas"])
def test_what_waits_is_shown(name):
    rule = as_printed(RULES[name]).vary(optimiser={"every": None, "shows": True})
    agree(rule, replace(HAND[name], optimiser=muon_at_the_end), True, 4)
    with pytest.raises(ValueError, match="shows=True is for bounded steps"):
        rule.vary(optimiser={"bounded": False})


@pytest.mark.parametrize("name", HAND)
def test_frozen_gradients_are_the_papers(name):
    """ATLAS Eqs. 15-16: all gradients of a chunk at the memory frozen at its start."""
    agree(as_printed(RULES[name]), HAND[name], True in bounds(HAND[name]), 4, live=False)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", OTHERS)
def test_every_retention_is_its_equations(name, chunk):
    rule, base, retention = OTHERS[name]
    rule = rule if retention == "decay to start" else as_printed(rule)
    agree(rule, replace(HAND[base], retention=retention), base == "omeganet", chunk)


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("name", ["deltanet", "gated-deltanet"])
def test_delta_rules_are_token_by_token_at_any_chunk(name, chunk):
    """W_t = alpha W_{t-1} (I - beta k k^T) + beta v k^T as the linear-attention papers print it; alpha = 1 ungated."""
    problem = random_problem(RULES[name].vary(window={"chunk": chunk}), 2, BATCH, 1, TIME, 3)
    y, state = recurrent(*problem.arguments())
    w = problem.params.initial[0][0].detach()
    for t in range(TIME):
        q, k, v = (x[0, 0, t].detach() for x in (problem.q, problem.k, problem.v))
        beta = (problem.gates.eta[0, 0, t] * problem.gates.gamma[0, 0, t, 0]).detach()
        alpha = 1.0 if name == "deltanet" else problem.gates.alpha[0, 0, t].detach()
        w = alpha * w @ (torch.eye(3).double() - beta * torch.outer(k, k)) + beta * torch.outer(v, k)
        assert error(y[0, 0, t], w @ q) < 1e-10
    assert error(state.weights[0][0, 0], w) < 1e-10


@pytest.mark.parametrize("name", ["titans", "atlas", "hope"])
def test_a_graph_is_kept_for_those_who_ask(name):
    """The definition differentiates inside; what it returns has a graph where an argument has one."""
    problem = random_problem(RULES[name], 0, time=4)
    y, state = recurrent(*problem.arguments())
    assert y.requires_grad and any(t.requires_grad for t in state.tensors())
    plain = [problem.params.map(torch.Tensor.detach), *(x.detach() for x in (problem.q, problem.k, problem.v))]
    alone, held = recurrent(problem.rule, *plain, problem.gates.map(torch.Tensor.detach))
    assert not alone.requires_grad and not any(t.requires_grad for t in held.tensors()) and torch.equal(alone, y)
    assert recurrent(problem.rule, *plain, problem.gates)[0].requires_grad
