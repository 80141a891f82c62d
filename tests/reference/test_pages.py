"""Every page of reference/ against ``recurrent`` of the printed rule: outputs, the last memory and outer gradients."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from atlas_memory import reference
from atlas_memory.cli.rule_tables import REFERENCE
from atlas_memory.layers.tnt import HierarchicalMemory, Hierarchy
from atlas_memory.memory import RULES, Gates, recurrent
from atlas_memory.reference import atlas, deltanet, lact, miras, nested_learning, titans, tnt, ttt

from ..ops.problems import error, random_problem

SHAPES = [(3, 1, 3, 9), (1, 4, 3, 11), (3, 4, 4, 11), (5, 3, 5, 10)]
"""Window, chunk, width, time: chunks of one token, a last chunk that is not full, windows that reach back a chunk."""


class Case:
    """A problem of one sequence and one head in the letters of the pages."""

    def __init__(self, problem):
        self.problem = problem
        self.qkv = self.q, self.k, self.v = tuple(x[0, 0] for x in (problem.q, problem.k, problem.v))
        for name in ("eta", "alpha", "theta", "gamma", "delta"):
            gate = getattr(problem.gates, name)
            setattr(self, name, None if gate is None else gate[0, 0])
        self.window, self.chunk = problem.rule.window.size, problem.rule.window.chunk
        self.norm = problem.params.norm and [n[0] for n in problem.params.norm]

    def initial(self, *names):
        """M_0 by the names of the page, given in the order of the library."""
        return dict(zip(names, (m[0] for m in self.problem.params.initial), strict=True))

    def phi(self, x):
        a = self.problem.params.sqrt_a
        return x if a is None else atlas.polynomial(x, a**2)


def of_atlas(*names, **options):
    def page(c):
        gates = c.eta, c.alpha, c.theta, c.gamma
        y, M = atlas.atlas(c.initial(*names), c.phi, *c.qkv, *gates, c.window, c.chunk, **options)
        return y, [M[n] for n in names]

    return page


def on_exponential(**options):
    """M_0 stands where phi* has x itself."""

    def page(c):
        c.phi, M = atlas.exponential, c.initial("W2", "W1")
        M["W2"] = F.pad(M["W2"], (1, len(c.phi(c.q[0])) - 1 - len(c.q[0])))
        c.initial = lambda *names: M
        return of_atlas("W2", "W1", muon=False, **options)(c)

    return page


def of(function, names, *arguments):
    """A page's function of M_0, then of the norm if there is one, q, k, v, and these arguments."""

    def page(c):
        norm = [] if c.norm is None else [c.norm]
        y, M = function(c.initial(*names), *norm, *c.qkv, *(getattr(c, name) for name in arguments))
        return y, [M[n] for n in names]

    return page


def of_deltanet(function, *arguments):
    def page(c):
        y, M = function(c.initial("M")["M"], *c.qkv, *(getattr(c, name) for name in arguments))
        return y, [M]

    return page


def of_memora(c):
    M = {n: W.shape[1] * W.softmax(1) for n, W in c.initial("W2", "W1").items()}
    y, M = miras.memora(M, c.norm, *c.qkv, c.eta, c.alpha, c.chunk)
    return y, [M["W2"], M["W1"]]


def of_ttt_linear(c):
    both = c.initial("W")["W"]  # the library's matrix is [b, W]
    y, M = ttt.ttt({"W": both[:, 1:], "b": both[:, 0]}, c.norm, *c.qkv, c.eta, c.chunk)
    return y, [torch.cat([M["b"][:, None], M["W"]], 1)]


def of_ttt_mlp(c):
    first, last = c.initial("W1", "W2").values()  # [b1, W1] and [W2, b2]
    M = {"W1": first[:, 1:], "b1": first[:, 0], "W2": last[:, :-1], "b2": last[:, -1]}
    y, M = ttt.ttt(M, c.norm, *c.qkv, c.eta, c.chunk)
    return y, [torch.cat([M["b1"][:, None], M["W1"]], 1), torch.cat([M["W2"], M["b2"][:, None]], 1)]


def of_lact(c):
    c.eta = c.gamma[:, 0]
    return of(lact.lact, ("W0", "W2", "W1"), "eta", "theta", "chunk")(c)


