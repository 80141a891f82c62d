"""The synthetic tasks: every answer can be known from what stands before it."""

import numpy as np
import pytest
import torch

from atlas_memory.bench.associative_recall import mqar
from atlas_memory.bench.mad import MAD
from atlas_memory.bench.task import IGNORED, Task
from atlas_memory.bench.task_training import Autoencoder, accuracy, task_model, train_on

TASKS = {task.name: task for task in MAD}


def places(labels: torch.Tensor) -> list[int]:
    return (labels != IGNORED).nonzero().flatten().tolist()


@pytest.mark.parametrize("task", [mqar(8, 64), mqar(64, 256, 300), *MAD], ids=lambda task: task.name)
def test_rows(task: Task) -> None:
    """Of the right shape and vocabulary; a seed is the same everywhere; the evaluation has others than training."""
    ids, labels = task.rows(20, 3, asked=True)
    assert ids.shape == labels.shape == (20, task.length) and ids.dtype == labels.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < task.vocab_size
    asked = labels[labels != IGNORED]
    assert len(asked) and asked.min() >= 0 and asked.max() < task.vocab_size
    assert all(map(torch.equal, (ids, labels), task.rows(20, 3, asked=True)))
    assert not torch.equal(ids, task.rows(20, 4, asked=True)[0])
    assert not torch.equal(ids, task.rows(20, 3, asked=False)[0])


@pytest.mark.parametrize("pairs,length", [(1, 4), (8, 64), (16, 64), (64, 256)])
def test_mqar_asks_for_every_value_once(pairs: int, length: int) -> None:
    ids, labels = (x.tolist() for x in mqar(pairs, length, 512).rows(50, 0, asked=True))
    for row, wanted in zip(ids, labels, strict=True):
        known = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(known) == pairs and max(known) < 256 <= min(known.values())
        at = places(torch.tensor(wanted))
        assert [known[row[t]] for t in at] == [wanted[t] for t in at]
        assert sorted(row[t] for t in at) == sorted(known) and min(at) >= 2 * pairs
        assert all(row[t] == 0 for t in range(2 * pairs, length) if t not in at)


def test_mqar_asks_early_more_often() -> None:
    """A power law: of 8 questions at 24 places, the first is used in nearly every row, the last in few."""
    _, labels = mqar(8, 64).rows(2000, 0, asked=True)
    share = (labels != IGNORED).float().mean(0)[16::2]
    assert share[0] > 0.9 > 0.6 > share[4] and share[-1] < 0.25 and (labels[:, 17::2] == IGNORED).all()


@pytest.mark.parametrize("pairs,length,vocabulary", [(0, 64, 512), (17, 64, 512), (8, 65, 512), (8, 64, 16)])
def test_mqar_that_does_not_fit(pairs: int, length: int, vocabulary: int) -> None:
    with pytest.raises(ValueError, match="MQAR of"):
        mqar(pairs, length, vocabulary)


@pytest.mark.parametrize("name", ["recall", "noisy-recall"])
def test_mad_recall(name: str) -> None:
    """A key has one value in a sequence; values of keys that came before are asked, and the last."""
    task = TASKS[name]
    half = 8
    ids, labels = task.rows(50, 0, asked=True)
    noise = 0
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        known: dict[int, int] = {}
        row = [*row, wanted[-1]]
        for t in range(0, task.length, 2):
            key, value = row[t], row[t + 1]
            if key >= 16:
                noise += 1
                assert value >= 16 and wanted[t] == IGNORED
                continue
            assert key < half <= value < 16 and known.setdefault(key, value) == value
            assert wanted[t] == (value if key in row[:t:2] else IGNORED)
            assert t == 0 or wanted[t - 1] == IGNORED
        assert wanted[-1] != IGNORED
    assert 0.15 < noise / 50 / 64 < 0.25 if name == "noisy-recall" else noise == 0
    ids, labels = task.rows(5, 0, asked=False)
    assert torch.equal(labels[:, :-1], ids[:, 1:])  # training asks for everything


def test_mad_fuzzy_recall() -> None:
    """Keys of three tokens in the evaluation; the last one came before with the same value."""
    task = TASKS["fuzzy-recall"]
    ids, labels = task.rows(50, 0, asked=True)
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        whole = [token for token in [*row, wanted[-1]] if token != 15]
        motifs: list[list[int]] = []
        for before, token in zip([99, *whole], whole, strict=False):
            starts = before == 99 or (before >= 7) != (token >= 7)
            motifs += [[token]] if starts else []
            if not starts:
                motifs[-1].append(token)
        keys, values = motifs[::2], motifs[1::2]
        assert all(len(key) == 3 == len(set(key)) for key in keys) and all(1 <= len(v) <= 3 for v in values)
        known: dict[tuple[int, ...], list[int]] = {}
        for key, value in zip(keys, values, strict=True):
            assert known.setdefault(tuple(key), value) == value
        assert keys[-1] in keys[:-1]
        assert [wanted[t] for t in places(torch.tensor(wanted))][-len(values[-1]) :] == values[-1]
    trained, _ = task.rows(50, 0, asked=False)
    assert trained.shape == ids.shape


