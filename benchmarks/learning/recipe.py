"""The recipe: what one change of memory or training is worth to a small language model, at equal tokens."""

from __future__ import annotations

from .orders import BLOCKS, COLUMNS, STEPS, trained
from .study import Study

# Options of `atlas train` in the place of the first row's: titans on bytes in preset tiny, rows that carry what they
# remember, 16 lanes.
CHANGES = {
    "titans": (),
    "memory of 4 widths": ("model.rule_options.network.expansion=4",),
    "fading to zero": ("model.rule_options.retention.to_initial=false",),
    "degree 2": ("model.rule_options.features={kind: Polynomial, degree: 2}",),
    "window of 4": ("model.rule_options.window.size=4",),
    "no gate of momentum": ("model.rule_options.optimiser={kind: GradientDescent}",),
    "4 lanes": ("data.interleave=4",),
    "64 lanes": ("data.interleave=64",),
    "a place for 32 segments": ("data.reset_every=32",),
    "segments of 64": ("data.seq_len=64", "train.batch_size=32"),
    "segments of 256": ("data.seq_len=256", "train.batch_size=8"),
    "segments that grow": ("data.seq_len_schedule={450: 512}",),
    "half of beginnings with a memory": ("data.reset_every=32", "data.pass_states=0.5"),
    "muon at 0.003": ("train.optimizer=muon",),
    "muon at 0.01": ("train.optimizer=muon", "train.learning_rate=0.01"),
    "omeganet": ("model.rule=omeganet",),
    "gated-deltanet": ("model.rule=gated-deltanet",),
    "gated-deltanet with gates at a tenth": ("model.rule=gated-deltanet", "train.gate_lr_scale=0.1"),
    "gated-deltanet with gates at a hundredth": ("model.rule=gated-deltanet", "train.gate_lr_scale=0.01"),
    "gated-deltanet with muon and gates at a tenth": (
        "model.rule=gated-deltanet",
        "train.optimizer=muon",
        "train.gate_lr_scale=0.1",
    ),
    "gated-deltanet with muon and gates at a hundredth": (
        "model.rule=gated-deltanet",
        "train.optimizer=muon",
        "train.gate_lr_scale=0.01",
    ),
    "gates at a tenth": ("train.gate_lr_scale=0.1",),
    "muon and gates at a tenth": ("train.optimizer=muon", "train.gate_lr_scale=0.1"),
    "gated-deltanet with muon at 0.003": ("model.rule=gated-deltanet", "train.optimizer=muon"),
    # MLPs that make up for what a memory holds in M_0: as many parameters as gated-deltanet with heads of 64.
    "as large as gated-deltanet": ("model.intermediate_size=362",),
    "as large without the residual": ("model.intermediate_size=362", "model.rule_options.network.residual=false"),
}
# The same of words.
WORDS: dict[str, tuple[str, ...]] = {
    f"words: {rule}": (f"model.rule={rule}",) for rule in ("titans", "gated-deltanet", "deltanet", "omeganet")
}
WORDS |= {
    f"words: gated-deltanet carry {n}": (*WORDS["words: gated-deltanet"], f"data.reset_every={n}") for n in (4, 16)
}
WORDS |= {
    "words: sliding window": BLOCKS["swa: stream 16 lanes"],
    "words: Transformer crops of 1024": BLOCKS["attention: crops of 1024"],
}
CHANGES |= {name: ("data.tokenizer=words", *options) for name, options in WORDS.items()}


def worth(case: str, dim: int, seed: int, quick: bool, text: str | None = None, steps: int = STEPS) -> dict[str, float]:
    """See ``RECIPE``."""
    changes = CHANGES[case]
    named = any(change.startswith(("model.rule=", "model.block=")) for change in changes)
    rule = () if named else ("model.rule=titans",)
    return trained([*rule, "data.interleave=16", *changes], dim, seed, quick, text, steps)


RECIPE = Study(
    name="recipe",
    shows="The model of study orders with `titans` and 16 lanes, of bytes or words, with one thing changed: what is "
    "learned in 900 steps (or `--steps`) of 2,048 tokens, and what tokens older than 128 save.",
    cases=tuple(CHANGES),
    widths=(64,),
    measure=worth,
    columns=COLUMNS,
)
