"""Which calls take a kernel: a function of device type and shapes, so that no CUDA is needed to ask it."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from atlas_memory.kernels import dispatch
from atlas_memory.kernels.dispatch import supports, supports_gram
from atlas_memory.memory import MLP, RULES, Decay, DotProduct, Gates, GradientDescent, Identity, Keep, Linear, Rule

BARE = GradientDescent(bounded=False, live=False)
RULE = replace(RULES["omeganet"], features=Identity(), retention=Decay(), optimiser=BARE)
SHAPE = torch.Size([2, 4, 100, 64])


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda _: True)
    monkeypatch.setenv(dispatch.SWITCH, "1")


def ask(rule: Rule = RULE, device="cuda", dtype=torch.float32, shape=SHAPE, channels=False) -> bool:
    eta = torch.empty(shape if channels else shape[:3], device="meta")
    return supports(
        rule, device, dtype, shape, Gates(eta).complete(torch.empty(shape, device="meta"), rule.window.size)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"network": Linear()},
        {"network": Linear(residual=True)},
        {"network": MLP(expansion=1, activation="silu", residual=False)},
        {"bias": DotProduct()},
        {"retention": Keep()},
        {"bias": DotProduct(), "optimiser": GradientDescent(bounded=False)},
    ],
)
def test_rules_with_a_kernel(changes):
    assert ask(replace(RULE, **changes))


@pytest.mark.parametrize("name", RULES)
def test_named_rules_are_refused_unless_all_of_it_is_covered(name):
    """As they stand none is; with bare steps at frozen gradients, fading to zero, those on plain keys are."""
    rule = RULES[name]
    assert not ask(rule)
    bare = replace(rule, optimiser=BARE)
    if isinstance(rule.retention, Decay):
        bare = replace(bare, retention=Decay())
    linear = isinstance(rule.retention, Decay | Keep)
    after = rule.window.read == "after"
    assert ask(bare) == (isinstance(rule.features, Identity) and linear and not rule.network.norm and after)


@pytest.mark.parametrize(
    "options",
    [
        {"retention": {"to_start": True}},
        {"network": {"depth": 3}},
        {"network": {"bias": True}},
        {"network": {"norm": True}},
        {"window": {"read": "before"}},
        {"window": {"chunk": 8}},
        {"window": {"chunk": 128}},
        {"window": {"size": 18, "chunk": 16}},
        {"optimiser": {"kind": "Muon"}},
        {"optimiser": {"kind": "Momentum"}},
        {"bias": {"kind": "Lp"}},
        {"features": {"kind": "Polynomial"}},
    ],
)
def test_rules_without_a_kernel(options):
    assert not ask(RULE.vary(**options))


def test_calls_without_a_kernel(monkeypatch):
    assert not ask(device="cpu")
    assert not ask(dtype=torch.float64)
    assert not ask(shape=torch.Size([2, 4, 100, 48]))
    assert not ask(shape=torch.Size([2, 4, 0, 64]))
    assert not ask(channels=True)
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    assert not ask()
    assert not supports_gram("cuda", torch.float32, 64)


def test_no_kernel_is_taken_unasked(monkeypatch):
    monkeypatch.delenv(dispatch.SWITCH)
    assert not ask()
    assert not supports_gram("cuda", torch.float32, 64)


@pytest.mark.parametrize(
    "network,dim,size,fits",
    [
        (MLP(), 64, 8, True),
        (MLP(), 128, 1, True),
        (MLP(), 128, 2, False),
        (Linear(), 64, 1, True),
        (Linear(), 64, 2, False),
        (Linear(), 128, 1, False),
    ],
)
def test_shared_memory(network, dim, size, fits):
    rule = replace(RULE, network=network).vary(window={"size": size, "chunk": 64})
    assert ask(rule, shape=torch.Size([2, 4, 9, dim])) == fits


def test_gram_matrices():
    assert supports_gram("cuda", torch.float32, 64) and supports_gram("cuda", torch.float32, 5)
    assert not supports_gram("cpu", torch.float32, 64)
    assert not supports_gram("cuda", torch.float64, 64)  # Muon's `precise`
    assert not supports_gram("cuda", torch.float32, 128)


def test_the_library_does_not_need_triton():
    """With triton hidden, everything imports and a call on the CPU works."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, atlas_memory\n"
        "from atlas_memory.kernels.dispatch import supports\n"
        "y, _ = atlas_memory.NeuralMemory(32, 2, rule='omeganet')(torch.randn(1, 9, 32))\n"
        "print(tuple(y.shape), any(m.startswith('atlas_memory.kernels.chunk') for m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "(1, 9, 32) False", done.stderr