def test_mad_selective_copying() -> None:
    ids, labels = TASKS["selective-copying"].rows(50, 0, asked=True)
    for row, wanted in zip(ids, labels, strict=True):
        assert row[239] == 15 and places(wanted) == list(range(240, 256))
        assert row[:239][row[:239] != 14].tolist() == wanted[240:].tolist() and (row[240:] == 14).all()


def test_mad_compression_and_memorisation() -> None:
    ids, labels = TASKS["compression"].rows(9, 0, asked=True)
    assert torch.equal(ids, labels) and (ids[:, -1] == 15).all() and (ids[:, :-1] < 15).all()
    known: dict[int, int] = {}
    for seed in (0, 1):
        ids, labels = TASKS["memorisation"].rows(200, seed, asked=bool(seed))
        for key, value in zip(ids[:, ::2].flatten().tolist(), labels[:, 1::2].flatten().tolist(), strict=True):
            assert known.setdefault(key, value) == value
        assert (ids[:, 1::2] == 255).all() and (labels[:, ::2] == IGNORED).all()
    assert len(known) == len(set(known.values())) == 127


def test_training_learns_and_is_the_same_each_time() -> None:
    task = mqar(4, 16, 64)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = task_model("gated-deltanet", 64, 32, 16)
        before = accuracy(model, task, 64, 7)
        assert train_on(model, [task], 40, 512, 1e-2, 0) == 40
        found.append(accuracy(model, task, 64, 7))
    assert before < 0.5 < 0.9 < found[0] == found[1]
    assert train_on(model, [task], 500, 128, 1e-3, 0, solved=0.9) == 50  # it is solved when it is first asked


def test_the_share_of_right_answers_is_counted_over_the_places_that_are_asked() -> None:
    task, model = mqar(4, 16, 64), task_model("attention", 64, 32, 16)
    ids, labels = task.rows(10, 5, asked=True)
    said = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    assert accuracy(model, task, 10, 5) == float((said == labels)[labels != IGNORED].float().mean())


def test_an_autoencoder_knows_the_last_token_alone() -> None:
    model = Autoencoder(task_model("titans", 16, 32, 16), 32)
    ids, _ = TASKS["compression"].rows(3, 0, asked=True)
    logits = model(ids)
    assert logits.shape == (3, 32, 16)
    (grad,) = torch.autograd.grad(logits.sum(), model.model.get_input_embeddings().weight)
    assert grad.isfinite().all() and grad.abs().sum() > 0
    train_on(model, [TASKS["compression"]], 2, 96, 1e-3, 0)


def test_a_loss_that_is_not_finite_ends_training() -> None:
    model = task_model("titans", 64, 32, 16)
    with torch.no_grad():
        model.get_input_embeddings().weight[5:9] = np.inf
    with pytest.raises(ValueError, match="nan or inf at step 1"):
        train_on(model, [mqar(8, 64, 64)], 5, 2048, 1e-2, 0)


@pytest.mark.parametrize(
    "name,block",
    [
        ("titans", "lmm"),
        ("attention", "attention"),
        ("mag:titans", "mag"),
        ("attention+conv", "attention"),
        ("atlas++", "lmm"),
        ("atlas+++4d", "lmm"),
        ("gated-deltanet+degree-2", "lmm"),
    ],
)
def test_models_by_name(name: str, block: str) -> None:
    model = task_model(name, 32, 32, 16)
    assert model.config.block == block
    ids = torch.randint(32, (2, 20))
    other = ids.clone()
    other[:, 10:] = 0
    with torch.no_grad():
        one, two = (model.eval()(input_ids=x, use_cache=False).logits[:, :10] for x in (ids, other))
    assert torch.allclose(one, two, atol=1e-5)


def test_what_is_added_to_a_rule() -> None:
    small, wide = (task_model(name, 32, 32, 16).config.memory_rule() for name in ("titans", "titans+4d"))
    assert small.network.expansion == 1 and wide == small.vary(network={"expansion": 4})
    plain, squared = (task_model(name, 32, 32, 16).config.memory_rule() for name in ("deltanet", "deltanet+degree-2"))
    assert squared == plain.vary(features={"kind": "Polynomial", "degree": 2}) != plain


def test_models_that_are_none() -> None:
    for name, message in (
        ("titan", "titan"),
        ("mag:titan", "titan"),
        ("attention+fast", "is unknown; choose"),
        ("deltanet+4d", "expansion"),
    ):
        with pytest.raises(ValueError, match=message):
            task_model(name, 32, 32, 16)
    with pytest.raises(ValueError, match="do not divide"):
        task_model("titans", 32, 40, 16)
