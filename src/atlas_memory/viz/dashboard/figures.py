"""The figures that the dashboard draws: what each is called, what it says, and where its colours begin and end."""

from __future__ import annotations

from typing import NamedTuple

from atlas_memory.viz.report.names import GATES


class Figure(NamedTuple):
    """A figure of a memory in a look.

    Attributes:
        label: what it is called.
        says: what it is, in which unit, and what low and high mean.
        limits: its values where colours begin and end; None takes those there are.
    """

    label: str
    says: str
    limits: tuple[float, float] | None = None


UNIT = (0.0, 1.0)
SPREAD = ", spread"  # behind a gate's name: of its standard deviation

_GATES_SAY = {
    "alpha": "Share of the memory that the gate keeps at each token, mean over tokens. 1: nothing is forgotten; "
    "0.5: half is gone after one token.",
    "eta": "Size of the step by which a token is written, mean over tokens. 0: nothing is written; 1: the answer moves "
    "most of the way to what is written.",
    "theta": "Share of the last write's direction that goes on in the next, mean over tokens. 0: each write stands "
    "alone; near 1: writes go on for many tokens.",
    "gamma": "How many tokens of its window a write heeds: the sum of the window's gates, mean over tokens. 0: none; "
    "at most the window's size.",
    "delta": "Size of an error from which a robust loss (Huber, RobustL2) holds a write back, mean over tokens. Low: "
    "much is held back; high: hardly anything.",
}

MEASURES: dict[str, Figure] = {
    "half_life": Figure(
        "half-life (tokens)",
        "Tokens after which half of what was written is left by the gate α. Low: it forgets at once; high: it keeps.",
        (1.0, 1e4),
    ),
    "written": Figure(
        "answers moved by writing",
        "How far the memory's answer to a key has moved 16 tokens after the write, 0 to 1. 0: nothing was written, or "
        "it is forgotten.",
        UNIT,
    ),
    "surprise": Figure(
        "error before the write",
        "How wrong the memory is about a token before it is written. 0: it is right; 1: it knows nothing; at most 2.",
        UNIT,
    ),
    "error 16": Figure(
        "error 16 tokens after",
        "How wrong the memory is about a token 16 tokens after its write. 0: it is right; 1: it knows nothing (any "
        "more); at most 2.",
        UNIT,
    ),
    "error 256": Figure(
        "error 256 tokens after",
        "How wrong the memory is about a token 256 tokens after its write. 0: it is right; 1: it knows nothing (any "
        "more); at most 2.",
        UNIT,
    ),
    "share": Figure(
        "share of the output that hangs on it",
        "How much of the layer's output hangs on what was written: it is computed again with a memory that stays as "
        "training left it. 0: nothing, the memory is of no use; 1: all.",
        UNIT,
    ),
    "branch": Figure(
        "size of the branch beside what goes past it",
        "Norm of the layer's output divided by the norm of all that its block passes on. Near 0: the model leaves the "
        "layer aside; 1: as large as all the rest.",
    ),
    "norm": Figure(
        "norm",
        "Frobenius norm of the memory's matrices M at the end of the text, without a unit. Low: it holds little; "
        "growing from look to look without end: it runs away.",
    ),
    "moved": Figure(
        "distance from M_0",
        "Frobenius norm of M - M_0, without a unit: how far reading the text has moved the memory from where it "
        "begins. 0: nothing was written; high beside the norm: little of M_0 is left.",
    ),
    "momentum": Figure(
        "norm of the momentum",
        "Frobenius norm of S, the sum of past steps that the memory goes on with, at the end of the text, without a "
        "unit. 0: no step goes on; high: writes carry far.",
    ),
    "momentum_rank": Figure(
        "effective rank of the momentum",
        "In how many directions the last matrix of S differs. 1: writes push one way; at most its width.",
    ),
    "rank": Figure(
        "effective rank",
        "In how many directions the memory's last matrix differs. 1: all answers are alike; at most its width: it is "
        "used in full.",
    ),
    "turn": Figure(
        "bend of its path (degrees)",
        "Degrees by which the path of M bends from one piece of the text to the next. 0: straight on; 90: another "
        "direction; 120: each piece is forgotten in the next; 180: it takes all back.",
        (0.0, 180.0),
    ),
    **{
        name: Figure(label, _GATES_SAY[name], UNIT if name in ("eta", "theta") else None)
        for name, (label, _) in GATES.items()
    },
    **{
        name + SPREAD: Figure(
            label + SPREAD,
            f"Standard deviation of {label.split()[0]} over tokens. 0: the gate is the same at every token; high: it "
            "tells tokens apart.",
        )
        for name, (label, _) in GATES.items()
    },
}

CURVES = {  # of the page of runs
    "loss": "Mean cost of a token of the training text at each step. Lower is better; 0 would be to know every token.",
    "held out": "Mean cost of a byte of text that is never trained on. Lower is better; where it rises while the loss "
    "falls, the model learns by heart.",
    "share": "How much of a layer's output hangs on what its memory has written, mean over layers. 0: the memories are "
    "of no use; 1: all hangs on them.",
    "remembrance": "How far predictions move when all but the last tokens is taken away. 0: what is older is not used; "
    "1: all hangs on it.",
    "learning rate": "Size of the optimiser's steps. High: weights move fast; 0: they stand still.",
    "gradient": "Euclidean norm of the loss's gradient over all weights, before it is clipped. Leaps mean unsteady "
    "training.",
}
