"""``recurrent`` against the loop of by_hand.py: what is the library's own, for every rule and every retention. What the
papers print is held in tests/reference.
"""

from dataclasses import replace

import pytest
import torch

from atlas_memory.memory import (
    RULES,
    ElasticNet,
    FDivergence,
    LqNorm,
    Sigmoid,
    Softmax,
    recurrent,
)

from .by_hand import in_basis, run
from .problems import error, random_problem

TIME = 10
RETENTIONS = {
    "L_3": LqNorm(3.0),
    "softmax, no lag": Softmax(2.0, lag=False),
    "sigmoid": Sigmoid(2.0),
    "elastic net": ElasticNet(0.05),
    "elastic net, FTRL": ElasticNet(0.05, local=False),
    "f-divergence": FDivergence(2.0),
}


def agree(rule, chunk, scale=1.0):
    rule = rule.vary(window={"size": min(rule.window.size, 3), "chunk": chunk})
    dim, channels = 2 if rule.features.infinite else 3, rule.network.norm and not rule.optimiser.mixes_rows
    problem = random_problem(rule, 0, 1, 2, TIME, dim, channels=channels)
    problem.gates = replace(problem.gates, eta=scale * problem.gates.eta.detach())
    y, state = recurrent(*problem.arguments())
    for h in range(2):
        expected, weights = run(problem, 0, h)
        assert error(y[0, h], expected) < 1e-10
        ours = [w[0, h].detach() for w in state.weights]
        ours[0] = in_basis(rule.features, ours[0], state.keys[0, h].detach())
        assert max(error(w, e) for w, e in zip(ours, weights, strict=True)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_as_it_stands(name, chunk):
    agree(RULES[name], chunk)


@pytest.mark.parametrize("name", RULES)
def test_frozen_gradients_and_decay_to_zero(name):
    """Normalised steps alone."""
    agree(RULES[name].printed().vary(optimiser={"normalised": True}), 4)


@pytest.mark.parametrize(
    "name", [name for name, rule in RULES.items() if rule.online and not rule.optimiser.estimates_change]
)
def test_online_gradients_alone(name):
    scale = 1e-5 if RULES[name].retention.has_mirror_map else 0.002 if RULES[name].network.norm else 0.03
    agree(RULES[name].printed().vary(optimiser={"online": True}), 4, scale)


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("retention", RETENTIONS.values(), ids=RETENTIONS)
def test_every_retention(retention, chunk):
    agree(replace(RULES["memora"], retention=retention), chunk)


@pytest.mark.parametrize("name", ["lact", "atlas"])
def test_the_pending_update_is_shown(name):
    agree(RULES[name].vary(optimiser={"every": None, "read_pending": True}), 4)
    with pytest.raises(ValueError, match="read_pending=True"):
        RULES[name].vary(optimiser={"normalised": False, "read_pending": True})


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
