"""The studies of `atlas bench`: what each of their runs is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from atlas_memory.eval.suites import SUITES
from atlas_memory.eval.suites.suite import Sources

from . import capacity, referee
from .associative_recall import VOCABULARY, mqar
from .grid import Cell, Study
from .language_training import run_language
from .mad import ASKED, MAD
from .suite_training import run_suite
from .task_training import Autoencoder, accuracy, task_model, train_on

MQAR_TRAINED = ((4, 64), (8, 64), (16, 64), (32, 128))
MQAR_ASKED = (*MQAR_TRAINED[1:], (64, 256))
"""Pairs and tokens of the sequences to train on, one after the other, and to be asked."""
SEED = 99  # of what trained models are asked
HEAD = 16


def run_mqar(cell: Cell, settings: dict[str, Any]) -> dict[str, float]:
    """Train on all sizes; the share of right answers of each."""
    torch.manual_seed(cell["seed"])
    vocabulary = settings["vocabulary"]
    model = task_model(cell["model"], vocabulary, cell["width"], HEAD)
    trained = [mqar(pairs, length, vocabulary) for pairs, length in MQAR_TRAINED]
    train_on(model, trained, settings["steps"], settings["tokens"], cell["learning_rate"], cell["seed"])
    found = {f"{pairs} pairs in {length}": mqar(pairs, length, vocabulary) for pairs, length in MQAR_ASKED}
    shares = {name: accuracy(model, task, settings["asked"], SEED) for name, task in found.items()}
    return shares | {"parameters": float(model.num_parameters())}


def run_mad(cell: Cell, settings: dict[str, Any]) -> dict[str, float]:
    """Train on one of the six tasks; the share of right answers, and the steps after which it was solved, if it was."""
    torch.manual_seed(cell["seed"])
    task = next(task for task in MAD if task.name == cell["task"])
    model = task_model(cell["model"], task.vocab_size, settings["width"], HEAD, intermediate_size=2 * settings["width"])
    whole = Autoencoder(model, task.length) if task.autoencodes else model
    rate, solved = cell["learning_rate"], settings["solved"]
    steps = train_on(whole, [task], settings["steps"], settings["rows"] * task.length, rate, cell["seed"], solved)
    share = accuracy(whole, task, ASKED, SEED)
    return {task.name: share} | ({f"{task.name}, steps": float(steps)} if steps < settings["steps"] else {})


def run_capacity(cell: Cell, settings: dict[str, Any]) -> dict[str, float]:
    """See `capacity.measure`."""
    return capacity.measure(cell["memory"], cell["dim"], cell["seed"])


CAPACITY = Study(
    "capacity",
    "The most pairs of a random unit key and a random value that an untrained memory holds: answers and values have a "
    "mean squared cosine of 0.9. Nothing fades (alpha = 1), all of a window counts (gamma = 1); eta and theta are as "
    "layers start.",
    "ATLAS, arXiv 2505.23735, Propositions 1 and 2, Theorem 1",
    run_capacity,
    ("memory", "dim"),
    across=("stored, 1 reading", "stored, 64 readings"),
)
MQAR = Study(
    "mqar",
    "Two layers with heads of 16 are trained on sequences of 4 to 32 pairs, and are asked for the values of keys. The "
    "share of right answers.",
    "Zoology, arXiv 2312.04927",
    run_mqar,
    ("model", "width"),
    {"steps": 600, "tokens": 2048, "vocabulary": VOCABULARY, "asked": 512},
)
MAD_STUDY = Study(
    "mad",
    "Six tasks in their baseline settings, two blocks of a mixer and a SwiGLU MLP. The share of right answers.",
    "MAD, arXiv 2403.17844",
    run_mad,
    ("model",),
    {"steps": 2000, "rows": 128, "width": 128, "solved": 0.99},
)
REFEREE = Study(
    "referee",
    "Models whose memories are changed, trained and asked: the share of right answers, or bits per byte.",
    "Test-Time Training with KV Binding Is Secretly Linear Attention, arXiv 2602.21204",
    referee.run,
    ("rule", "switch"),
    {
        "steps": {"mqar": 300, "noisy-recall": 200, "bytes": 400},
        "tokens": 2048,
        "learning_rate": {"mqar": 1e-2, "noisy-recall": 1e-2, "bytes": 3e-3},
    },
)


def suite_study(settings: dict[str, Any], train: Sources, asked: Sources) -> Study:
    """Of a suite, whose texts are made of `train` and `asked`; see `run_suite`."""
    return Study(
        settings["suite"],
        "Two layers with heads of 32, trained on the answers to questions about short texts, and asked about longer "
        "ones. Sliding windows are as long as the longest text of training. The share of answers that are right to the "
        "letter.",
        SUITES[settings["suite"]].source,
        partial(run_suite, train=train, asked=asked),
        ("model",),
        settings | {"tokens": 4096, "vocabulary": 4096, "asked": 50},
    )


def language_study(settings: dict[str, Any], path: str | None) -> Study:
    """Of the text at `path`; see `run_language`."""
    return Study(
        "language",
        "Language models with heads of 32, their MLPs as wide as makes all equally large, trained on random stretches "
        "of a text. Sliding windows are as long as these. Bits per byte of held-out text, by tokens from its "
        "beginning.",
        "bits per byte of text",
        partial(run_language, path=path),
        ("model",),
        settings | {"tokens": 2048, "vocabulary": 4096},
    )