DEEP = ("W2", "W1")
ATLAS = {
    "atlas": of_atlas(*DEEP),
    "atlas++": of_atlas("W2", "W3", "W1"),
    "omeganet": of_atlas(*DEEP, muon=False),
    "atlas-linear": of_atlas("W1"),
    "atlas-identity": of_atlas(*DEEP),
    "atlas-c1": of_atlas(*DEEP),
    "dla": of_atlas(*DEEP, muon=False, dot=True),
    "swla": of_atlas("W1", muon=False, dot=True),
    "deeptransformer": on_exponential(dot=True),
    "swdt": on_exponential(dot=True),
    "dot": on_exponential(),
}
PAGES = ATLAS | {
    "titans": of(titans.titans, DEEP, "eta", "alpha", "theta", "chunk"),
    "tnt": of(tnt.chunkwise, DEEP, "eta", "chunk"),
    "moneta": of(miras.moneta, DEEP, "eta", "alpha", "chunk"),
    "yaad": of(miras.yaad, DEEP, "eta", "alpha", "delta", "chunk"),
    "memora": of_memora,
    "hope": of(nested_learning.hope, DEEP, "eta", "alpha", "chunk"),
    "deltanet": of_deltanet(deltanet.deltanet, "eta"),
    "gated-deltanet": of_deltanet(deltanet.gated_deltanet, "eta", "alpha"),
    "ttt-linear": of_ttt_linear,
    "ttt-mlp": of_ttt_mlp,
    "lact": of_lact,
}
ETA = dict.fromkeys(PAGES, 0.03) | {"moneta": 1e-4, "memora": 0.01}
"""The largest step sizes: with larger ones the printed equations of a deep memory diverge."""


def problem_of(name, window, chunk, dim, time):
    """A problem, and the tensors by which gradients are compared."""
    rule = RULES[name].printed()
    rule = rule.vary(window={"size": window if rule.window.size > 1 else 1, "chunk": chunk})
    dim, channels = 2 if rule.features.infinite else dim, name in ("moneta", "yaad", "memora")
    problem = random_problem(rule, len(name) + time, 1, 1, time, dim, channels=channels)
    gates = problem.gates
    eta = (ETA[name] * gates.eta).detach().requires_grad_()
    problem.gates = replace(gates, eta=eta, gamma=gates.gamma if name in ATLAS else None)
    if name.startswith("ttt"):  # the weights of W and b have no factors
        problem.params = replace(problem.params, sqrt_a=None)
    if name != "lact":
        return problem, problem.leaves
    # LaCT's eta weighs tokens within Newton-Schulz, as gamma does here. Its theta is the mean of a chunk, here the
    # first of a chunk. Rows are long, since the library divides by the root of their squared length + 1e-10.
    theta = gates.theta[..., ::chunk].detach().requires_grad_()
    of_tokens = theta.repeat_interleave(chunk, -1)[..., :time]
    problem.gates = Gates(torch.ones_like(eta), theta=of_tokens, gamma=gates.gamma)
    problem.params = problem.params.map(lambda m: (20 * m).detach().requires_grad_())
    return problem, [problem.q, problem.k, problem.v, theta, gates.gamma, *problem.params.initial]


def compared(y, weights, leaves):
    """What must agree: y, the last matrices, and the gradients of a random function of both."""
    generator = torch.Generator().manual_seed(7)
    found = [y, *weights]
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in found)
    return found + list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_the_printed_rule(name, shape):
    problem, leaves = problem_of(name, *shape)
    y, weights = PAGES[name](Case(problem))
    expected, state = recurrent(*problem.arguments())
    matrices = [w[0, 0] for w in state.weights]
    if problem.rule.features.infinite:  # held as M_0 and a column a key
        initial, columns = matrices[0][:, :2], matrices[0][:, 2:]
        keys = torch.stack([atlas.exponential(k) for k in state.keys[0, 0]])
        matrices[0] = F.pad(initial, (1, keys.shape[1] - 3)) + columns @ keys
    ours, theirs = compared(y, weights, leaves), compared(expected[0, 0], matrices, leaves)
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-10


@pytest.mark.parametrize("hierarchy", [(6, (2, 4), 8), (5, (3,), 3), (1, (4, 1), 4)], ids=str)
def test_the_hierarchy_of_tnt(hierarchy):
    torch.manual_seed(0)
    rule, dim, time = RULES["tnt"].printed(), 3, 13
    module = HierarchicalMemory(dim, 1, rule, Hierarchy(*hierarchy)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    q, k, v = torch.randn(3, 1, 1, time, dim, dtype=torch.float64, requires_grad=True)
    eta = (0.05 * torch.rand(1, len(module.memories), time, dtype=torch.float64)).requires_grad_()
    params = [member.params for member in module.memories]
    V, *W = [dict(zip(DEEP, (m[0] for m in p.initial), strict=True)) for p in params]
    norms = [[n[0] for n in p.norm] for p in params]
    y, V, W = tnt.tnt(V, W, norms, q[0, 0], k[0, 0], v[0, 0], eta[0], *hierarchy)
    expected, state = module(q, k, v, Gates(eta))
    leaves = [q, k, v, eta, *(m for p in params for m in (*p.initial, *p.norm))]
    ours = compared(y, [M[n] for M in (V, *W) for n in DEEP], leaves)
    theirs = compared(expected[0, 0], [w[0, 0] for m in state.memories for w in m.weights], leaves)
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-10


def test_every_rule_has_a_page_of_sixty_lines():
    pages = {path.stem: path for path in Path(reference.__file__).parent.glob("*.py") if path.name != "__init__.py"}
    assert PAGES.keys() == RULES.keys() == REFERENCE.keys() and set(REFERENCE.values()) == pages.keys()
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 60 for path in pages.values())
