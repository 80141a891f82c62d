"""Requests that are batched get the texts that they get alone, whatever each has read."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from atlas_memory.models import AtlasForCausalLM, Memory
from atlas_memory.serve.batching import Engine, Request, make_request
from tests.models.conftest import EVERY, MODELS

Make = Callable[..., AtlasForCausalLM]
GREEDY = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": 29}


def ids(time: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 29, (1, time), generator=torch.Generator().manual_seed(seed))


def request(memory: Memory, prompt: torch.Tensor, seed: int | None = None, **options: Any) -> Request:
    calls = {"on_token": lambda _: None, "on_end": None}
    calls |= {name: options.pop(name) for name in list(options) if name in calls}
    return make_request(memory, prompt, GenerationConfig(**GREEDY | options), None, seed, **calls)


EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in EVERY if name not in ("lmm-titans", "lmm-atlas")]


@pytest.mark.parametrize("name", ["lmm-titans", "lmm-atlas", *MODELS, *EXTENDED])
def test_together_as_alone(make: Make, name: str) -> None:
    """Of different lengths, which begin and end at different times, and more of them than rows."""
    model = make(**(EVERY | MODELS)[name])
    engine, found, expected = Engine(model, max_batch_size=4), [], []
    for n in range(7):
        memory = model.read(ids(5 + 3 * n, n)) if n else Memory.empty(model)
        kept: list[Memory] = []
        options = {"max_new_tokens": 3 + n % 4}
        found.append((engine.submit(request(memory, ids(n % 3, 50 + n), on_end=kept.append, **options)), kept))
        expected.append((memory, ids(n % 3, 50 + n), options))
    for (result, kept), (memory, prompt, options) in zip(found, expected, strict=True):
        alone = model.generate(prompt, memory=memory, **GREEDY | options)
        assert result.result(60) == alone[0, prompt.shape[1] :].tolist()
        after = model.read(alone, memory=memory)
        assert (kept[0].tokens, kept[0].last_token) == (after.tokens, after.last_token)
        for one, other in zip(kept[0].states, after.states, strict=True):
            for a, b in zip(one.tensors(), other.tensors(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def test_draws_are_those_of_generate(make: Make) -> None:
    model = make(rule="titans", window=1)
    memory, prompt, engine = model.read(ids(9, 1)), ids(4, 2), Engine(model)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2}
    options |= {"max_new_tokens": 8}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        alone = model.generate(prompt, memory=memory, eos_token_id=29, **options)[0, 4:].tolist()
    results = [engine.submit(request(memory, prompt, seed, **options)) for seed in (5, 6, 5)]
    found = [result.result(60) for result in results]
    assert found[0] == found[2] == alone != found[1]


def test_an_error_ends_one_request_alone(make: Make) -> None:
    model = make(rule="titans", window=1)
    memory, engine = model.read(ids(9, 1)), Engine(model)
    heard: list[int] = []

    def hang_up(token: int) -> None:
        heard.append(token)
        if len(heard) == 3:
            raise ConnectionError("nobody listens")

    def full(_: Memory) -> None:
        raise OSError("no space")

    left, kept = (
        engine.submit(request(memory, ids(4, 2), on_token=hang_up, eos_token_id=None)),
        engine.submit(request(memory, ids(4, 3))),
    )
    unsaved = engine.submit(request(memory, ids(4, 3), on_end=full))
    with pytest.raises(ConnectionError):
        left.result(60)
    with pytest.raises(OSError, match="no space"):
        unsaved.result(60)
    assert kept.result(60) == model.generate(ids(4, 3), memory=memory, **GREEDY)[0, 4:].tolist()
    model.model.forward = None  # every call fails
    with pytest.raises(TypeError):
        engine.submit(request(memory, ids(4, 3))).result(60)
    del model.model.forward
    assert engine.submit(request(memory, ids(4, 3))).result(60) == kept.result()


def test_a_request_joins_while_another_is_written(make: Make) -> None:
    model = make(rule="titans", window=1)
    memory, engine, begun, on = model.read(ids(9, 1)), Engine(model), threading.Event(), threading.Event()

    def wait(_: int) -> None:
        begun.set()
        on.wait(60)

    slow = engine.submit(request(memory, ids(4, 2), on_token=wait, max_new_tokens=40, eos_token_id=None))
    begun.wait(60)
    quick = engine.submit(request(memory, ids(4, 3), max_new_tokens=2, eos_token_id=None))
    on.set()
    assert len(quick.result(60)) == 2 and not slow.done()
    assert len(slow.result(60)) == 40


def test_values_out_of_range(make: Make) -> None:
    memory = Memory.empty(make(rule="titans", window=1))
    for options in ({"max_new_tokens": 0}, {"do_sample": True, "temperature": -1.0}):
        with pytest.raises(ValueError):
            request(memory, ids(4, 2), **options)
