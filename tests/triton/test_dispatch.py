"""Which calls take a kernel: a function of device type and shapes, so that no CUDA is needed to ask it; and what
``kernels=`` of the forms says."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from atlas_memory.memory import (
    RULES,
    Gates,
    Keep,
    Linear,
    Rule,
    chunkwise,
    gram_polynomial,
)
from atlas_memory.ops.triton import kernel_support as dispatch
from atlas_memory.ops.triton.kernel_support import convolution_refusal, delta_refusal, gram_refusal, taken

from ..ops.problems import error, random_problem

RULE = RULES["gated-deltanet"].vary(window={"chunk": 64})
SHAPE = torch.Size([2, 4, 100, 64])


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.setattr(dispatch, "find_spec", lambda _: True)
    monkeypatch.setenv(dispatch.SWITCH, "1")


def ask(
    rule: Rule = RULE, device="cuda", dtype=torch.float32, shape=SHAPE, channels=False, kernels=None, **how
) -> bool:
    gate = Gates(torch.empty(shape if channels else shape[:3], device="meta"))
    gate = gate.complete(torch.empty(shape, device="meta"), rule.window.size)
    return taken(kernels, delta_refusal, rule, device, dtype, shape, gate, **how)


def ask_gram(device: str, dtype: torch.dtype, size: int) -> bool:
    return taken(None, gram_refusal, device, dtype, size)


@pytest.mark.parametrize("changes", [{}, {"retention": Keep()}, {"network": Linear(residual=True)}])
def test_rules_with_a_kernel(changes):
    assert ask(replace(RULE, **changes))


@pytest.mark.parametrize("name", RULES)
def test_named_rules_are_refused_unless_all_of_it_is_covered(name):
    assert ask(RULES[name].vary(window={"chunk": 64})) == (name in ("deltanet", "gated-deltanet"))
    assert dispatch.is_delta(RULES[name]) == (name in ("deltanet", "gated-deltanet", "hope"))


def refused(why: str, **call) -> None:
    """Quietly where it is left open, with the reason in one line where kernels are asked for."""
    assert not ask(**call)
    with pytest.raises(ValueError, match=f"kernels=True, but no kernel {why}.*; or leave kernels out") as caught:
        ask(kernels=True, **call)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options,why",
    [
        ({"retention": {"to_initial": True}}, "decays to M_0: retention must have to_initial=False"),
        ({"network": {"norm": True}}, "knows the layer norm: network must have norm=False"),
        ({"network": {"kind": "MLP"}}, "knows MLP: network must be Linear"),
        ({"window": {"read": "before"}}, "reads 'before': window must have read='after'"),
        ({"window": {"chunk": 8}}, "has chunks of 8: window must have chunk=16 or 32 or 64"),
        ({"window": {"chunk": 128}}, "has chunks of 128"),
        ({"optimiser": {"normalised": True}}, "knows normalised steps: optimiser must have normalised=False"),
        ({"bias": {"kind": "L2"}}, "knows L2: bias must be DotProduct"),
    ],
)
def test_rules_without_a_kernel(options, why):
    refused(why, rule=RULE.vary(**options))


def test_calls_without_a_kernel(monkeypatch):
    monkeypatch.delenv(dispatch.INTERPRETER)
    refused("runs on cpu: move everything to a CUDA device", device="cpu")
    refused("computes in float64: give float32", dtype=torch.float64)
    refused("has heads of width 128: it must be 16 or 32 or 48 or 64", shape=torch.Size([2, 4, 100, 128]))
    refused("reads nothing", shape=torch.Size([2, 4, 0, 64]))
    refused("has gates a channel: give eta and alpha as", channels=True)
    monkeypatch.setattr(dispatch, "find_spec", lambda _: None)
    refused("runs without Triton: pip install triton")
    assert not ask_gram("cuda", torch.float32, 64)


def test_no_kernel_is_taken_by_default(monkeypatch):
    assert not ask(kernels=False)
    monkeypatch.delenv(dispatch.SWITCH)
    assert not ask()
    assert not ask_gram("cuda", torch.float32, 64)
    assert ask(kernels=True)


def test_what_is_taken_by_default(monkeypatch):
    """Only after a check, of a call that has a kernel, and not in the interpreter; with the environment variable at 0
    nothing is."""
    monkeypatch.delenv(dispatch.SWITCH)
    monkeypatch.delenv(dispatch.INTERPRETER)
    tried = []
    yes, no = lambda: tried.append(1) or True, lambda: tried.append(0) or False
    assert not ask() and not tried
    assert ask(by_default=yes) and not ask(by_default=no) and tried == [1, 0]
    assert not ask(by_default=yes, kernels=False) and not ask(by_default=yes, dtype=torch.float64)
    assert ask(by_default=no, kernels=True) and tried == [1, 0]
    assert taken(None, convolution_refusal, "cuda", torch.bfloat16, by_default=yes)
    monkeypatch.setenv(dispatch.INTERPRETER, "1")
    assert not ask(by_default=yes) and ask(by_default=yes, kernels=True)
    monkeypatch.delenv(dispatch.INTERPRETER)
    monkeypatch.setenv(dispatch.SWITCH, "0")
    assert not ask(by_default=yes) and ask(by_default=yes, kernels=True) and tried == [1, 0, 1]


def test_transforms_of_pytorch_take_none():
    """What they cannot look into."""
    with torch.autograd.forward_ad.dual_level():
        assert (
            convolution_refusal("cuda", torch.float32)
            == "has a derivative in forward mode: call it outside of dual_level"
        )
    found = []

    def look(x):
        found.append(convolution_refusal("cuda", torch.float32))
        return x

    torch.func.vmap(look)(torch.zeros(2))
    assert found == ["is known to torch.compile and torch.func: call it outside of them"]


def test_the_forms_refuse_with_a_reason(monkeypatch):
    """On the CPU, and what only the call itself knows: padding."""
    monkeypatch.delenv(dispatch.INTERPRETER)
    rule = RULE.vary(window={"chunk": 16})
    problem = random_problem(rule, 0, batch=1, heads=1, time=5, dim=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="no kernel runs on cpu: move everything to a CUDA device"):
        chunkwise(*problem.arguments(), kernels=True)
    with pytest.raises(ValueError, match="no kernel runs on cpu: move everything to a CUDA device"):
        gram_polynomial(torch.eye(16), kernels=True)
    with pytest.raises(ValueError, match="no kernel takes Gram matrices of 65 rows: they must have 1 to 64"):
        gram_polynomial(torch.eye(65), kernels=True)
    padded = replace(problem, gates=replace(problem.gates, length=torch.tensor([3])))
    with pytest.raises(ValueError, match=r"no kernel knows padding: leave gates\.length out"):
        chunkwise(*padded.arguments(), kernels=True)


def test_the_forms_take_kernels_where_they_are_asked_for(monkeypatch):
    """In the interpreter: True takes one, False none, and None one where the environment says so."""
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    from atlas_memory.ops.triton import delta_rule as delta
    from atlas_memory.ops.triton import gram_newton_schulz

    calls = []
    for module, name in ((delta, "delta_recurrence"), (gram_newton_schulz, "gram_newton_schulz")):
        form = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *call, form=form, name=name: (calls.append(name), form(*call))[1])
    rule = RULE.vary(window={"chunk": 16})
    problem = random_problem(rule, 0, batch=1, heads=1, time=20, dim=16, dtype=torch.float32)
    keys, results = problem.k.detach()[0, 0, :, :16], []
    for kernels, switch, expected in ((True, "0", 2), (False, "1", 0), (None, "0", 0), (None, "1", 2)):
        monkeypatch.setenv(dispatch.SWITCH, switch)
        calls.clear()
        y, state = chunkwise(*problem.arguments(), kernels=kernels)
        results.append((y, gram_polynomial(keys.mT @ keys, kernels=kernels)))
        assert len(calls) == expected
    for y, polynomial in results:
        assert error(y, results[1][0]) < 1e-5 and error(polynomial, results[1][1]) < 1e-4
    with pytest.raises(ValueError, match="no kernel begins inside a chunk: give a state after a multiple of 16 tokens"):
        chunkwise(*problem.arguments(), state, kernels=True)


def test_in_training_large_gram_matrices_take_a_kernel_only_when_asked(monkeypatch):
    """Its backward pass is slower than PyTorch's."""
    pytest.importorskip("triton", reason="the kernels need triton, which is not installed")
    from atlas_memory.ops.triton import gram_newton_schulz

    calls = []
    form = gram_newton_schulz.gram_newton_schulz
    monkeypatch.setattr(
        gram_newton_schulz, "gram_newton_schulz", lambda *a: (calls.append(a[0].shape[-1]), form(*a))[1]
    )
    for size, gradients, kernels in ((17, True, None), (17, False, None), (16, True, None), (17, True, True)):
        gram_polynomial(torch.eye(size).requires_grad_(gradients), kernels=kernels)
    assert calls == [17, 16, 17]


def test_gram_matrices(monkeypatch):
    monkeypatch.delenv(dispatch.INTERPRETER)
    assert ask_gram("cuda", torch.float32, 64) and ask_gram("cuda", torch.float32, 5)
    assert not ask_gram("cpu", torch.float32, 64)
    assert not ask_gram("cuda", torch.float64, 64)  # Muon's `precise`
    assert not ask_gram("cuda", torch.float32, 128)


def test_the_library_does_not_need_triton():
    """With triton hidden, everything imports and a call on the CPU works."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, atlas_memory\n"
        "from atlas_memory.ops.triton.kernel_support import taken\n"
        "y, _ = atlas_memory.NeuralMemory(32, 2, rule='omeganet')(torch.randn(1, 9, 32))\n"
        "print(tuple(y.shape), any(m.startswith('atlas_memory.ops.triton.delta_rule') for m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "(1, 9, 32) False", done.stderr
